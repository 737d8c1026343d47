"""The durable truth, in domain verbs.

One group of operations is one transaction, flushed before its results are given out; after that no kill -9
loses it. A store implements `commit`, the questions of `LedgerQueries` and forgetting; admission, the memory
of recent ids and waiting for an outcome are here, once, for all stores.

The memory of recent ids only makes repeats cheap. It is filled after a commit and asked before one, it is
bounded, and it is never the truth: an id that it does not know is looked up in the store.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from copy import copy
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from msgspec import Struct

from duly.core import horizon as horizons
from duly.core.dedup import TimeWindow
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
    Postpone,
    R,
    Recall,
    Results,
    Withdraw,
    Write,
    numbered,
)
from duly.core.trusted_time import CONFIRM, Floor, TrustedClock
from duly.runtime.clock import Clock, SystemClock
from duly.storage.interpreter import MessageRow
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
    "HOT_IDS",
    "NEWEST",
    "OLDEST",
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

HOT_IDS: Final = 20_000
"""How many recent ids are answered from memory: about 10 MB, whatever the ledger's size."""


REFUSALS_KEPT: Final = 10_000
"""The latest refusals are kept, however many there are: a flood of them must not fill the disk."""


class Transaction(Protocol):
    """The ledger's own transaction, open for the caller's SQL. It commits when its block ends, with the
    memory of the message; or not at all."""

    async def execute(self, sql: str, *args: Any) -> None:
        """Run a statement."""
        ...

    async def fetch(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        ...

    async def write(self, *operations: Write) -> Results:
        """Carry a group of operations out within this transaction."""
        ...


class _RecentMessage(Struct, gc=False):
    """What a repeat of a recent message is told."""

    fingerprint: bytes
    state: State
    answer: Answer | None


class Ledger(LedgerQueries):
    """Base of all ledgers. Open one with `duly.open_ledger`."""

    sole: bool = True
    """No other process writes while this ledger is open: leases of earlier processes are void, and what
    memory says of a message's state is current."""

    confirm: int = CONFIRM
    """how long a clock that is ahead must stay so before it is believed"""

    def __init__(self, clock: Clock | None = None, *, hot: int = HOT_IDS) -> None:
        self.clock: Clock = clock or SystemClock()
        self.worker = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._hot: TimeWindow[_RecentMessage] = TimeWindow(hot)
        self._waiters: dict[bytes, list[asyncio.Future[None]]] = {}
        self._witness = TrustedClock(self.clock.now(), _steady(self.clock), self.confirm)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    async def admit(
        self, message: Message, *, horizon: Horizon = horizons.DEFAULT, listed: bool = False
    ) -> Verdict:
        """Admit one message, atomically. Many concurrent callers share one flush.

        A repeat gets the state and the answer of the first; other content under the same id is a
        conflict; what is too old to be remembered is stale. A `listed` message is found by its kind.
        """
        now = self.clock.now()
        known = self.recall(message, now)
        if known is not None:
            return known
        return await self.apply(_admission(message, horizon, now, listed))

    async def admit_many(
        self, messages: Sequence[Message], *, horizon: Horizon = horizons.DEFAULT
    ) -> list[Verdict]:
        """Admit a batch: a verdict per message, one flush for all."""
        now = self.clock.now()
        known = [self.recall(message, now) for message in messages]
        asked = [
            _admission(message, horizon, now)
            for message, verdict in zip(messages, known, strict=True)
            if verdict is None
        ]
        answers = zip(asked, await self.commit([(each,) for each in asked]) if asked else (), strict=True)
        told = (results.of(operation) for operation, results in answers)
        return [verdict or next(told) for verdict in known]

    def is_gone(self, worker: str) -> bool:
        """Return whether another worker on this ledger has certainly ended; False if that cannot be told."""
        return False

    def recall(self, message: Message, now: int) -> Verdict | None:
        """Return the verdict on a repeat, if memory can tell; None says nothing. A conflict goes to the
        store, where it is recorded."""
        return repeat_of(message, self._hot.get(message.key, now))

    async def write(self, *operations: Write) -> Results:
        """Commit one group: all of it or nothing."""
        return (await self.commit((operations,)))[0]

    async def apply(self, operation: Operation[R], *also: Write) -> R:
        """Commit one operation, with others in the same group; return what the first one did."""
        results = await self.write(cast("Write", operation), *also)  # every operation is one of that union
        return results.of(operation)

    @abstractmethod
    def commit(self, groups: Sequence[Group]) -> Awaitable[list[Results]]:
        """Commit groups with one flush, in order, each whole or not at all; return their results in that
        order.

        An implementation calls `_learn` when a commit is through, whether or not the caller still waits.
        """

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction of the caller's own. Keep it short: in SQLite no other caller writes
        meanwhile."""

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    async def wait(self, key: bytes, seconds: float | None = None) -> Record | None:
        """Return the record once the message has ended, or as it stands when `seconds` have passed; None if
        there is no such message (any more)."""
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

    @contextmanager
    def watch(self, key: bytes) -> Iterator[asyncio.Future[None]]:
        """Give a future that is done when there is news of this message: it ended, was withdrawn or given
        back. Ask the ledger inside the block: what happens after the question is then not missed."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(news)
        try:
            yield news
        finally:
            waiting = self._waiters.get(key)
            if waiting is not None and news in waiting:
                waiting.remove(news)
                if not waiting:
                    del self._waiters[key]

    # ── forgetting ───────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        """Forget up to `limit` messages (of these, if `keys` are given) that have ended and can no longer be
        accepted, with their deliveries; returns how many. Raises the floor first, so that none of them is
        ever fresh again; but not beyond time that can be trusted."""

    async def forget(self, keys: Sequence[bytes]) -> int:
        """Forget these messages with their deliveries, however they stand; returns how many there were. The
        same ids are fresh again: what has taken effect may do so a second time."""
        known = [record.message.key for record in await self.find_all(keys)]
        await self._drop(known)
        for key in known:
            self._hot.drop(key)
            self._wake(key)
        return len(known)

    @abstractmethod
    async def _drop(self, keys: Sequence[bytes]) -> None:
        """Remove these messages and their deliveries."""

    @abstractmethod
    async def _set_floor(self, floor: Floor) -> None:
        """Store the floor."""

    async def mend_floor(self, *, everything: bool = False) -> Floor:
        """Take back a floor that lies in the future because a clock was wrong, and return the new one; see
        `Floor.mend`."""
        old = await self.floor()
        new = old.mend(self.clock.now(), everything=everything)
        if new != old:
            await self._set_floor(new)
        return new

    def _raised(self, floor: Floor) -> Floor:
        """Return the floor as pruning may raise it now."""
        return self._witness.judge(floor, self.clock.now(), _steady(self.clock))

    async def _would_raise(self) -> Floor:
        """Return the floor as pruning would raise it now, without raising it."""
        seen = copy(self._witness)
        return seen.judge(await self.floor(), self.clock.now(), _steady(self.clock))

    @abstractmethod
    async def forget_deliveries(self, refs: Sequence[DeliveryRef]) -> int:
        """Forget those of these deliveries that have ended; returns how many. Their messages stay."""

    @abstractmethod
    async def trim(self, stream: str, through: int) -> None:
        """Drop a stream's entries up to `through`. Its numbers go on; readers behind it see the gap."""

    async def scrub(self) -> None:
        """Make what was overwritten or deleted unreadable in the ledger's own files."""
        return

    def check(self) -> None:
        """Raise a `LedgerError` if this ledger has become unfit for use, without asking it anything."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Finish what was handed over, then close connections and files."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ── what memory learns from a commit ─────────────────────────────────────────────────────────

    def _learn(self, committed: Sequence[Results]) -> None:
        """Take in what was committed: the results of groups, in order."""
        self._remember(committed)
        if self._waiters:
            for results in committed:
                for operation, result in zip(results.operations, results.values, strict=True):
                    self._wake_those_of(operation, result)

    def _wake_those_of(self, operation: Write, result: Any) -> None:
        """Wake those who wait for what an operation has ended, freed or given back."""
        match operation:
            case Advance(key=key, to=to):
                if result.moved and to.terminal:
                    self._wake(key)
            case AppendEntry(ends=True, key=key) | Withdraw(key=key) | Postpone(ref=DeliveryRef(key=key)):
                if result:
                    self._wake(key)

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
                    self._hot.drop(operation.key)

    def _admitted(self, admit: Admit, verdict: Verdict) -> None:
        message = admit.message
        if verdict.kind is VerdictKind.FRESH:
            if self.sole:
                self._hot.put(
                    message.key, _RecentMessage(message.fingerprint, admit.state, None), admit.until
                )
        elif verdict.state is not None and not admit.sliding and (self.sole or _settled(verdict.state)):
            known = _RecentMessage(message.fingerprint, verdict.state, verdict.answer)
            self._hot.put(message.key, known, admit.until)

    def _moved(self, key: bytes, to: State, answer: Answer | None) -> None:
        hot = self._hot.get(key, 0)
        if hot is not None:
            hot.state, hot.answer = to, answer

    def _wake(self, key: bytes) -> None:
        """Wake those who wait for this key: they ask the ledger again."""
        for future in self._waiters.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def _wake_all(self) -> None:
        """Wake all who wait: the ledger is closed, and they hear it when they ask again."""
        for key in list(self._waiters):
            self._wake(key)


_REPEATS: Final = {state: Verdict(VerdictKind.DUPLICATE, state) for state in State}
"""What a repeat is told of a message that was just admitted."""


def repeat_of(message: Message, known: MessageRow | None) -> Verdict | None:
    """Return what a repeat of a message is told, if this is the first; None says nothing."""
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


def _steady(clock: Clock) -> int:
    """Return the steady time of a clock; a foreign clock that has none gets the system's."""
    steady = getattr(clock, "steady", None)
    return SystemClock().steady() if steady is None else cast("int", steady())


def _settled(state: State) -> bool:
    return state.terminal and state is not State.UNKNOWN
