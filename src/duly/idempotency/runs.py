"""Runs: one attempt at a time to carry out what a key stands for, across repeats, processes and crashes.

The laws. A run is stored as begun before it begins, and its end is stored before it is told. A repeat gets
the stored end; while the first one runs it waits, or hears that it runs. What a crash in the middle means is
declared beforehand, by the effect: with `at_most_once` the end is unknown and it is never run again, with
`at_least_once` the next caller runs it again. A run whose lease has ended cannot end what another one has
taken over.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import (
    Admit,
    Advance,
    Deliver,
    Delivery,
    DeliveryRef,
    Finish,
    Postpone,
    Results,
    Take,
    Withdraw,
    Write,
)
from duly.core.units import FOREVER, MS, SECOND
from duly.errors import DulyError, Malformed
from duly.idempotency.leases import Leases
from duly.storage.ledger import Ledger

DeclaredEffect = Literal["at_most_once", "at_least_once", "exactly_once"]

LONGEST: Final = 100 * 366 * 86_400.0
"""A hundred years. A longer time is a mistake in the unit, or stands for no limit."""

CHANNEL: Final = "once"
KINDS: Final = frozenset({"once", "http"})
"""The kinds of messages that stand for runs: calls of functions, and requests."""

OK, ERROR, UNSTORABLE = 0, 1, 2
"""Codes of the stored answer: a result, an exception, a result that could not be written down."""

CRASHED: Final = Answer(
    ERROR, b"", "its process died before the end was stored; whether it took effect is not known"
)
CANCELLED: Final = Answer(
    ERROR, b"", "it was cancelled while it was running; whether it took effect is not known"
)

_serial: Final = itertools.count(1)

_in_hand: Final[set[str]] = set()
"""The runs of this process that are under way, by the name of the worker in their deliveries."""

_begun: Final[set[str]] = set()
"""The runs of this process that have begun and whose outcome is not stored. A run of this
process that the ledger has and this set has not was cut off before it began, so it may run."""


def check_options(effect: object, errors: object, keep: object, lease: object) -> None:
    """Raise an error that says which of these options is wrong, such as a misspelt effect."""
    if effect not in typing.get_args(DeclaredEffect):
        known = ", ".join(typing.get_args(DeclaredEffect))
        raise Malformed(f"effect={effect!r} is not known; use one of {known}")
    if errors not in ("retry", "store"):
        raise Malformed(f"errors={errors!r} is not known; use 'retry' or 'store'")
    if keep is not None:
        _check_length("keep", keep)
    _check_length("lease", lease)


def _check_length(name: str, length: object) -> None:
    if not (isinstance(length, int | float) and 0 < length <= LONGEST):
        raise Malformed(f"{name}={length!r} must be a length of time in seconds, more than 0")


class Runs:
    """The runs of one function or route on one ledger."""

    def __init__(self, ledger: Ledger, *, effect: DeclaredEffect, keep: int | None, lease: int) -> None:
        self.ledger = ledger
        self.effect = effect
        self._keep = keep
        self._lease = lease
        self.leases = Leases(ledger, lease, ref_of)

    def admission(self, message: Message, now: int, *then: Write) -> Admit:
        """Return the operation that admits a message, and remembers it as long as its key is kept."""
        until = FOREVER if self._keep is None else now + self._keep
        return Admit(message, until, now, State.SENT, then, self._keep is not None)

    async def begin(self, message: Message, *, wait: bool = True) -> Run | Verdict:
        """Begin a run that the caller has to end; or return the verdict on a repeat: how the first run
        ended, or, unless the caller wants to wait for that, that it runs."""
        ledger = self.ledger
        now = ledger.clock.now()
        known = ledger.recall(message, now)
        if known is not None and known.state is not None and known.state.terminal:
            return known
        me = f"{ledger.worker}/{next(_serial)}"
        _in_hand.add(me)
        ours: Run | None = None
        try:
            while ours is None:
                # A random number, not 1: after a key was freed and admitted anew, a call that still
                # holds an attempt from before must not count as the owner of the new one.
                first = random.getrandbits(60) + 1
                deliver = Deliver(ref_of(message.key), now + self._lease, 0, first, me)
                admit = self.admission(message, now, deliver)
                try:
                    (results,) = await ledger.commit(((admit,),))
                except asyncio.CancelledError:
                    # It has not begun, so it must not be taken for a run that was cut short.
                    await asyncio.shield(asyncio.ensure_future(self._give_back(admit, first, me)))
                    raise
                verdict = results.of(admit)
                if verdict.fresh:
                    ours = Run(self, message, first, me)
                elif (
                    verdict.kind is not VerdictKind.DUPLICATE
                    or verdict.state is None
                    or verdict.state.terminal
                ):
                    return verdict
                else:
                    attempt = await self._take_over(message, me, wait)
                    if attempt == RUNNING:
                        return verdict
                    if attempt is not None:
                        ours = Run(self, message, attempt, me)
                    now = ledger.clock.now()  # for the next round
            return ours
        finally:
            if ours is None:
                _in_hand.discard(me)

    async def outcome(self, message: Message) -> Verdict | None:
        """Wait until a message has ended; None if it was not stored."""
        record = await self.ledger.wait(message.key)
        return None if record is None else Verdict(VerdictKind.DUPLICATE, record.state, record.answer)

    async def _give_back(self, admit: Admit, first: int, me: str) -> None:
        ledger, key = self.ledger, admit.message.key
        with suppress(DulyError):
            await ledger.write(admit)  # committed after the first admission, so the owner is known
            if any(delivery.worker == me for delivery in await ledger.deliveries(key)):
                reason, free = "cancelled before it began", (Withdraw(key),)
                await ledger.write(Finish(ref_of(key), first, State.CANCELLED, reason, free))

    async def _take_over(self, message: Message, me: str, wait: bool) -> int | None:
        """Wait for the run that has begun; if its process is dead, return the attempt that is now ours.
        Returns `RUNNING` if that process is alive and the caller does not wait; None if it is time to try
        again."""
        ledger = self.ledger
        with ledger.watch(message.key) as news:
            found = [d for d in await ledger.deliveries(message.key) if d.ref.channel == CHANNEL]
            if not found or found[0].state.terminal:
                return None  # it ended, or was withdrawn, just now
            delivery = found[0]
            now = ledger.clock.now()
            if not _abandoned(delivery, ledger, now):
                if not wait:
                    return RUNNING
                # A run of this process lives without a lease; the time limit is for a hint that was lost.
                lasts = self._lease if _ours(delivery, ledger) else delivery.due - now + MS
                await _wait(news, lasts, lambda: _is_gone(delivery, ledger))
                return None
        ref, attempt = delivery.ref, delivery.attempt
        if self.effect == "at_most_once" and _may_have_begun(delivery, ledger):
            await self.end(delivery.worker, self.finish(message, attempt, State.UNKNOWN, CRASHED))
            return None
        taken = await ledger.apply(Take(ref, attempt, me, now + self._lease))
        return attempt + 1 if taken else None

    def finish(self, message: Message, attempt: int, state: State, answer: Answer) -> Finish:
        """Return the operation that ends an attempt, and its message with it."""
        end = Advance(message.key, state, self.ledger.clock.now(), answer)
        return Finish(ref_of(message.key), attempt, state, answer.reason, (end,), kept=False)

    async def end(self, me: str, end: Finish | Postpone) -> bool:
        """Store the end of an attempt; returns False if it was taken over."""
        return await RunEnd(self.ledger, me, end).stored()


POLL_SECONDS: Final = 0.2
"""How often a repeat that waits checks whether the process of the first run still lives."""
RUNNING: Final = -1
"""Instead of an attempt: another process is running it."""


class RunEnd:
    """The end of an attempt, handed to the ledger's next flush."""

    __slots__ = ("_me", "_operation", "flushed")

    def __init__(self, ledger: Ledger, me: str, operation: Finish | Postpone) -> None:
        self._me = me
        self._operation = operation
        self.flushed = ledger.commit(((operation,),))
        """gives the results when it is stored"""

    def then(self, call: Callable[[object], object]) -> None:
        """Call this when the end is stored, or could not be stored; `stored` must be awaited as well."""
        self.flushed = done = asyncio.ensure_future(self.flushed)  # a ledger in memory gives no future
        done.add_done_callback(call)

    async def stored(self) -> bool:
        """Wait until it is stored; returns False if another attempt has taken over."""
        return self.held(await self.flushed)

    def held(self, results: Sequence[Results]) -> bool:
        """Note the results of the flush; returns False if another attempt has taken over."""
        _begun.discard(self._me)
        return results[0].of(self._operation)


