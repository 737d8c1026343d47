"""The ledger: the durable record of all messages, and the base class of all stores.

One group of operations is one transaction. It is flushed before its results are returned, so no kill -9
loses a group that was reported. A store implements `commit`, the queries of `LedgerQueries`, and forgetting;
admission, the cache of recent ids and waiting for an outcome are implemented here for all stores.

The cache of recent ids only makes repeats cheap. It is filled after a commit and read before one, its size is
bounded, and it is never authoritative: an id that is not in it is looked up in the store.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from copy import copy
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from msgspec import Struct

from duly.core import horizon as horizons
from duly.core.expiring_cache import ExpiringCache
from duly.core.horizon import Horizon
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.operations import (
    Admit,
    Advance,
    AppendEntry,
    DeliveryRef,
    Group,
    Operation,
    R,
    Recall,
    Results,
    Withdraw,
    Write,
    numbered,
)
from duly.core.trusted_time import CONFIRM, Floor, TrustedClock
from duly.errors import LedgerError
from duly.runtime.clock import Clock, SystemClock
from duly.storage.interpreter import MessageRow
from duly.storage.outcome_waiters import OutcomeWaiters
from duly.storage.queries import LedgerQueries
from duly.storage.records import (
    NEWEST,
    OLDEST,
    AgedMessage,
    Description,
    Page,
    Record,
    Refusal,
    Size,
    StreamEntry,
    StreamPosition,
    StreamRange,
)

__all__ = [
    "NEWEST",
    "OLDEST",
    "RECENT_KEPT",
    "REFUSALS_KEPT",
    "AgedMessage",
    "Description",
    "Ledger",
    "Page",
    "Record",
    "Refusal",
    "Size",
    "StreamEntry",
    "StreamPosition",
    "StreamRange",
    "Transaction",
]

RECENT_KEPT: Final = 20_000
"""How many recent messages are cached: about 10 MB, regardless of the ledger's size."""


REFUSALS_KEPT: Final = 10_000
"""How many refusals are kept, the latest ones: a flood of refusals must not fill the disk."""


