"""`duly.Consumer`: runs a handler once for each message of an at-least-once queue, in order.

The laws. A message is stored before `accept` returns, and has ended before `handle` returns; only then is it
acknowledged to the queue, so no crash loses it. A repeat never runs: it gets the outcome of the first. The
messages of a lane run one at a time in the order of their counter. The declared effect of the handler decides
what happens after a crash in the middle. If the ledger cannot store a message, the call raises an error: the
message is not acknowledged, and the queue delivers it again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from duly.clients.base import Lifecycle, fail, settle
from duly.clients.consumer.group import ConsumerGroup
from duly.clients.consumer.queue_message import (
    Outcome,
    QueueMessage,
    answer_of,
    from_message,
    outcome_of,
    refused,
    to_message,
)
from duly.clients.local_ledger import store_url
from duly.cluster.notifiers import open_notifier
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import NAME_LIMIT, Answer, Message, Mode, Verdict, VerdictKind
from duly.core.operations import Advance, Finish, RecordRefusal
from duly.core.ordering import LanePolicy
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import Answered, Arrived, AttemptFailed, Effect, Event, Reply, ReportOutcome, Transmit
from duly.core.units import DAY, FOREVER, SECOND
from duly.errors import LedgerError, Malformed, ProgramError, SenderError, Stopped, TaskFailed
from duly.runtime.engine import Engine
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.storage import open_ledger
from duly.storage.ledger import Ledger

LOG: Final = logging.getLogger("duly.consumer")

BACKLOG: Final = 10_000
"""The most stored messages that have not ended. `accept` waits while there are more."""
DRAIN: Final = 5.0
"""Seconds that handlers get to finish when the consumer stops."""
PRUNE_EVERY: Final = 60.0
REASON: Final = 500

RunEffect: TypeAlias = Literal["at_most_once", "at_least_once", "exactly_once"]
OrderWord: TypeAlias = Literal["replay", "latest"]


class _WaitingCall:
    """A caller that waits for a message: first until it is stored, then until it has ended."""

    __slots__ = ("ended", "key", "replied")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.key = b""
        self.replied: asyncio.Future[Verdict] = loop.create_future()
        self.ended: asyncio.Future[Outcome] = loop.create_future()


class _TakenOver(Exception):
    """Rolls back the transaction of a run that another consumer has taken over."""


class Consumer(Lifecycle):
    """Runs each message of a queue once, in order, however often the queue delivers it.

    async with duly.Consumer("sqlite:///lamp.db", handler, order="latest") as consumer:
        async for delivery in queue:
            await consumer.accept(duly.QueueMessage(delivery.id, delivery.body, lane="kitchen", n=delivery.n))
            await delivery.ack()

    `handler` is an async function, or a plain one, which then runs in a thread. It gets a `QueueMessage`;
    what it returns is the result, which every repeat gets too. `effect` says what a crash in the middle of it
    means: `at_most_once` (its outcome is unknown, and it is not run again), `at_least_once` (it is run
    again), or `exactly_once` (the handler gets the ledger's transaction as its first argument, and what it
    writes there is committed with the end). `order` is what a lane does: `replay` runs every message in
    order, `latest` only the newest. A gap in the counters is waited for, at most `window` seconds. A message
    that is older than `max_age` seconds is stale and never run. A handler that raises is run again as `retry`
    says; not with `at_most_once`. A handler raises `duly.TaskFailed` to fail for good.

    On PostgreSQL all consumers of one `name` work together. Of messages without a lane at most `concurrency`
    run at a time; of each lane, one.
    """

    def __init__(
        self,
        ledger: str | Ledger,
        handler: Callable[..., object],
        *,
        name: str = "consumer",
        effect: RunEffect = "at_most_once",
        order: OrderWord = "replay",
        window: float = 0.3,
        max_age: float = DAY / SECOND,
        retry: RetryPolicy | None = None,
        concurrency: int = 100,
        notifier: str = "",
    ) -> None:
        _check_ledger(ledger)
        _check(handler, name, effect, order, retry)
        if type(concurrency) is not int or concurrency < 1:
            raise Malformed(f"concurrency={concurrency!r} is not a number of handlers; use 1 or more")
        self._given, self._handler, self.name, self._effect = ledger, handler, name, effect
        self._mode = Mode(order)
        self._policy = OutboxPolicy(f"consume {name}", None, retry or RetryPolicy.never(), patience=FOREVER)
        self._lanes = LanePolicy(window=_micros("window", window), serial=True, width=concurrency)
        self._horizon = Horizon(keep=_micros("max_age", max_age))
        self._notifier = notifier
        self._ledger: Ledger | None = None
        self._group: ConsumerGroup | None = None
        self._calls: dict[bytes, list[_WaitingCall]] = {}
        self._offered = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self._stack = AsyncExitStack()
        self.tasks = Supervisor()

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open the ledger, resume its messages, and join the other consumers of this name."""
        if self._ledger is not None:
            raise ProgramError("this consumer is running already")
        async with AsyncExitStack() as stack:
            ledger = self._ledger = await self._open(stack)
            stack.callback(setattr, self, "_ledger", None)
            if self._effect == "exactly_once":
                async with ledger.transaction():
                    pass  # a ledger that has none says so now
            self.tasks = Supervisor()
            self._inbox = Inbox(
                self._policy,
                ledger.worker,
                lanes=self._lanes if ledger.sole else msgspec.structs.replace(self._lanes, gated=True),
                horizon=lambda _: self._horizon,
                repeatable=lambda _: self._effect != "at_most_once",
                shared=not ledger.sole,
                adopt=not ledger.sole,
            )
            self._group = None if ledger.sole else self._join(ledger)
            self._engine = Engine(
                self._inbox, ledger, self._perform, ours=None if self._group is None else self._group.ours
            )
            await self._engine.start()
            stack.push_async_callback(self._engine.stop)
            self.tasks.spawn("engine of the consumer", self._engine.live, tries=ENGINE_TRIES)
            stack.push_async_callback(self._end_work)
            if self._group is not None:
                stack.push_async_callback(self._group.leave)
                await self._group.start(self._engine)
                self.tasks.adopt(self._group.tasks)
            self.tasks.every("forgetting what is over", PRUNE_EVERY, self._prune)
            self._stack = stack.pop_all()

    async def ready(self) -> None:
        """Return at once: a consumer that has started is ready."""

    async def stop(self) -> None:
        """Accept nothing more, wait for handlers, and store their outcomes. Waiting messages stay in the
        ledger."""
        if self._ledger is None:
            return
        await self.tasks.stop_periodic()
        await self._stack.aclose()
        for call in [call for calls in self._calls.values() for call in calls]:
            _abandon(call)
        self._calls.clear()
        while self._room:
            settle(self._room.popleft(), None)

    async def _open(self, stack: AsyncExitStack) -> Ledger:
        if isinstance(self._given, Ledger):
            return self._given
        return await stack.enter_async_context(await open_ledger(store_url(self._given)))

    def _join(self, ledger: Ledger) -> ConsumerGroup:
        url = self._given if isinstance(self._given, str) else ""
        address = self._notifier or ("postgres" if url.startswith("postgres") else "local")
        return ConsumerGroup(self.name, ledger, open_notifier(address, ledger.worker, url), self._inbox)

    async def _end_work(self) -> None:
        await self.tasks.finish(DRAIN)
        await self.tasks.stop()

    async def _prune(self) -> None:
        with suppress(LedgerError, Stopped):
            while await self._running().prune() == 1_000:
                pass

    def _running(self) -> Ledger:
        if self._ledger is None:
            raise Stopped("this consumer is not running; use 'async with duly.Consumer(…)'")
        return self._ledger

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    async def accept(self, message: QueueMessage) -> Outcome | None:
        """Store a message that its queue has delivered; acknowledge it to the queue when this returns.
        Returns the outcome if it is already known: for a repeat, or a message that is refused."""
        call = _WaitingCall()
        try:
            return await self._take_in(message, call)
        finally:
            self._forget(call)

    async def handle(self, message: QueueMessage) -> Outcome:
        """Store a message, wait until it has ended, and return the outcome; acknowledge it to the queue then.
        It continues if the caller stops waiting."""
        call = _WaitingCall()
        try:
            return await self._take_in(message, call) or await self._end_of(call)
        finally:
            self._forget(call)

    async def _take_in(self, message: QueueMessage, call: _WaitingCall) -> Outcome | None:
        ledger = self._running()
        try:
            wanted = to_message(self.name, message, self._mode)
        except SenderError as problem:
            record = RecordRefusal(
                f"{self.name}/{message.sender}"[:NAME_LIMIT], message.id[:NAME_LIMIT], problem.word,
                str(problem), ledger.clock.now(),
            )  # fmt: skip
            await ledger.write(record)
            return Outcome(problem.word, reason=str(problem))
        while self._inbox.live + self._offered >= BACKLOG:
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(room)
            await room
            self._running()
        call.key = wanted.key
        self._calls.setdefault(call.key, []).append(call)
        self._offered += 1
        try:
            await self._engine.put(Arrived(wanted, call))
            verdict = await call.replied
        finally:
            self._offered -= 1
        if verdict.kind in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
            repeat = not verdict.fresh
            if verdict.state is not None and verdict.state.terminal:
                return outcome_of(verdict.state, verdict.answer, repeat=repeat)
            if call.ended.done():
                return _as_seen(call.ended.result(), repeat)
            return None
        if verdict.retry:
            verdict.require()
        return refused(verdict)

    async def _end_of(self, call: _WaitingCall) -> Outcome:
        """Wait for the end of a stored message, at this or another consumer."""
        repeat = not call.replied.result().fresh
        ledger = self._running()
        if ledger.sole and self._effect != "exactly_once":
            return _as_seen(await call.ended, repeat)
        while True:
            with ledger.watch(call.key) as news:
                record = None if call.ended.done() else await ledger.find(call.key)
                if call.ended.done():
                    return _as_seen(call.ended.result(), repeat)
                if record is None:
                    raise Stopped("the message is no longer in the ledger; it was forgotten")
                if record.state.terminal:
                    return outcome_of(record.state, record.answer, repeat=repeat)
                either: list[asyncio.Future[Outcome] | asyncio.Future[None]] = [call.ended, news]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    def _forget(self, call: _WaitingCall) -> None:
        calls = self._calls.get(call.key)
        if calls is not None and call in calls:
            calls.remove(call)
            if not calls:
                del self._calls[call.key]

    # ── what follows, once it is stored ──────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message, attempt=attempt):
                self.tasks.do(f"handler of {self.name}", self._run(message, attempt), expected=(Stopped,))
            case Reply(origin=_WaitingCall() as call, message=message, verdict=verdict):
                settle(call.replied, verdict)
                left = self._group is not None and verdict.fresh and not self._inbox.is_live(message.key)
                if left and self._group is not None:
                    self._group.left(message.recipient)
            case ReportOutcome(key=key, state=state, answer=answer):
                self._ended(key, outcome_of(state, answer))

    def _ended(self, key: bytes, outcome: Outcome) -> None:
        for call in self._calls.pop(key, ()):
            settle(call.ended, outcome)
        if self._room:
            settle(self._room.popleft(), None)

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    async def _run(self, message: Message, attempt: int) -> None:
        try:
            if self._effect == "exactly_once":
                event = await self._run_inside(message, attempt)
            else:
                result = await self._call_handler(from_message(self.name, message, attempt))
                event = Answered(message.key, State.DONE, answer_of(result), attempt)
        except TaskFailed as problem:
            said = answer_of(problem.error)
            event = Answered(message.key, State.FAILED, Answer(1, said.data, str(problem)[:REASON]), attempt)
        except asyncio.CancelledError as problem:
            us = asyncio.current_task()
            if us is None or us.cancelling():
                raise
            event = AttemptFailed(message.key, attempt, repr(problem))  # what it waited for was cancelled
        except Exception as problem:
            LOG.warning("the handler of %s has failed at %s", self.name, message.id, exc_info=True)
            event = AttemptFailed(message.key, attempt, repr(problem)[:REASON])
        await self._engine.put(event)

    async def _run_inside(self, message: Message, attempt: int) -> Event:
        """Run the handler in the ledger's transaction, with the end of its message."""
        ledger = self._running()
        answer = Answer()
        with suppress(_TakenOver):
            async with ledger.transaction() as tx:
                answer = answer_of(await self._call_handler(tx, from_message(self.name, message, attempt)))
                end = Advance(message.key, State.DONE, ledger.clock.now(), answer)
                finish = Finish(self._inbox.outbox.ref(message), attempt, State.DONE, "", (end,))
                if not (await tx.write(finish)).of(finish):
                    raise _TakenOver
            self._ended(message.key, outcome_of(State.DONE, answer))
        # The ledger has its end, or another consumer has the message: the fence refuses this one, and the
        # lane continues.
        return Answered(message.key, State.DONE, answer, attempt)

    async def _call_handler(self, *args: object) -> object:
        if inspect.iscoroutinefunction(self._handler):
            awaited: Awaitable[object] = self._handler(*args)
            return await awaited
        returned = await asyncio.to_thread(self._handler, *args)
        return await returned if inspect.isawaitable(returned) else returned


