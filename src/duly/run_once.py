"""`once`: a function that runs once per key, across repeats, processes and crashes.

    ledger = await duly.open_ledger("sqlite:///app.db")

    @duly.once(ledger, scope="payments", key=lambda order: order.id)
    async def charge(order): ...

The laws. The first call is admitted to the ledger before it runs, and its result is stored before it is
returned. A repeat gets the stored result; while the first is running it waits for it. The same key with
other arguments is a `Conflict`. What a crash in the middle means, the function declares:

- `effect="at_most_once"` (default): the outcome is `Unknown`, raised for ever after; never run again.
- `effect="at_least_once"`: the next caller runs it again, with the same key.
- `effect="exactly_once"`: the function is handed the ledger's transaction as its first argument; what it
  writes with it commits together with the memory of the call, or not at all. SQL ledgers only.

An exception is passed on; `errors="retry"` (default) frees the key again, `errors="store"` makes it the
outcome, and repeats raise `Failed`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import random
import typing
from collections.abc import Callable, Coroutine
from contextlib import suppress
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar, cast, overload

import msgspec
import msgspec.inspect

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, Word, key_of
from duly.core.operations import (
    Admit,
    Advance,
    Deliver,
    Delivery,
    DeliveryRef,
    Finish,
    Postpone,
    Renew,
    Take,
    Withdraw,
    Write,
)
from duly.core.units import FOREVER, MS, SECOND, seconds
from duly.errors import (
    Conflict,
    DulyError,
    Failed,
    LedgerError,
    Malformed,
    ProgramError,
    Stale,
    Unknown,
    Unstorable,
)
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.storage.ledger import Ledger, Transaction

P = ParamSpec("P")
R = TypeVar("R")
AsyncFunction: TypeAlias = Callable[P, Coroutine[Any, Any, R]]

Effect = Literal["at_most_once", "at_least_once", "exactly_once"]

CHANNEL: Final = "once"
RESULT_LIMIT: Final = 1024 * 1024
DETAIL_LIMIT: Final = 10_000
LONGEST: Final = 100 * 366 * 86_400.0
"""A hundred years: longer ones are a mistake in the unit, or meant as for ever."""

OK, ERROR, UNSTORABLE = 0, 1, 2
"""Codes of the stored answer: a result, an exception, a result that could not be written down."""


@overload
def once(
    ledger: Ledger,
    *,
    scope: str,
    key: Callable[..., object],
    effect: Literal["exactly_once"],
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[Callable[Concatenate[Transaction, P], Coroutine[Any, Any, R]]], AsyncFunction[P, R]]: ...


@overload
def once(
    ledger: Ledger,
    *,
    scope: str,
    key: Callable[..., object],
    effect: Literal["at_most_once", "at_least_once"] = "at_most_once",
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[AsyncFunction[P, R]], AsyncFunction[P, R]]: ...


@overload
def once(
    ledger: Ledger,
    *,
    scope: str,
    key: Callable[..., object],
    effect: Effect,
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[AsyncFunction[..., R]], AsyncFunction[..., R]]: ...


def once(
    ledger: Ledger,
    *,
    scope: str,
    key: Callable[..., object],
    effect: Effect = "at_most_once",
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[AsyncFunction[..., R]], AsyncFunction[..., R]]:
    """Run an async function once per key.

    `key` makes the key from the call's arguments. `keep` is how many seconds a key is remembered, for ever
    by default; after that the same key runs again. `lease` is how long, on a shared ledger, a dead
    process's run blocks its key. `meaning` says which of the arguments must be the same in a repeat, all
    by default; give it when arguments cannot be written as JSON.
    """
    if effect not in typing.get_args(Effect):
        raise Malformed(f"effect={effect!r} is not known; use one of {', '.join(typing.get_args(Effect))}")
    if errors not in ("retry", "store"):
        raise Malformed(f"errors={errors!r} is not known; use 'retry' or 'store'")
    for name, length in (("lease", lease), ("keep", keep)):
        if length is not None and not 0 < length <= LONGEST:
            raise Malformed(f"{name}={length!r} must be a length of time in seconds, more than 0")
    key_of(scope, "-")

    def decorate(function: AsyncFunction[..., R]) -> AsyncFunction[..., R]:
        if not inspect.iscoroutinefunction(function):
            raise ProgramError(f"{_name_of(function)} must be an async function for duly.once")
        runner = _Runner(ledger, function, scope=scope, effect=effect, errors=errors, keep=keep, lease=lease)
        named = _by_name(function, given=1 if effect == "exactly_once" else 0)

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> R:
            id_ = _text(key(*args, **kwargs))
            counts = named(args, kwargs) if meaning is None else meaning(*args, **kwargs)
            return cast("R", await runner.call(id_, _digest(counts, function), args, kwargs))

        return call

    return decorate


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _text(key: object) -> str:
    if isinstance(key, str):
        return key
    # Either would run twice, or never again, without a word.
    if key is None or (type(key).__str__ is object.__str__ and type(key).__repr__ is object.__repr__):
        raise Malformed(f"the key of a call cannot be {key!r}; let key=… return text that names the call")
    return str(key)


def _by_name(
    function: Callable[..., Any], *, given: int
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A call's arguments by name, so that `f(1)` and `f(a=1)` are the same call. What was left to its
    default is left out: a parameter added later does not turn every repeat into a conflict."""
    signature = inspect.signature(function)
    signature = signature.replace(parameters=list(signature.parameters.values())[given:])
    places = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    simple = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in places)
    names = [p.name for p in places]

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if simple and not kwargs and len(args) == len(names):
            return dict(zip(names, args, strict=True))
        return signature.bind(*args, **kwargs).arguments

    return by_name