class Transaction(Protocol):
    """The ledger's own transaction, open for the caller's SQL. The caller's changes and the ledger's record
    of the message commit together when the block ends, or neither does."""

    async def execute(self, sql: str, *args: object) -> None:
        """Run a statement."""
        ...

    async def fetch(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        ...

    async def write(self, *operations: Write) -> Results:
        """Carry out a group of operations within this transaction."""
        ...


class _RecentMessage(Struct, gc=False):
    """A recent message, as needed to answer its repeats."""

    fingerprint: bytes
    state: State
    answer: Answer | None


class Ledger(LedgerQueries):
    """Base of all ledgers. Open one with `duly.open_ledger`."""

    sole: bool = True
    """Whether no other process writes while this ledger is open: then leases of earlier processes are void,
    and the state of a message in memory is current."""

    confirm: int = CONFIRM
    """how long a clock that jumped ahead must stay ahead before it is trusted"""

    def __init__(self, clock: Clock | None = None, *, recent: int = RECENT_KEPT) -> None:
        self.clock: Clock = clock or SystemClock()
        self.worker = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._recent: ExpiringCache[_RecentMessage] = ExpiringCache(recent)
        self._waiters = OutcomeWaiters()
        self._witness = TrustedClock(self.clock.now(), _steady(self.clock), self.confirm)
        self.on_read_error: Callable[[LedgerError], object] = _not_reported
        """gets the error of each read that fails for a reason that does not pass by itself, such as damage"""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    async def admit(
        self, message: Message, *, horizon: Horizon = horizons.DEFAULT, listed: bool = False
    ) -> Verdict:
        """Admit one message, atomically. Many concurrent callers share one flush.

        A repeat gets the state and the answer of the first message; other content under the same id is a
        conflict; a message too old to be remembered is stale. A `listed` message can be found by its kind.
        """
        now = self.clock.now()
        known = self.recall(message, now)
        if known is not None:
            return known
        admission = _admission(message, horizon, now, listed)
        (results,) = await self.commit(((admission,),))
        return results.of(admission)

    async def admit_many(self, messages: Sequence[Message]) -> list[Verdict]:
        """Admit several messages with one flush; return a verdict for each."""
        now = self.clock.now()
        known = [self.recall(message, now) for message in messages]
        asked = [
            _admission(message, horizons.DEFAULT, now)
            for message, verdict in zip(messages, known, strict=True)
            if verdict is None
        ]
        answers = zip(asked, await self.commit([(each,) for each in asked]) if asked else (), strict=True)
        told = (results.of(operation) for operation, results in answers)
        return [verdict or next(told) for verdict in known]

    def is_gone(self, worker: str) -> bool:
        """Return whether another worker on this ledger has certainly ended; False if it is not known."""
        return False

    def recall(self, message: Message, now: int) -> Verdict | None:
        """Return the verdict on a repeat if it is in memory. None does not mean that the message is new. A
        conflict also returns None: the store finds and records it."""
        return repeat_of(message, self._recent.get(message.key, now))

    async def write(self, *operations: Write) -> Results:
        """Commit one group: all of it or nothing."""
        return (await self.commit((operations,)))[0]

    async def apply(self, operation: Operation[R], *also: Write) -> R:
        """Commit an operation, with others in the same group; return the result of the first."""
        group = (cast("Write", operation), *also)  # every operation is a member of this union
        (results,) = await self.commit((group,))
        return results.of(operation)

    @abstractmethod
    def commit(self, groups: Sequence[Group]) -> Awaitable[list[Results]]:
        """Commit groups with one flush, in order, each as a whole or not at all; return their results in the
        same order.

        An implementation calls `_learn` after the commit, whether or not the caller still waits.
        """

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction for the caller. Keep it short: in SQLite no other caller can write until it
        ends."""

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    async def wait(self, key: bytes, seconds: float | None = None) -> Record | None:
        """Return the record once the message has ended, or its current record after `seconds`; None if the
        message does not exist, or no longer does."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    with self.watch(key) as news:
                        record = await self.find(key)
                        if record is None or record.state.terminal:
                            return record
                        await news
        except TimeoutError:
            return await self.find(key)

    def watch(self, key: bytes) -> AbstractContextManager[asyncio.Future[None]]:
        """Return a context with a future that is done when the message changes: it ended, was withdrawn or
        was postponed. Query the ledger inside the block, so that no change after the query is missed."""
        return self._waiters.watch(key)

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        """Forget up to `limit` messages (of these, if `keys` are given) that have ended and can no longer be
        accepted, with their deliveries; return how many. The floor is raised first, so that none of them is
        ever fresh again, but never beyond the trusted time."""

    async def forget(self, keys: Sequence[bytes]) -> int:
        """Forget these messages with their deliveries, in whatever state they are; return how many there
        were. Their ids are fresh again, so a message that took effect may do so a second time."""
        known = [record.message.key for record in await self.find_all(keys)]
        await self._drop(known)
        for key in known:
            self._recent.drop(key)
            self._waiters.wake(key)
        return len(known)

    @abstractmethod
    async def _drop(self, keys: Sequence[bytes]) -> None:
        """Remove these messages and their deliveries."""

    @abstractmethod
    async def set_floor(self, floor: Floor) -> None:
        """Store the floor."""

    def _raised(self, floor: Floor) -> Floor:
        """Return the floor to which pruning may raise the given one now."""
        return self._witness.judge(floor, self.clock.now(), _steady(self.clock))

    async def _would_raise(self) -> Floor:
        """Return the floor to which pruning would raise the stored one now, without raising it."""
        seen = copy(self._witness)
        return seen.judge(await self.floor(), self.clock.now(), _steady(self.clock))

    @abstractmethod
    async def forget_deliveries(self, refs: Sequence[DeliveryRef]) -> int:
        """Forget the deliveries among these that have ended; return how many. Their messages stay."""

    @abstractmethod
    async def trim(self, stream: str, through: int) -> None:
        """Delete a stream's entries up to `through`. Numbering continues; readers behind it see a gap."""

    async def scrub(self) -> None:
        """Make overwritten and deleted data unreadable in the ledger's own files."""
        return

    def check(self) -> None:
        """Raise a `LedgerError` if this ledger has become unfit for use; no query is run."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Finish the submitted commits, then close connections and files."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ── what memory learns from a commit ─────────────────────────────────────────────────────────

    def _learn(self, committed: Sequence[Results]) -> None:
        """Remember what was committed and wake its waiters, given the results of groups in order."""
        self._remember(committed)
        if self._waiters.by_key:
            self._waiters.learn(committed)

    def _remember(self, committed: Iterable[Results]) -> None:
        """Remember recent messages, for `recall`."""
        for results in committed:
            values = results.values
            for at, operation in enumerate(results.operations):
                if type(operation) is Admit:
                    self._admitted(operation, values[at])
                elif type(operation) is Advance:
                    if values[at].moved:
                        self._moved(operation.key, operation.to, operation.answer)
                elif type(operation) is AppendEntry:
                    if operation.ends:
                        self._moved(operation.key, State.DONE, numbered(values[at]))
                elif type(operation) is Withdraw and values[at]:
                    self._recent.drop(operation.key)

    def _admitted(self, admit: Admit, verdict: Verdict) -> None:
        message = admit.message
        if verdict.kind is VerdictKind.FRESH:
            if self.sole:
                self._recent.put(
                    message.key, _RecentMessage(message.fingerprint, admit.state, None), admit.until
                )
        elif verdict.state is not None and not admit.sliding and (self.sole or _settled(verdict.state)):
            known = _RecentMessage(message.fingerprint, verdict.state, verdict.answer)
            self._recent.put(message.key, known, admit.until)

    def _moved(self, key: bytes, to: State, answer: Answer | None) -> None:
        recent = self._recent.get(key, 0)
        if recent is not None:
            recent.state, recent.answer = to, answer


_REPEATS: Final = {state: Verdict(VerdictKind.DUPLICATE, state) for state in State}
"""The verdict on a repeat of a message without an answer, by the message's state."""


def repeat_of(message: Message, known: MessageRow | None) -> Verdict | None:
    """Return the verdict on `message` if it repeats `known`; None if that is unknown or has other content."""
    if known is None or known.fingerprint != message.fingerprint:
        return None
    return (
        _REPEATS[known.state]
        if known.answer is None
        else Verdict(VerdictKind.DUPLICATE, known.state, known.answer)
    )


def _admission(message: Message, horizon: Horizon, now: int, listed: bool = False) -> Admit | Recall:
    """Return the operation that admits a message, or recalls it if it is too old or from the future."""
    refusal = horizons.judge(message, horizon, now)
    if refusal is not None:
        return Recall(message, refusal, now)
    return Admit(message, horizons.remember_until(message, horizon), now, listed=listed)


@contextmanager
def reading(ledger: Ledger) -> Iterator[None]:
    """Report the error of a read that only the operator can solve."""
    try:
        yield
    except LedgerError as problem:
        if not problem.retry:
            ledger.on_read_error(problem)
        raise


def _not_reported(_: LedgerError) -> None:
    """Ignore a failure; its caller gets the error."""


def _steady(clock: Clock) -> int:
    """Return the steady time of a clock, or the system's if the caller's clock has none."""
    steady = getattr(clock, "steady", None)
    return SystemClock().steady() if steady is None else cast("int", steady())


def _settled(state: State) -> bool:
    return state.terminal and state is not State.UNKNOWN