class Run:
    """One attempt, which its caller carries out between `start` and one of the ends."""

    __slots__ = ("_attempt", "_me", "_message", "_runs")

    def __init__(self, runs: Runs, message: Message, attempt: int, me: str) -> None:
        self._runs = runs
        self._message = message
        self._attempt = attempt
        self._me = me

    def start(self) -> None:
        """Note that the effect may happen from now on; the lease is renewed until `leave`."""
        self._runs.leases.add(self._message.key, self._attempt)
        _begun.add(self._me)

    def leave(self) -> None:
        """Stop renewing the lease: the effect has happened, or will not."""
        self._runs.leases.remove(self._message.key)

    def ended(self, state: State, answer: Answer) -> RunEnd:
        """Hand the ledger the end of the run."""
        runs = self._runs
        return RunEnd(runs.ledger, self._me, runs.finish(self._message, self._attempt, state, answer))

    def freed(self, reason: str) -> RunEnd:
        """Hand the ledger that the run had no effect, so that its key may be used again."""
        key = self._message.key
        free = Finish(ref_of(key), self._attempt, State.FAILED, reason, (Withdraw(key),))
        return RunEnd(self._runs.ledger, self._me, free)

    async def end(self, state: State, answer: Answer) -> bool:
        """Store how it ended; returns False if another attempt has taken over."""
        return await self.ended(state, answer).stored()

    async def free(self, reason: str) -> None:
        """Store that the run had no effect, so that its key may be used again."""
        await self.freed(reason).stored()

    async def interrupted(self) -> None:
        """Store that the run was cut short in the middle, as by a crash that this process has survived."""
        runs = self._runs
        if runs.effect == "at_least_once":
            await runs.end(
                self._me,
                Postpone(ref_of(self._message.key), self._attempt, runs.ledger.clock.now(), "cancelled"),
            )
        else:
            await self.end(State.UNKNOWN, CANCELLED)

    async def outcome(self) -> Verdict | None:
        """Wait for the final outcome after another attempt has taken over; None if there is none."""
        return await self._runs.outcome(self._message)

    def close(self) -> None:
        """Release the key in this process; a run without an end counts as abandoned."""
        self.leave()
        _in_hand.discard(self._me)


