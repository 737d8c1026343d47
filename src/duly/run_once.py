"""`once`: a function that runs once per key, across repeats, processes and crashes.

    @duly.once("sqlite:///app.db", scope="payments", key=lambda order: order.id)
    async def charge(order): ...

The laws. The first call is admitted to the ledger before it runs, and its result is stored before it is
returned. A repeat gets the stored result; while the first is running it waits for it. The same key with
other arguments is a `Conflict`. What a crash in the middle means, the function declares:

- `effect="at_most_once"` (default): the outcome is `Unknown`, raised until an operator settles it; never run
  again.
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
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar, cast, overload

import msgspec

from duly.core.lifecycle import State
from duly.core.messages import NAME_LIMIT, Message, Verdict, VerdictKind, key_of
from duly.core.operations import Advance
from duly.core.units import seconds
from duly.errors import (
    Conflict,
    Failed,
    LedgerError,
    ProgramError,
    Stale,
    TooLarge,
    Unknown,
    Unstorable,
)
from duly.idempotency.blocking import BlockingTransaction, blocking, blocking_within
from duly.idempotency.ledgers import LedgerSource, check_source, ledger_at
from duly.idempotency.runs import CHANNEL, UNSTORABLE, DeclaredEffect, Run, Runs, check_options
from duly.idempotency.values import (
    AnyFunction,
    Args,
    Kwargs,
    ResultCodec,
    arguments_by_name,
    digest_of,
    error_answer,
    key_text,
    name_of,
    said,
    takes_object,
)
from duly.storage.ledger import Ledger, Transaction

P = ParamSpec("P")
R = TypeVar("R")
Tx = TypeVar("Tx", Transaction, BlockingTransaction)
Function = TypeVar("Function", bound=AnyFunction)


@overload
def once(
    ledger: LedgerSource,
    *,
    scope: str,
    key: Callable[..., object],
    effect: Literal["exactly_once"],
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[Callable[Concatenate[Tx, P], R]], Callable[P, R]]: ...


@overload
def once(
    ledger: LedgerSource,
    *,
    scope: str,
    key: Callable[..., object],
    effect: Literal["at_most_once", "at_least_once"] = "at_most_once",
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[Function], Function]: ...


@overload
def once(
    ledger: LedgerSource,
    *,
    scope: str,
    key: Callable[..., object],
    effect: DeclaredEffect,
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...


def once(
    ledger: LedgerSource,
    *,
    scope: str,
    key: Callable[..., object],
    effect: DeclaredEffect = "at_most_once",
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
    meaning: Callable[..., object] | None = None,
) -> Callable[[AnyFunction], AnyFunction]:
    """Run a function once per key; it may be async or plain.

    `ledger` is a URL, opened at the first call, or an opened ledger (for async functions). `key` makes the
    key from the call's arguments. `keep` is how many seconds a key is remembered, for ever by default; after
    that the same key runs again. `lease` is how long, on a shared ledger, a dead process's run blocks its
    key. `meaning` says which of the arguments must be the same in a repeat, all by default; give it when
    arguments cannot be written as JSON.
    """
    source = check_source(ledger)
    options = OnceOptions.checked(source, scope, effect, errors, keep, lease)
    for name, given in (("key", key), ("meaning", meaning)):
        if not callable(given) and (name == "key" or given is not None):
            raise ProgramError(
                f"{name}={given!r} is not a function; it gets the arguments of the call, for example "
                f"{name}=lambda order: order.id"
            )
        if inspect.iscoroutinefunction(given):
            raise ProgramError(f"{name}= is an async function, and cannot be awaited here; use a plain one")

    def decorate(function: AnyFunction) -> AnyFunction:
        check_function(function, source)
        decorated = OnceFunction(options, function, key, meaning)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call(*args: object, **kwargs: object) -> object:
                return await decorated.call(args, kwargs)

            return call

        @functools.wraps(function)
        def call_blocking(*args: object, **kwargs: object) -> object:
            return decorated.call_blocking(args, kwargs)

        return call_blocking

    return decorate


def check_function(function: object, source: LedgerSource) -> None:
    """Raise an error that says how to decorate what cannot be."""
    what = name_of(cast("AnyFunction", function))
    if isinstance(function, staticmethod | classmethod):
        raise ProgramError(f"{what}: put @duly.once below @{type(function).__name__}, next to the function")
    if not inspect.isroutine(function) and not isinstance(function, functools.partial):
        raise ProgramError(f"{what} is not a function; duly.once decorates functions and methods")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ProgramError(f"{what} is a generator, whose results cannot be stored; return a list instead")
    if not isinstance(source, str) and not inspect.iscoroutinefunction(function):
        raise ProgramError(
            f"{what} is a plain function, and needs its ledger by URL: "
            '@duly.once("sqlite:///app.db", …). An opened ledger belongs to one event loop, and serves async '
            "functions"
        )


MEANING: Final = "pass meaning=… to duly.once, returning what matters as plain data"

_entered: Final[set[tuple[LedgerSource, bytes, object]]] = set()
"""The runs and waits under way: the ledger, the key, and the task or thread that is in it."""


@contextmanager
def within_key(source: LedgerSource, message: Message, caller: object, what: str) -> Iterator[None]:
    """Note that a task or thread is within a key; raises if it is already, as it would wait for its own
    end."""
    entered = (source, message.key, caller)
    if entered in _entered:
        raise ProgramError(
            f"{what} calls itself with the same key {message.id!r}, and would wait for its own end"
        )
    _entered.add(entered)
    try:
        yield
    finally:
        _entered.discard(entered)


class OnceOptions(msgspec.Struct, frozen=True):
    """What `once` and `once_block` were told, checked."""

    source: LedgerSource
    scope: str
    effect: DeclaredEffect
    store_errors: bool
    keep: int | None
    lease: int

    @classmethod
    def checked(
        cls,
        source: LedgerSource,
        scope: str,
        effect: str,
        errors: str,
        keep: float | None,
        lease: float,
    ) -> OnceOptions:
        """Return the options, or raise an error that says which is wrong."""
        check_options(effect, errors, keep, lease)
        key_of(scope, "-")
        kept = None if keep is None else seconds(keep)
        return cls(source, scope, cast("DeclaredEffect", effect), errors == "store", kept, seconds(lease))

    def message(self, id_: str, digest: bytes) -> Message:
        """Return the message that stands for a call."""
        if (size := len(id_.encode("utf-8", "surrogatepass"))) > NAME_LIMIT:
            raise TooLarge(f"a key has at most {NAME_LIMIT} bytes, not {size}; use a hash of it instead")
        return Message(self.scope, id_, CHANNEL, "run", digest)

    def runs(self, ledger: Ledger) -> Runs:
        """Return the runs of these options on a ledger."""
        return Runs(ledger, effect=self.effect, keep=self.keep, lease=self.lease)


class OnceFunction:
    """One decorated function."""

    def __init__(
        self,
        options: OnceOptions,
        function: AnyFunction,
        key: Callable[..., object],
        meaning: Callable[..., object] | None,
    ) -> None:
        self._options = options
        self._function = function
        self._key = key
        self._meaning = meaning
        self._inside = options.effect == "exactly_once"
        self._by_name = arguments_by_name(function, given=1 if self._inside else 0)
        self._of_method = takes_object(function)
        if self._inside and len(inspect.signature(function).parameters) <= self._of_method:
            raise ProgramError(
                f"{name_of(function)} gets the ledger's transaction as its first argument, and takes none"
            )
        self._results: ResultCodec | None = None
        self._runs: Runs | None = None

    async def call(self, args: Args, kwargs: Kwargs) -> object:
        """Run the async function under its key, or return the result of the run that was first."""
        message, results = self._message(args, kwargs), self._reading()
        with within_key(self._options.source, message, asyncio.current_task(), name_of(self._function)):
            return await self._call(message, results, args, kwargs)

    async def _call(self, message: Message, results: ResultCodec, args: Args, kwargs: Kwargs) -> object:
        if self._inside:
            return await self._within(message, results, lambda tx: self._apply(tx, args, kwargs))
        runs = await self._on_ledger()
        begun = await runs.begin(message)
        if isinstance(begun, Verdict):
            return unpack(message, begun, results)
        try:
            begun.start()
            try:
                result = await self._function(*args, **kwargs)
            finally:
                begun.leave()
        except GeneratorExit:
            raise  # thrown away in the middle: nothing can be awaited any more
        except BaseException as problem:
            await self._failed(begun, problem)
            raise
        else:
            return await self._ended(begun, message, results, result)
        finally:
            begun.close()

    def call_blocking(self, args: Args, kwargs: Kwargs) -> object:
        """Do the same with a plain function, in the caller's thread."""
        message, results = self._message(args, kwargs), self._reading()
        with within_key(self._options.source, message, threading.get_ident(), name_of(self._function)):
            return self._call_blocking(message, results, args, kwargs)

    def _call_blocking(self, message: Message, results: ResultCodec, args: Args, kwargs: Kwargs) -> object:
        if self._inside:
            return blocking_within(
                lambda body: self._within(message, results, body),
                lambda tx: self._apply(tx, args, kwargs),
            )
        begun = blocking(self._begin(message))
        if isinstance(begun, Verdict):
            return unpack(message, begun, results)
        try:
            try:
                result = self._function(*args, **kwargs)
            finally:
                begun.leave()
            if inspect.iscoroutine(result):
                result.close()
                raise ProgramError(
                    f"{name_of(self._function)} is a plain function that returns a coroutine, which has not "
                    "run yet; decorate the async function itself"
                )
        except BaseException as problem:
            blocking(self._failed(begun, problem))
            raise
        else:
            return blocking(self._ended(begun, message, results, result))
        finally:
            begun.close()

    def _message(self, args: Args, kwargs: Kwargs) -> Message:
        id_ = key_text(self._key(*args, **kwargs))
        meaning = self._meaning
        counts: object = self._by_name(args, kwargs) if meaning is None else meaning(*args, **kwargs)
        what = f"the arguments of {name_of(self._function)}"
        return self._options.message(id_, digest_of(counts, what, MEANING))

    def _apply(self, tx: object, args: Args, kwargs: Kwargs) -> Any:
        """Call the function with the transaction before its own arguments, but behind `self`."""
        if self._of_method:
            return self._function(args[0], tx, *args[1:], **kwargs)
        return self._function(tx, *args, **kwargs)

    def _reading(self) -> ResultCodec:
        if self._results is None:
            self._results = ResultCodec.of(self._function)
        return self._results

    async def _on_ledger(self) -> Runs:
        ledger = await ledger_at(self._options.source)
        runs = self._runs
        if runs is None or runs.ledger is not ledger:
            runs = self._runs = self._options.runs(ledger)
        return runs

    async def _begin(self, message: Message) -> Run | Verdict:
        runs = await self._on_ledger()
        begun = await runs.begin(message)
        if isinstance(begun, Run):
            begun.start()
        return begun

    async def _failed(self, begun: Run, problem: BaseException) -> None:
        if not isinstance(problem, Exception):
            await begun.interrupted()
        elif self._options.store_errors:
            await begun.end(State.FAILED, error_answer(problem))
        else:
            await begun.free(said(problem))

    async def _ended(self, begun: Run, message: Message, results: ResultCodec, result: object) -> object:
        answer, read = results.answer(result)
        if await begun.end(State.DONE, answer):
            if answer.code == UNSTORABLE:
                raise Unstorable(answer.reason)
            return read
        # We were thought dead and the run was taken over: the outcome that stands is the other one.
        outcome = await begun.outcome()
        if outcome is None:
            raise Unknown(
                f"{message.scope}/{message.id}: another attempt took over and ended without an outcome; "
                "find out whether this run took effect before you call it again"
            )
        return unpack(message, outcome, results)

    async def _within(
        self, message: Message, results: ResultCodec, body: Callable[[Transaction], Awaitable[object]]
    ) -> object:
        """Run inside the ledger's transaction: `body` is given it."""
        runs = await self._on_ledger()
        ledger = runs.ledger
        now = ledger.clock.now()
        known = ledger.recall(message, now)
        if known is not None and known.state is not None and known.state.terminal:
            return unpack(message, known, results)
        admit = runs.admission(message, now)
        raised: Exception | None = None
        try:
            async with ledger.transaction() as tx:
                verdict = (await tx.write(admit)).of(admit)
                if verdict.fresh:
                    try:
                        result = await body(tx)
                    except Exception as problem:
                        raised = problem
                        raise
                    answer, read = results.answer(result)
                    if answer.code == UNSTORABLE:
                        raise Unstorable(answer.reason)  # and nothing has happened: all is undone
                    await tx.write(Advance(message.key, State.DONE, ledger.clock.now(), answer))
                    return read
        except Exception:
            # The storage's trouble is not the function's outcome.
            if raised is not None and self._options.store_errors and not isinstance(raised, LedgerError):
                end = Advance(message.key, State.FAILED, ledger.clock.now(), error_answer(raised))
                await ledger.write(runs.admission(message, now, end))
            raise
        return unpack(message, verdict, results)


def unpack(message: Message, verdict: Verdict, results: ResultCodec) -> object:
    """Return what a repeat gets, the first one's result; or raise its error."""
    where = f"{message.scope}/{message.id}"
    if verdict.kind is VerdictKind.CONFLICT:
        raise Conflict(
            f"{where} was called before with other arguments; nothing was run. Use a new key for a new call"
        )
    if verdict.kind is not VerdictKind.DUPLICATE:
        raise Stale(f"{where}: {verdict.reason}")
    answer = verdict.answer
    if answer is None:
        raise Unknown(f"{where} was begun by a function with another effect, and has not ended")
    if verdict.state is State.DONE:
        if answer.code == UNSTORABLE:
            raise Unstorable(answer.reason)
        try:
            return results.read(answer.data)
        except ValueError as problem:
            raise Unstorable(
                f"{where}: it ran, but its stored result does not fit the function's annotation: {problem}"
            ) from None
    if verdict.state is State.FAILED:
        raise Failed(*msgspec.json.decode(answer.data, type=tuple[str, str]))
    raise Unknown(f"{where}: {answer.reason}. Find out, then use a new key, or 'duly once settle'")
