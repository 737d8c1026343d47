"""The durable truth, in domain verbs.

The law: one group of writes is one transaction, flushed before its results are given out; after that
no kill -9 loses it. Who implements a ledger implements `commit` and a few reads; admission, the memory
of hot ids and waiting for an outcome are here, once, for all of them.

The memory of hot ids only makes repeats cheap. It is filled after a commit and asked before one, it is
bounded, and it is never the truth: what it does not know goes to the ledger.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from copy import copy
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from msgspec import Struct

from duly.core import horizon as horizons
from duly.core.dedup import TimeWindow
from duly.core.horizon import Horizon
from duly.core.ids import time_of
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, Word, key_of
from duly.core.operations import (
    Admit,
    Advance,
    AppendEntry,
    Delivery,
    DeliveryRef,
    Group,
    OpenDelivery,
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
from duly.core.units import FOREVER, MS
from duly.errors import Malformed
from duly.runtime.clock import Clock, SystemClock

HOT_IDS: Final = 20_000
"""How many recent ids are answered from memory: about 10 MB, whatever the ledger's size."""

WITH_ID_PAGES: Final = 20
LOOKED_AT: Final = 10_000
"""Most messages that one filtered page looks at, however many there are: a list must not stop the hub."""

REFUSALS_KEPT: Final = 10_000
"""The latest refusals are kept, however many there are: a flood of them must not fill the disk."""


NEWEST: Final = (FOREVER, b"")
"""Above every listed message."""
OLDEST: Final = (0, b"")
"""Below every listed message."""


class Record(Struct, frozen=True):
    """One message as the ledger holds it, with the times it went through."""

    message: Message
    state: State
    answer: Answer | None
    until: int
    accepted_at: int
    moved_at: int

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the message."""
        return self.message.fingerprint


class Page(Struct, frozen=True):
    """Some messages, newest first. The next page is the one before `next`; None: that was all.

    A page may be short, or empty, and still have a next one: nothing else was found where it looked.
    """

    records: list[Record]
    next: bytes | None = None


class AgedMessage(Struct, frozen=True):
    """An old message, and those of its deliveries that have ended, if it has ended itself."""

    accepted_at: int
    key: bytes
    deliveries: list[Delivery]


class StreamEntry(Struct, frozen=True):
    """One entry of a stream."""

    n: int
    body: bytes
    at: int
    key: bytes = b""


class StreamRange(Struct, frozen=True):
    """What a stream holds: entries `first` to `last`. Empty if first > last; older ones were trimmed."""

    first: int = 1
    last: int = 0


class StreamPosition(Struct, frozen=True, gc=False):
    """A stream's last number, and how far one reader has come in it; None: they never said."""

    last: int
    cursor: int | None


class Refusal(Struct, frozen=True):
    """Why nothing happened."""

    scope: str
    id: str
    word: str
    reason: str
    at: int


class Size(Struct, frozen=True):
    """How much the ledger remembers."""

    messages: int
    deliveries: int
    bytes: int


class Description(Struct, frozen=True):
    """What a ledger is made of: its engine with its version, and the number of its schema."""

    engine: str
    schema: int


class Transaction(Protocol):
    """The ledger's own transaction, open for the caller's SQL. It commits when its block ends, with the
    memory of the message; or not at all."""

    async def execute(self, sql: str, *args: Any) -> None: ...
    async def fetch(self, sql: str, *args: Any) -> list[tuple[Any, ...]]: ...
    async def write(self, *operations: Write) -> Results: ...


class _RecentMessage(Struct, gc=False):
    """What a repeat is told."""

    fingerprint: bytes
    state: State
    answer: Answer | None