def ref_of(key: bytes) -> DeliveryRef:
    """Return the delivery that stands for the run of the message of this key."""
    return DeliveryRef(key, CHANNEL, "run")


def _abandoned(delivery: Delivery, ledger: Ledger, now: int) -> bool:
    if delivery.state is State.ACCEPTED:
        return True  # given back
    if _ours(delivery, ledger):
        return delivery.worker not in _in_hand  # the ledger failed when it was to begin or to end
    return ledger.sole or delivery.due <= now or _is_gone(delivery, ledger)


def _is_gone(delivery: Delivery, ledger: Ledger) -> bool:
    """Return whether the process of a run has certainly ended, whatever its lease says."""
    return not _ours(delivery, ledger) and ledger.is_gone(delivery.worker.partition("/")[0])


async def _wait(news: asyncio.Future[None], lasts: int, is_gone: Callable[[], bool]) -> None:
    """Wait for news at most for this time (µs), and no longer than the process of the run lives."""
    loop = asyncio.get_running_loop()
    until = loop.time() + lasts / SECOND
    while not news.done() and not is_gone() and (left := until - loop.time()) > 0:
        await asyncio.wait([news], timeout=min(left, POLL_SECONDS))


def _may_have_begun(delivery: Delivery, ledger: Ledger) -> bool:
    if delivery.state is not State.SENT:
        return False
    return delivery.worker in _begun or not _ours(delivery, ledger)


def _ours(delivery: Delivery, ledger: Ledger) -> bool:
    return delivery.worker.startswith(ledger.worker + "/")
