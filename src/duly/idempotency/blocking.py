"""An event loop in a thread of its own, for code that has none: plain functions, WSGI, Django's sync views.

There is one for the process, made when it is first used; a forked process makes its own. A caller blocks
until the loop has done its part; the caller's own code runs in the caller's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, Final, TypeVar

from duly.core.operations import Results, Write
from duly.errors import ProgramError, Stopped
from duly.idempotency.ledgers import close_ledgers
from duly.storage.group_commit import TransactionMark
from duly.storage.ledger import Transaction

B = TypeVar("B")
T = TypeVar("T")

CLOSE_SECONDS: Final = 5.0


class BlockingLoop:
    """A loop and its thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="duly-once", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Begin something on the loop."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ProgramError("this call would wait for itself; call it from another thread")
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise Stopped("the program is ending, so no new run begins") from None

    def close(self) -> None:
        """Close the ledgers of this loop, and end its thread."""
        if self.pid == os.getpid() and self._thread.is_alive():
            with suppress(Exception):
                self.submit(close_ledgers()).result(CLOSE_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_SECONDS)


_making: Final = threading.Lock()
_loops: Final[list[BlockingLoop]] = []


def blocking_loop() -> BlockingLoop:
    """Return the loop of this process."""
    with _making:
        if not _loops or _loops[-1].pid != os.getpid():
            made = BlockingLoop()
            atexit.register(made.close)
            _loops.append(made)  # that of a parent is kept: nothing of it may be touched here
        return _loops[-1]


def blocking(work: Coroutine[object, None, T]) -> T:
    """Run something on the loop of this process, and wait for it."""
    running = blocking_loop().submit(work)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


class BlockingTransaction:
    """The ledger's own transaction, for code without an event loop. It belongs to the loop of this module, or
    to the loop of an application that has called the code in a thread."""

    def __init__(self, transaction: Transaction, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._transaction = transaction
        self._loop = loop
        self._entered = running_loop()
        """the event loop that the code itself blocks, since it was called from a coroutine"""

    def here(self) -> BlockingTransaction | RemoteTransaction:
        """Return the transaction as the code that asks can use it: an async view in a plain application runs
        on an event loop of its own, and awaits."""
        running = running_loop()
        if running is None or running is self._entered:
            return self
        return RemoteTransaction(self._transaction, self._loop or blocking_loop().loop)

    def _do(self, work: Coroutine[object, None, T]) -> T:
        if self._loop is None:
            return blocking(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def execute(self, sql: str, *args: object) -> None:
        """Run a statement."""
        self._do(self._transaction.execute(sql, *args))

    def fetch(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        return self._do(self._transaction.fetch(sql, *args))

    def write(self, *operations: Write) -> Results:
        """Carry a group of operations out within this transaction."""
        return self._do(self._transaction.write(*operations))


class RemoteTransaction:
    """The ledger's own transaction, for async code on another event loop than the transaction's."""

    def __init__(self, transaction: Transaction, loop: asyncio.AbstractEventLoop) -> None:
        self._transaction = transaction
        self._loop = loop

    # The inner call is made at once, not when it is awaited: the transaction notices a forgotten await.

    def execute(self, sql: str, *args: object) -> Awaitable[None]:
        """Run a statement."""
        return _RemoteCall(self._loop, self._transaction.execute(sql, *args))

    def fetch(self, sql: str, *args: object) -> Awaitable[list[tuple[Any, ...]]]:
        """Run a statement and return its rows."""
        return _RemoteCall(self._loop, self._transaction.fetch(sql, *args))

    def write(self, *operations: Write) -> Awaitable[Results]:
        """Carry a group of operations out within this transaction."""
        return _RemoteCall(self._loop, self._transaction.write(*operations))


class _RemoteCall(Awaitable[T]):
    """A call that begins on another event loop when it is awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[object, None, T]) -> None:
        self._loop = loop
        self._work = work

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._work, self._loop)).__await__()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def blocking_within(
    work: Callable[[Callable[[Transaction], Awaitable[B]]], Coroutine[object, None, T]],
    body: Callable[[BlockingTransaction], B],
) -> T:
    """Run `work` on the loop. It is given a function to call with a transaction: that runs `body` here, in
    the caller's thread, and waits for it."""
    handed: Future[tuple[Transaction, TransactionMark]] = Future()
    result: Future[B] = Future()

    async def hand_over(transaction: Transaction) -> B:
        handed.set_result((transaction, TransactionMark()))
        return await asyncio.wrap_future(result)

    running = blocking_loop().submit(work(hand_over))
    either: list[Future[Any]] = [handed, running]
    wait(either, return_when=FIRST_COMPLETED)
    if handed.done():
        transaction, mark = handed.result()
        try:
            with mark:
                result.set_result(body(BlockingTransaction(transaction)))
        except BaseException as problem:
            result.set_exception(problem)
    return running.result()