def _as_seen(outcome: Outcome, repeat: bool) -> Outcome:
    return msgspec.structs.replace(outcome, repeat=repeat) if repeat else outcome


def _abandon(call: _WaitingCall) -> None:
    stopped = Stopped(
        "the consumer has stopped; do not acknowledge the message, so that it is delivered again"
    )
    fail(call.replied, stopped)
    fail(call.ended, stopped)


def _micros(field: str, seconds: float) -> int:
    given: object = seconds
    if not isinstance(given, int | float) or not 0 <= seconds < math.inf:
        raise Malformed(f"{field}={seconds!r} is not a length of time in seconds")
    return round(seconds * SECOND)


def _check_ledger(ledger: object) -> None:
    if inspect.iscoroutine(ledger):
        ledger.close()
        raise ProgramError("duly.open_ledger(…) was not awaited; pass its URL, or await it first")
    if not isinstance(ledger, Ledger) and not (isinstance(ledger, str) and ledger):
        raise ProgramError(
            f"a consumer's ledger is a URL or opened by duly.open_ledger, not {ledger!r}: "
            'duly.Consumer("sqlite:///lamp.db", handler)'
        )
    if isinstance(ledger, str) and "mode=ro" in ledger.partition("?")[2]:
        raise Malformed(f"{ledger!r} cannot be written; leave mode=ro out")


