"""`once_block`: a block of code that runs once per key.

    async with duly.once_block("sqlite:///app.db", scope="payments", key=order.id, meaning=order) as block:
        if block.fresh:
            block.result = await gateway.charge(order)
    return block.result

A block cannot be skipped from outside, so it asks `block.fresh` itself; a repeat finds the stored result in
`block.result`. All else is as with `duly.once`: an exception frees the key or is stored, a crash in the
middle means what `effect` says. With `exactly_once` the ledger's transaction is `block.tx`. The same works as
a plain `with`.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, ExitStack
from types import TracebackType
from typing import Any, Final, Literal, Self

from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict
from duly.core.operations import Advance
from duly.errors import LedgerError, Malformed, ProgramError, Unknown, Unstorable
from duly.idempotency.blocking import BlockingTransaction, blocking
from duly.idempotency.ledgers import LedgerSource, check_source, ledger_at
from duly.idempotency.runs import UNSTORABLE, DeclaredEffect, Run, Runs
from duly.idempotency.values import ResultCodec, digest_of, error_answer, key_text, said
from duly.run_once import OnceOptions, unpack, within_key
from duly.storage.group_commit import TransactionMark
from duly.storage.ledger import Transaction

_UNSET: Final = object()


def once_block(
    ledger: LedgerSource,
    *,
    scope: str,
    key: object,
    meaning: object = None,
    returns: object = Any,
    effect: DeclaredEffect = "at_most_once",
    errors: Literal["retry", "store"] = "retry",
    keep: float | None = None,
    lease: float = 30.0,
) -> OnceBlock:
    """Return the context manager of a block that runs once per key.

    `key` and `meaning` are values, not functions: `meaning` is what must be the same in a repeat. `returns`
    is the type of the result, plain data by default. The other options are those of `duly.once`.
    """
    source = check_source(ledger)
    if callable(key):
        raise ProgramError("once_block takes the key itself, for example key=order.id; not a function")
    options = OnceOptions.checked(source, scope, effect, errors, keep, lease)
    try:
        results = ResultCodec(returns)
    except Exception as problem:
        raise ProgramError(f"returns={returns!r} could not be read back in a repeat: {problem}") from None
    id_ = key_text(key)
    digest = digest_of(meaning, f"the meaning of the block {scope}/{id_}", "pass plain data as meaning=")
    message = options.message(id_, digest)
    return OnceBlock(options, message, results)


class OnceBlock:
    """A block that runs once per key; made by `duly.once_block`."""

    def __init__(self, options: OnceOptions, message: Message, results: ResultCodec) -> None:
        self._options = options
        self._message = message
        self._results = results
        self._runs: Runs | None = None
        self._run: Run | None = None
        self._transaction: AbstractAsyncContextManager[Transaction] | None = None
        self._tx: Transaction | None = None
        self._blocking = False
        self._caller: object = None
        """the thread that entered it by a plain `with`; None: a task, which is asked for"""
        self._within = ExitStack()
        self._mark: TransactionMark | None = None
        self._fresh: bool | None = None
        self._result: object = _UNSET

    # ── what the block uses ──────────────────────────────────────────────────────────────────────

    @property
    def fresh(self) -> bool:
        """Whether this is the first run: only then do what has the effect."""
        if self._fresh is None:
            raise ProgramError("enter the block first: async with duly.once_block(…) as block")
        return self._fresh

    @property
    def result(self) -> Any:
        """What the first run has stored; None if it stored nothing."""
        if self._fresh is None:
            raise ProgramError("enter the block first: async with duly.once_block(…) as block")
        return None if self._result is _UNSET else self._result

    @result.setter
    def result(self, value: object) -> None:
        """Set what repeats get."""
        if not self.fresh:
            raise ProgramError(
                "this is a repeat, whose result is stored already; do the work under 'if block.fresh'"
            )
        self._result = value

    @property
    def tx(self) -> Any:
        """The ledger's transaction, with effect="exactly_once": `Transaction`, or `BlockingTransaction` in a
        plain `with`."""
        if self._tx is None:
            raise ProgramError('block.tx exists only in the first run, with effect="exactly_once"')
        return BlockingTransaction(self._tx) if self._blocking else self._tx

    # ── async with ───────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        if self._fresh is not None:
            raise ProgramError("a block is entered once; make a new one with duly.once_block")
        options, message = self._options, self._message
        caller = self._caller if self._blocking else asyncio.current_task()
        with ExitStack() as within:
            within.enter_context(within_key(options.source, message, caller, f"the block {message.scope}"))
            runs = self._runs = options.runs(await ledger_at(options.source))
            if options.effect == "exactly_once":
                await self._enter_transaction(runs)
            else:
                await self._enter_run(runs)
            self._within = within.pop_all()
        return self

    async def _enter_run(self, runs: Runs) -> None:
        begun = await runs.begin(self._message)
        if isinstance(begun, Verdict):
            self._repeat(begun)
        else:
            self._run = begun
            self._fresh = True
            begun.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._within:
            await self._leave(kind, error, trace)

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._fresh:
            return
        if self._transaction is not None:
            await self._leave_transaction(self._transaction, kind, error, trace)
            return
        run = self._run
        assert run is not None
        run.leave()
        try:
            if error is None:
                await self._ended(run)
            elif not isinstance(error, Exception):
                if not isinstance(error, GeneratorExit):
                    await run.interrupted()
            elif self._options.store_errors:
                await run.end(State.FAILED, error_answer(error))
            else:
                await run.free(said(error))
        finally:
            run.close()

    async def _ended(self, run: Run) -> None:
        answer, read = self._results.answer(self.result)
        if await run.end(State.DONE, answer):
            if answer.code == UNSTORABLE:
                raise Unstorable(answer.reason)
            self._result = read
            return
        outcome = await run.outcome()
        if outcome is None:
            message = self._message
            raise Unknown(
                f"{message.scope}/{message.id}: another attempt took over and ended without an outcome; "
                "find out whether this run took effect before you call it again"
            )
        self._repeat(outcome)

    def _repeat(self, verdict: Verdict) -> None:
        self._result = unpack(self._message, verdict, self._results)
        self._fresh = False

    async def _enter_transaction(self, runs: Runs) -> None:
        ledger = runs.ledger
        admit = runs.admission(self._message, ledger.clock.now())
        transaction = ledger.transaction()
        tx = await transaction.__aenter__()
        try:
            verdict = (await tx.write(admit)).of(admit)
            if verdict.fresh:
                self._transaction, self._tx, self._fresh = transaction, tx, True
                self._mark = TransactionMark()
                return
            self._repeat(verdict)
        except BaseException as problem:
            if not await transaction.__aexit__(type(problem), problem, problem.__traceback__):
                raise
        else:
            await transaction.__aexit__(None, None, None)

    async def _leave_transaction(
        self,
        transaction: AbstractAsyncContextManager[Transaction],
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        runs, tx = self._runs, self._tx
        assert runs is not None
        assert tx is not None
        ledger, message = runs.ledger, self._message
        if error is None:
            answer, read = self._results.answer(self.result)
            if answer.code == UNSTORABLE:  # and nothing has happened: all is undone
                kind, error, trace = Unstorable, Unstorable(answer.reason), None
            else:
                await tx.write(Advance(message.key, State.DONE, ledger.clock.now(), answer))
                self._result = read
        try:
            await transaction.__aexit__(kind, error, trace)
        finally:
            # The storage's trouble is not the block's outcome.
            stored = isinstance(error, Exception) and not isinstance(error, LedgerError | Unstorable)
            if stored and self._options.store_errors:
                assert isinstance(error, Exception)
                now = ledger.clock.now()
                end = Advance(message.key, State.FAILED, now, error_answer(error))
                await ledger.write(runs.admission(message, now, end))
        if isinstance(error, Unstorable):
            raise error

    # ── with ─────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        if not isinstance(self._options.source, str):
            raise Malformed(
                "a plain 'with duly.once_block(…)' needs its ledger by URL; an opened ledger belongs to one "
                "event loop: use 'async with'"
            )
        self._blocking, self._caller = True, threading.get_ident()
        blocking(self.__aenter__())
        if self._mark is not None:
            self._mark.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mark is not None:
            self._mark.__exit__()
        blocking(self.__aexit__(kind, error, trace))