class Ledger(ABC):
    """Base of all ledgers. Open one with `duly.open_ledger`."""

    sole: bool = True
    """Nobody else writes while we are open: leases of earlier processes are void, and what memory says
    of a message's state is current."""

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

    def recall(self, message: Message, now: int) -> Verdict | None:
        """The verdict on a repeat, if memory can tell; None says nothing. A conflict goes to the ledger,
        where it is recorded."""
        hot = self._hot.get(message.key, now)
        if hot is None or hot.fingerprint != message.fingerprint:
            return None
        return _REPEATS[hot.state] if hot.answer is None else Verdict(Word.DUPLICATE, hot.state, hot.answer)

    async def write(self, *operations: Write) -> Results:
        """Commit one group: all of it or nothing."""
        return (await self.commit((operations,)))[0]

    async def apply(self, operation: Operation[R], *also: Write) -> R:
        """Commit one operation, with others in the same group; return what the first one did."""
        results = await self.write(cast("Write", operation), *also)  # every operation is one of that union
        return results.of(operation)

    @abstractmethod
    def commit(self, groups: Sequence[Group]) -> Awaitable[list[Results]]:
        """Commit groups with one flush. They are applied in order, each whole or not at all; results
        in the same order.

        An implementation calls `_learn` when a commit is through, whether or not the caller still waits.
        """

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction of the caller's own. Keep it short: in SQLite nobody else writes meanwhile."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def outcome(self, scope: str, id: str) -> Record | None:
        """What became of a message; None if it is not known (any more)."""
        return await self.find(key_of(scope, id))

    @abstractmethod
    async def find(self, key: bytes) -> Record | None: ...

    async def find_all(self, keys: Collection[bytes]) -> list[Record]:
        """What is known of these, in any order."""
        return [record for key in keys if (record := await self.find(key)) is not None]

    async def with_id(self, id_: str) -> list[Record]:
        """The messages of all senders who used this id. A key begins with the time in its id, so they lie
        together; of an id without a time, those among the newest `WITH_ID_PAGES` pages are found."""
        ms = (time_of(id_) or 0) // MS
        before: bytes | None = (ms + 1).to_bytes(6, "big")
        found: list[Record] = []
        for _ in range(WITH_ID_PAGES):
            page = await self.messages(before=before, limit=1_000)
            found += [record for record in page.records if record.message.id == id_]
            before = page.next
            if before is None or before[:6] < ms.to_bytes(6, "big"):
                break
        return found

    async def messages(
        self,
        *,
        scope: str | None = None,
        open_only: bool = False,
        before: bytes | None = None,
        limit: int = 100,
    ) -> Page:
        """A page of at most `limit` messages, newest first by key: by the time their ids carry; those whose
        ids carry none come last. `before` is the `next` of the page before.

        Finding one sender's messages, or the open ones, is a search without an index, since an index would
        be paid for by every message. So a page looks at no more than `LOOKED_AT` of them and says where to
        go on.
        """
        if limit < 1:
            raise Malformed(f"a page holds at least one message, not {limit}")
        top = _BEYOND if before is None else before
        lead = None if scope is None else scope.encode(errors="surrogatepass") + b"\0"
        end = await self._key_below(top, LOOKED_AT) if lead is not None or open_only else None
        found = await self._between(end or b"", top, lead, open_only, limit)
        return Page(found, found[-1].message.key if len(found) == limit else end)

    @abstractmethod
    async def _key_below(self, top: bytes, count: int) -> bytes | None:
        """The `count`-th key below `top`, if there are so many."""

    @abstractmethod
    async def _between(
        self, end: bytes, top: bytes, lead: bytes | None, open_only: bool, limit: int
    ) -> list[Record]:
        """Messages with end <= key < top, highest first; `lead` is how their keys go on behind the time."""

    @abstractmethod
    async def of_kind(self, kind: str, before: tuple[int, bytes] = NEWEST, limit: int = 100) -> list[Record]:
        """Messages of a kind that were admitted as `listed`, newest first by (when they were accepted, key),
        below `before`."""

    @abstractmethod
    async def open_deliveries(self, channel: str) -> list[OpenDelivery]:
        """All deliveries of a channel that have not ended, in the order of their messages' acceptance."""

    async def booked(self, channel: str, recipients: Collection[str]) -> list[OpenDelivery]:
        """Deliveries for these recipients that wait, and nobody holds, in the same order."""
        return [
            item
            for item in await self.open_deliveries(channel)
            if item.delivery.ref.recipient in recipients and item.delivery.state is State.ACCEPTED
        ]

    async def strays(
        self, channel: str, *, here: Collection[str], worker: str, living: Collection[str], now: int
    ) -> list[OpenDelivery]:
        """What this worker should see to, of a channel that several work on, in the same order: open
        deliveries for those recipients who are `here` that others hold, or nobody; those of workers that
        no longer live; and those whose end has passed while nobody held them."""
        return [
            item
            for item in await self.open_deliveries(channel)
            if (held := item.delivery).worker not in ("", *living)
            or (held.ref.recipient in here and held.worker != worker)
            or (not held.worker and 1 <= held.expires <= now)
        ]

    @abstractmethod
    async def deliveries(self, key: bytes) -> list[Delivery]: ...
    @abstractmethod
    async def entries(self, stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]: ...
    @abstractmethod
    async def extent(self, stream: str) -> StreamRange: ...
    async def lasts(self, streams: Collection[str]) -> dict[str, int]:
        """The last number of each of these streams; those that have none are left out."""
        return {stream: last for stream in streams if (last := (await self.extent(stream)).last)}

    @abstractmethod
    async def cursor(self, stream: str, reader: str) -> int: ...
    @abstractmethod
    async def cursors(self, stream: str) -> dict[str, int]:
        """How far every reader of a stream has come."""

    @abstractmethod
    async def standing(self, places: Sequence[tuple[str, str]]) -> list[StreamPosition]:
        """How readers stand in streams, for many (stream, reader) with one question."""

    @abstractmethod
    async def marks(self, lead: str = "") -> dict[str, tuple[int, int]]:
        """The high-water marks whose names begin so, the most recently raised ones if there are very many."""

    @abstractmethod
    async def bucket(self, bucket: str) -> dict[str, bytes]:
        """Everything on a bucket, by name, in the order of the names."""

    @abstractmethod
    async def item(self, bucket: str, name: str) -> bytes | None: ...
    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """What lies there, for many (bucket, name) with one question."""
        return [await self.item(bucket, name) for bucket, name in places]

    async def counts(self, buckets: Collection[str]) -> dict[str, int]:
        """How much lies on each of these buckets; those that are empty are left out."""
        return {bucket: count for bucket in buckets if (count := len(await self.bucket(bucket)))}

    @abstractmethod
    async def refusals(self, limit: int = 100) -> list[Refusal]:
        """The latest refusals, newest first."""

    @abstractmethod
    async def size(self) -> Size: ...
    @abstractmethod
    async def describe(self) -> Description: ...

    async def wait(self, key: bytes, seconds: float | None = None) -> Record | None:
        """The record once the message has ended, or as it stands when `seconds` have passed; None if
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
        """A future that is done when there is news of this message: it ended, was withdrawn or given
        back. Look at the ledger inside the block: what happens after the look is then not missed."""
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
    async def prunable(self, limit: int = 1_000) -> list[Record]:
        """What `prune` would forget now, the oldest first."""

    @abstractmethod
    async def prune(self, *, limit: int = 1_000, keys: Sequence[bytes] | None = None) -> int:
        """Forget up to `limit` messages (of these, if `keys` are given) that have ended and can no longer be
        accepted, with their deliveries; returns how many. Raises the floor first, so that none of them is
        ever fresh again; but not beyond time that can be trusted."""

    @abstractmethod
    async def floor(self) -> Floor:
        """What may have been forgotten, and the time that is trusted."""

    @abstractmethod
    async def _set_floor(self, floor: Floor) -> None: ...

    async def mend_floor(self, *, everything: bool = False) -> Floor:
        """Take back a floor that lies in the future, since a clock was wrong; the floor then. See
        `Floor.mend`."""
        old = await self.floor()
        new = old.mend(self.clock.now(), everything=everything)
        if new != old:
            await self._set_floor(new)
        return new

    def _raised(self, floor: Floor) -> Floor:
        """The floor as pruning may raise it now."""
        return self._witness.judge(floor, self.clock.now(), _steady(self.clock))

    async def _would_raise(self) -> Floor:
        """The same, without doing it."""
        seen = copy(self._witness)
        return seen.judge(await self.floor(), self.clock.now(), _steady(self.clock))

    @abstractmethod
    async def aged(
        self, kind: str, after: tuple[int, bytes], until: int, limit: int = 100
    ) -> list[AgedMessage]:
        """Messages of a kind that were admitted as `listed`, above `after`, accepted before `until`, oldest
        first by (when they were accepted, key)."""

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
        """Finish what was handed over, then let go of everything."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ── what memory learns from a commit ─────────────────────────────────────────────────────────

    def _learn(self, committed: Iterable[Results]) -> None:
        """Take in what was committed: the results of groups, in order."""
        for results in committed:
            values = results.values
            for at, operation in enumerate(results.operations):
                if type(operation) is Admit:
                    self._admitted(operation, values[at])
                elif type(operation) is Advance:
                    if values[at].moved:
                        self._moved(operation.key, operation.to, operation.answer)
                elif type(operation) in _NEWS and values[at]:
                    self._learn_rare(operation, values[at])

    def _learn_rare(self, operation: Write, result: int) -> None:
        match operation:
            case AppendEntry(ends=True, key=key):
                self._moved(key, State.DONE, numbered(result))
            case Withdraw(key=key):
                self._hot.drop(key)
                self._wake(key)
            case Postpone(ref=ref):
                self._wake(ref.key)

    def _admitted(self, admit: Admit, verdict: Verdict) -> None:
        message = admit.message
        if verdict.word is Word.FRESH:
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
        if key in self._waiters and to.terminal:
            self._wake(key)

    def _wake(self, key: bytes) -> None:
        """Everyone waiting for this key looks again."""
        for future in self._waiters.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def _wake_all(self) -> None:
        """The ledger is closed: everyone waiting looks again, and hears it."""
        for key in list(self._waiters):
            self._wake(key)


_NEWS: Final = frozenset({AppendEntry, Withdraw, Postpone})
"""Operations that end a message, free its id or give an attempt back."""

_BEYOND: Final = b"\xff" * 7
"""Above every key: six bytes of time and then text, where UTF-8 has no such byte."""

_REPEATS: Final = {state: Verdict(Word.DUPLICATE, state) for state in State}
"""What a repeat is told of a message that was just admitted."""


def _admission(message: Message, horizon: Horizon, now: int, listed: bool = False) -> Admit | Recall:
    """What to ask the ledger about a message that memory does not know."""
    refusal = horizons.judge(message, horizon, now)
    if refusal is not None:
        return Recall(message, refusal, now)
    return Admit(message, horizons.remember_until(message, horizon), now, listed=listed)


def _steady(clock: Clock) -> int:
    """A clock of somebody else's that has none is helped out."""
    steady = getattr(clock, "steady", None)
    return SystemClock().steady() if steady is None else cast("int", steady())


def _settled(state: State) -> bool:
    return state.terminal and state is not State.UNKNOWN