def _check(
    handler: Callable[..., object], name: str, effect: str, order: str, retry: RetryPolicy | None
) -> None:
    if not callable(handler):
        raise ProgramError(f"the handler of a consumer must be a function, not {type(handler).__name__}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ProgramError("the handler of a consumer is a generator, which would not run; return a result")
    if effect not in get_args(RunEffect):
        words = ", ".join(map(repr, get_args(RunEffect)))
        raise Malformed(f"effect={effect!r} is not known; use one of {words}")
    if order not in get_args(OrderWord):
        raise Malformed(f"order={order!r} is not known; use 'replay' or 'latest'")
    if not isinstance(retry, RetryPolicy | None):
        raise Malformed(f"retry={retry!r} is not a policy; use duly.RetryPolicy.fixed(1_000_000, tries=3)")
    if effect == "at_most_once" and retry is not None:
        raise Malformed(
            "retry= needs effect='at_least_once' or 'exactly_once': at_most_once is never run twice"
        )
    if effect == "exactly_once" and not inspect.iscoroutinefunction(handler):
        raise ProgramError("effect='exactly_once' needs an async handler: it awaits the ledger's transaction")
    _check_parameters(handler, ("tx", "message") if effect == "exactly_once" else ("message",))
    if not name or "/" in name or len(name.encode()) > NAME_LIMIT // 2:
        raise Malformed(f"name={name!r} is not a name for a consumer; use a short word without '/'")


def _check_parameters(handler: Callable[..., object], given: tuple[str, ...]) -> None:
    """Raise if a handler cannot be called with these arguments: each message would fail, and be over."""
    try:
        signature = inspect.signature(handler)
    except ValueError:
        return  # a function in C, which does not say
    try:
        signature.bind(*given)
    except TypeError as problem:
        raise ProgramError(
            f"the handler of a consumer is called as handler({', '.join(given)}): {problem}"
        ) from None