def _digest(counts: object, function: Callable[..., Any]) -> bytes:
    try:
        text = msgspec.json.encode(counts, order="deterministic")
    except Exception as problem:
        raise Malformed(
            f"the arguments of {_name_of(function)} cannot be compared in a repeat ({problem}); "
            "pass meaning=… to duly.once, returning what matters as plain data"
        ) from None
    return blake2b(text, digest_size=16).digest()


_serial: Final = itertools.count(1)

_in_hand: Final[set[str]] = set()
"""The calls of this process that are under way, by the name they sign their deliveries with."""

_begun: Final[set[str]] = set()
"""Those of this process that have begun and whose end is not stored. What was left behind without having
begun (the ledger failed just then) may be run."""


class _Runner:
    """One decorated function."""

    def __init__(
        self,
        ledger: Ledger,
        function: Callable[..., Coroutine[Any, Any, Any]],
        *,
        scope: str,
        effect: Effect,
        errors: str,
        keep: float | None,
        lease: float,
    ) -> None:
        self._ledger = ledger
        self._function = function
        self._scope = scope
        self._effect = effect
        self._store_errors = errors == "store"
        self._keep = None if keep is None else seconds(keep)
        self._lease = seconds(lease)
        self._leases = _Leases(ledger, self._lease)
        self._decoder: msgspec.json.Decoder[Any] | None = None

    async def call(self, id_: str, digest: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function under this key, or return the result of the run that was first."""
        decoder = self._result_decoder()
        message = Message(self._scope, id_, "once", "run", digest)
        known = self._ledger.recall(message, self._ledger.clock.now())
        if known is not None and known.state is not None and known.state.terminal:
            return _unpack(message, known, decoder)
        if self._effect == "exactly_once":
            return await self._inside(message, args, kwargs, decoder)
        me = f"{self._ledger.worker}/{next(_serial)}"
        _in_hand.add(me)
        try:
            while True:
                # Not 1: a key that was freed is admitted anew, and a call that saw its
                # former life must not pass for the owner of this one.
                first = random.getrandbits(60) + 1
                verdict = await self._admit(message, first, me)
                if verdict.fresh:
                    return await self._run(message, first, me, args, kwargs)
                if verdict.word is not Word.DUPLICATE or verdict.state is None or verdict.state.terminal:
                    return _unpack(message, verdict, decoder)
                attempt = await self._take_over(message, me)
                if attempt is not None:
                    return await self._run(message, attempt, me, args, kwargs)
        finally:
            _in_hand.discard(me)

    def _admission(self, message: Message, now: int, *then: Write) -> Admit:
        sliding = self._keep is not None
        until = FOREVER if self._keep is None else now + self._keep
        return Admit(message, until, now, State.SENT, then, sliding)

    async def _admit(self, message: Message, first: int, me: str) -> Verdict:
        now = self._ledger.clock.now()
        deliver = Deliver(_ref(message), now + self._lease, 0, first, me)
        admit = self._admission(message, now, deliver)
        try:
            return await self._ledger.apply(admit)
        except asyncio.CancelledError:
            # Admitted or not, it has not begun: it must not look like a run that was cut short.
            await asyncio.shield(asyncio.ensure_future(self._give_back(admit, first, me)))
            raise

    async def _give_back(self, admit: Admit, first: int, me: str) -> None:
        ledger, key = self._ledger, admit.message.key
        with suppress(DulyError):
            await ledger.write(admit)  # behind the first one: whose it is, is settled then
            if any(delivery.worker == me for delivery in await ledger.deliveries(key)):
                reason, free = "cancelled before it began", (Withdraw(key),)
                await ledger.write(Finish(_ref(admit.message), first, State.CANCELLED, reason, free))

    # ── another call has begun ──────────────────────────────────────────────────────────────────

    async def _take_over(self, message: Message, me: str) -> int | None:
        """Wait for the call that has begun; if its process is dead, the attempt that is now ours to run."""
        ledger = self._ledger
        with ledger.watch(message.key) as news:
            found = [d for d in await ledger.deliveries(message.key) if d.ref.channel == CHANNEL]
            if not found or found[0].state.terminal:
                return None  # it ended, or was withdrawn, just now
            delivery = found[0]
            now = ledger.clock.now()
            if not _abandoned(delivery, ledger, now):
                # A run of our own needs no lease to be alive; looking again is for news that was lost.
                lasts = self._lease if _ours(delivery, ledger) else delivery.due - now + MS
                await asyncio.wait([news], timeout=lasts / SECOND)
                return None
        ref, attempt = delivery.ref, delivery.attempt
        if self._effect == "at_most_once" and _may_have_begun(delivery, ledger):
            await self._end(delivery.worker, self._finish(message, attempt, State.UNKNOWN, CRASHED))
            return None
        taken = await ledger.apply(Take(ref, attempt, me, now + self._lease))
        return attempt + 1 if taken else None

    # ── our run ──────────────────────────────────────────────────────────────────────────────────

    async def _run(
        self, message: Message, attempt: int, me: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ledger, ref = self._ledger, _ref(message)
        self._leases.add(ref, attempt)
        _begun.add(me)
        try:
            result = await self._function(*args, **kwargs)
        except Exception as problem:
            if self._store_errors:
                await self._end(me, self._finish(message, attempt, State.FAILED, _error_answer(problem)))
            else:
                free = (Withdraw(message.key),)
                await self._end(me, Finish(ref, attempt, State.FAILED, _said(problem), free))
            raise
        except GeneratorExit:
            raise  # thrown away in the middle: nothing can be awaited any more
        except BaseException:
            # Cancelled in the middle: the same as a crash, only that we can still say so.
            if self._effect == "at_least_once":
                await self._end(me, Postpone(ref, attempt, ledger.clock.now(), "cancelled"))
            else:
                await self._end(me, self._finish(message, attempt, State.UNKNOWN, CANCELLED))
            raise
        finally:
            self._leases.remove(ref)
        answer = self._result_answer(result)
        if await self._end(me, self._finish(message, attempt, State.DONE, answer)):
            if answer.code == UNSTORABLE:
                raise Unstorable(answer.reason)
            return result
        # We were thought dead and the run was taken over: the outcome that stands is the other one.
        record = await ledger.wait(message.key)
        if record is None:
            raise Unknown(f"{self._scope}/{message.id}: another attempt took over and came to nothing")
        return _unpack(message, Verdict(Word.DUPLICATE, record.state, record.answer), self._result_decoder())

    def _finish(self, message: Message, attempt: int, state: State, answer: Answer) -> Finish:
        end = Advance(message.key, state, self._ledger.clock.now(), answer)
        return Finish(_ref(message), attempt, state, answer.reason, (end,))

    async def _end(self, me: str, end: Finish | Postpone) -> bool:
        ended = await self._ledger.apply(end)
        _begun.discard(me)
        return ended

    # ── inside the ledger's transaction ──────────────────────────────────────────────────────────

    async def _inside(
        self,
        message: Message,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        decoder: msgspec.json.Decoder[Any],
    ) -> Any:
        ledger = self._ledger
        now = ledger.clock.now()
        admit = self._admission(message, now)
        raised: Exception | None = None
        try:
            async with ledger.transaction() as tx:
                verdict = (await tx.write(admit)).of(admit)
                if verdict.fresh:
                    try:
                        result = await self._function(tx, *args, **kwargs)
                    except Exception as problem:
                        raised = problem
                        raise
                    answer = self._result_answer(result)
                    if answer.code == UNSTORABLE:
                        raise Unstorable(answer.reason)  # and nothing has happened: all is undone
                    await tx.write(Advance(message.key, State.DONE, ledger.clock.now(), answer))
                    return result
        except Exception:
            # The storage's trouble is not the function's outcome.
            if raised is not None and self._store_errors and not isinstance(raised, LedgerError):
                end = Advance(message.key, State.FAILED, ledger.clock.now(), _error_answer(raised))
                await ledger.write(self._admission(message, now, end))
            raise
        return _unpack(message, verdict, decoder)

    # ── results as bytes ─────────────────────────────────────────────────────────────────────────

    def _result_decoder(self) -> msgspec.json.Decoder[Any]:
        if self._decoder is None:
            inner = inspect.unwrap(self._function)
            # Of the annotations only this one: the others may name what is imported for the type checker.
            only = {"return": getattr(inner, "__annotations__", {}).get("return", Any)}
            try:
                hints = typing.get_type_hints(
                    SimpleNamespace(__annotations__=only), globalns=getattr(inner, "__globals__", {})
                )
                decoder = msgspec.json.Decoder(hints["return"])
                _check_readable(msgspec.inspect.type_info(hints["return"]), set())
                self._decoder = decoder
            except Exception as problem:
                raise ProgramError(
                    f"a repeat of {_name_of(self._function)} could not be given its result: {problem}; "
                    "annotate what it returns as plain data, a dataclass or a msgspec Struct"
                ) from None
        return self._decoder

    def _result_answer(self, result: object) -> Answer:
        try:
            data = msgspec.json.encode(result)
            self._result_decoder().decode(data)  # the first caller shall not get what a repeat cannot
        except Exception as problem:
            return Answer(
                UNSTORABLE,
                b"",
                f"it ran, but its result cannot be stored: {_said(problem)}; return plain data",
            )
        if len(data) > RESULT_LIMIT:
            return Answer(
                UNSTORABLE, b"", f"it ran, but its result has {len(data)} bytes; the limit is {RESULT_LIMIT}"
            )
        return Answer(OK, data)


CRASHED: Final = Answer(
    ERROR, b"", "its process died before the end was stored; whether it took effect is not known"
)
CANCELLED: Final = Answer(
    ERROR, b"", "it was cancelled while it was running; whether it took effect is not known"
)


def _ref(message: Message) -> DeliveryRef:
    return DeliveryRef(message.key, CHANNEL, "run")


def _abandoned(delivery: Delivery, ledger: Ledger, now: int) -> bool:
    if delivery.state is State.ACCEPTED:
        return True  # given back
    if _ours(delivery, ledger):
        return delivery.worker not in _in_hand  # the ledger failed when it was to begin or to end
    return ledger.sole or delivery.due <= now


def _may_have_begun(delivery: Delivery, ledger: Ledger) -> bool:
    if delivery.state is not State.SENT:
        return False
    return delivery.worker in _begun or not _ours(delivery, ledger)


def _ours(delivery: Delivery, ledger: Ledger) -> bool:
    return delivery.worker.startswith(ledger.worker + "/")


def _check_readable(kind: object, seen: set[int]) -> None:
    """msgspec takes any class and fails when it is to read one; here that would be after the run."""
    if isinstance(kind, msgspec.inspect.CustomType):
        raise TypeError(f"{kind.cls.__qualname__} cannot be read back")
    if isinstance(kind, tuple):
        parts = kind
    elif isinstance(kind, msgspec.inspect.Type | msgspec.inspect.Field) and id(kind) not in seen:
        seen.add(id(kind))
        parts = tuple(getattr(kind, name) for name in kind.__struct_fields__)
    else:
        return
    for part in parts:
        _check_readable(part, seen)


def _error_answer(problem: Exception) -> Answer:
    data = msgspec.json.encode((type(problem).__qualname__, _plain(problem, str)))
    return Answer(ERROR, data, _said(problem))


def _said(problem: Exception) -> str:
    return _plain(problem, repr)[:500]


def _plain(problem: Exception, say: Callable[[object], str]) -> str:
    """What an exception says, as text that can be stored whatever it holds."""
    try:
        text = say(problem)
    except Exception:
        text = f"{type(problem).__qualname__}, which cannot be shown"
    return text[:DETAIL_LIMIT].encode(errors="replace").decode()


def _unpack(message: Message, verdict: Verdict, decoder: msgspec.json.Decoder[Any]) -> Any:
    """What a repeat gets: the first one's result, or its error."""
    where = f"{message.scope}/{message.id}"
    if verdict.word is Word.CONFLICT:
        raise Conflict(
            f"{where} was called before with other arguments; nothing was run. Use a new key for a new call"
        )
    if verdict.word is not Word.DUPLICATE:
        raise Stale(f"{where}: {verdict.reason}")
    answer = verdict.answer
    if answer is None:
        raise Unknown(f"{where} was begun by a function with another effect, and has not ended")
    if verdict.state is State.DONE:
        if answer.code == UNSTORABLE:
            raise Unstorable(answer.reason)
        try:
            return decoder.decode(answer.data)
        except msgspec.MsgspecError as problem:
            raise Unstorable(
                f"{where}: it ran, but its stored result does not fit the function's annotation: {problem}"
            ) from None
    if verdict.state is State.FAILED:
        raise Failed(*msgspec.json.decode(answer.data, type=tuple[str, str]))
    raise Unknown(f"{where}: {answer.reason}. Find out, then use a new key")


# ── leases, on a ledger that others write too ────────────────────────────────────────────────────


class _Leases:
    """Renews the leases of one function's runs in this process, all with one timer. Where no other
    process writes, a lease lasts as long as the process, and there is nothing to do."""

    def __init__(self, ledger: Ledger, lease: int) -> None:
        self._ledger = ledger
        self._lease = lease
        self._runs: dict[DeliveryRef, int] = {}
        self._tasks = Supervisor()
        self._renewing: SupervisedTask | None = None

    def add(self, ref: DeliveryRef, attempt: int) -> None:
        """Renew the lease of this run from now on, unless no other process can take it."""
        if not self._ledger.sole:
            self._runs[ref] = attempt
            if self._renewing is None:
                self._renewing = self._tasks.every("renewing leases", self._lease / SECOND / 3, self._renew)

    def remove(self, ref: DeliveryRef) -> None:
        """Stop renewing the lease of this run."""
        self._runs.pop(ref, None)
        if not self._runs and self._renewing is not None:
            self._renewing.kill()
            self._renewing = None

    async def _renew(self) -> None:
        due = self._ledger.clock.now() + self._lease
        # If it fails the next round tries again; if the lease runs out before, the fence holds.
        with suppress(DulyError):
            await self._ledger.commit([(Renew(ref, attempt, due),) for ref, attempt in self._runs.items()])
