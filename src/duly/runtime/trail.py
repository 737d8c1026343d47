"""The trail: records hop by hop what happened to every message at this hub, in the ledger.

The laws. Noting a hop appends it to the hops of its message; everything else happens in batches, a few times
a second: hops are counted (`telemetry`) and written to the ledger as an entry of a stream. The stream is
bounded by age and size. Questions about the newest hops are answered from memory, about older ones from the
entries written while the message was under way. A hub that is killed loses the hops of the last moment, never
an outcome.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.flow_control import next_page
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, names_in
from duly.core.operations import AppendEntry, OpenDelivery, PutNewItem
from duly.core.units import DAY, FOREVER, HOUR, MS, SECOND
from duly.runtime.hop_counts import (
    ENDED,
    HOP_WIDTH,
    NOTED,
    OPEN_KEPT,
    SAID,
    SENT,
    UNHEARD,
    HopCounts,
    HopValues,
    NotedHop,
    NotedHops,
    each,
)
from duly.runtime.telemetry import Telemetry
from duly.storage.ledger import Ledger, Record, StreamEntry

LOG: Final = logging.getLogger("duly.messages")

STREAMS: Final = "trail/"
"""The prefix of trail names; the name of the hub follows."""
HUBS: Final = "trails"
"""The bucket with the names of the hubs that have a trail."""
HOPS_KEPT: Final = 15_000
"""How many hops are kept in memory; a command has three, if all goes well."""
FLUSH_SECONDS: Final = 0.25
UNSAVED: Final = 600
"""How many batches of hops, each of a quarter of a second, may wait for a ledger that does not answer; beyond
that the oldest are lost."""
HOPS_IN_ENTRY: Final = 5_000
PAGE: Final = 100
SCANNED_ENTRIES: Final = 20_000
SCANNED_BYTES: Final = 64 * 1024 * 1024
"""How much of one hub's stream is searched for one message."""
EARLIER: Final = HOUR
"""How long before its acceptance a message may have been refused under the same id."""
KEPT: Final = 7 * DAY
BYTES_KEPT: Final = 128 * 1024 * 1024
UNTOLD: Final = "untold"
"""Marks the outcome of a message whose sender was not connected to be told."""
DETAIL_LIMIT: Final = 300
"""The most characters of a reason that are kept."""


class Hop(Struct, frozen=True, gc=False, omit_defaults=True):
    """Something that happened to a message: when (ms), what, in which attempt, why or to whom, and where; for
    a verdict and an outcome also whether its sender was not connected."""

    time: int
    what: str
    attempt: int = 0
    detail: str = ""
    hub: str = ""
    untold: bool = False


class _TrailEntry(Struct, frozen=True, array_like=True):
    """The hops of one moment. Earlier versions stored a list for each hop: microseconds after `began`, the
    word or its number, the attempt and the detail."""

    began: int
    hops: dict[bytes, HopValues]


_WORDS: Final = (
    "fresh", "duplicate", "sent", "done", "failed", "expired", "superseded", "cancelled", "unknown",
    "at work", "delivered", "conflict", "stale", "offline", "read", "attempt",
)  # fmt: skip
"""Words that earlier versions stored as numbers: never change the order."""
_WITH_KIND: Final = (SAID, SENT, UNHEARD)
"""The hops that have the kind of their message; the others have `UNTOLD` in its place, or nothing."""
_LEAD: Final = 8
"""The prefix of an entry: how many bytes the stream has had up to it."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_TrailEntry).decode


class Trail:
    """The trail of one hub. With `size` 0 nothing is written to the ledger."""

    def __init__(
        self, ledger: Ledger, telemetry: Telemetry | None = None, *, kept: int = KEPT, size: int = BYTES_KEPT
    ) -> None:
        self._ledger = ledger
        self._telemetry = telemetry or Telemetry()
        self._kept = kept
        self._size = size
        self._counts = HopCounts(self._telemetry)
        self._noted: NotedHops = defaultdict(tuple)
        self._logs = LOG.isEnabledFor(logging.DEBUG)
        """hops are logged"""
        self._recipients: dict[bytes, str] = {}
        """the recipients of messages whose hops are logged"""
        self._recent: deque[NotedHops] = deque()
        """the newest hops, as they were noted"""
        self._remembered = 0
        """how many hops those are"""
        self._unsaved: deque[NotedHops] = deque()
        self._written = -1
        """bytes written to the stream so far; -1 until its end was read"""

    @property
    def hub(self) -> str:
        """The name of this hub."""
        return self._telemetry.hub

    @property
    def stream(self) -> str:
        """The name of this hub's stream."""
        return _stream(self.hub)

    # ── noting ───────────────────────────────────────────────────────────────────────────────────

    def said(self, message: Message, verdict: Verdict, *, told: bool = True) -> None:
        """Note the verdict on a message, and whether its sender was told."""
        kind = SAID if told else UNHEARD
        hop = (self._ledger.clock.now(), verdict.named, 0, verdict.reason[:DETAIL_LIMIT], kind, message.kind)
        self._noted[message.key] += hop
        if self._logs:
            self._recipients[message.key] = message.recipient

    def sent(self, message: Message, attempt: int) -> None:
        """Note that a message was handed over to its recipient."""
        hop = (self._ledger.clock.now(), "sent", attempt, "", SENT, message.kind)
        self._noted[message.key] += hop
        if self._logs:
            self._recipients[message.key] = message.recipient

    def ended(self, key: bytes, state: State, reason: str = "", *, told: bool = True) -> None:
        """Note the outcome of a message here, and whether its sender was told."""
        about = "" if told else UNTOLD
        self._noted[key] += (
            self._ledger.clock.now(), state.word, 0, reason[:DETAIL_LIMIT], ENDED, about
        )  # fmt: skip

    def stored(
        self, message: Message, verdict: Verdict, state: State, *, told: bool = True, sent: bool = False
    ) -> None:
        """Note the verdict on a message that ended with it, whether its sender was told, and whether it was
        sent to a recipient at once."""
        now = self._ledger.clock.now()
        hops: HopValues = (
            now, verdict.named, 0, verdict.reason[:DETAIL_LIMIT], SAID if told else UNHEARD, message.kind,
            now, state.word, 0, "", ENDED, "" if told else UNTOLD,
        )  # fmt: skip
        if sent:
            hops += (now, "sent", 1, "", NOTED, "")
        self._noted[message.key] += hops
        if self._logs:
            self._recipients[message.key] = message.recipient

    def note(self, key: bytes, what: str, attempt: int = 0, detail: str = "", *, told: bool = True) -> None:
        """Note any other event of a message; also its outcome at another hub."""
        about = "" if told else UNTOLD
        self._noted[key] += (self._ledger.clock.now(), what, attempt, detail[:DETAIL_LIMIT], NOTED, about)

    def note_all(self, key: bytes, hops: Iterable[tuple[str, int, str]]) -> None:
        """Note several other events under one key: (what, attempt, detail)."""
        now = self._ledger.clock.now()
        values: list[object] = []
        for what, attempt, detail in hops:
            values += (now, what, attempt, detail[:DETAIL_LIMIT], NOTED, "")
        if values:
            self._noted[key] += tuple(values)

    def know(self, message: Message) -> None:
        """Take note of a message that ended before as `unknown`, and that is being settled."""
        self._counts.know(message)
        if self._logs:
            self._recipients[message.key] = message.recipient

    def resume(self, found: Sequence[OpenDelivery]) -> None:
        """Resume messages that were under way before a restart, or that another hub has accepted."""
        if any(item.delivery.attempt for item in found):
            self.fold()  # the first attempt may be among the hops that are not counted yet
        self._counts.resume(found, self._ledger.clock.now())
        if self._logs:
            self._recipients.update((item.message.key, item.message.recipient) for item in found)

    def resuming(
        self, ours: Callable[[], Awaitable[list[OpenDelivery]]]
    ) -> Callable[[], Awaitable[list[OpenDelivery]]]:
        """Return a function that reads the deliveries an engine resumes, and resumes their messages here."""

        async def read() -> list[OpenDelivery]:
            found = await ours()
            self.resume(found)
            return found

        return read

    def skewed(self, seconds: float) -> None:
        """Note how far the clock of a sender is from the hub's."""
        self._counts.skewed(seconds)

    # ── a few times a second ─────────────────────────────────────────────────────────────────────

    def fold(self) -> None:
        """Count the noted hops, and prepare them for writing."""
        noted = self._noted
        if not noted:
            return
        self._noted = defaultdict(tuple)
        self._logs = LOG.isEnabledFor(logging.DEBUG)
        if self._logs:
            self._log(noted)
        self._counts.count(noted)
        self._recent.append(noted)
        self._remembered += _count(noted)
        while self._remembered - (first := _count(self._recent[0])) >= HOPS_KEPT:
            self._remembered -= first
            self._recent.popleft()
        if self._size:
            self._unsaved.append(noted)
            if len(self._unsaved) > UNSAVED:
                self._unsaved.popleft()

    def oldest(self, is_under_way: Callable[[bytes], bool]) -> float:
        """Return the age of the oldest message under way in seconds, or 0."""
        return self._counts.oldest(is_under_way, self._ledger.clock.now())

    def skew(self) -> float:
        """Return the largest clock difference of the last minute or two, in seconds."""
        return self._counts.skew(self._ledger.clock.now())

    async def flush(self) -> None:
        """Write the hops that are not written yet."""
        self.fold()
        if self._unsaved and self._written < 0:
            await self._find_end()
        while self._unsaved:
            batch = self._unsaved.popleft()
            if _count(batch) > HOPS_IN_ENTRY:
                batch, rest = _split(batch)
                self._unsaved.appendleft(rest)
            body = _encode((0, batch))
            written = self._written + _LEAD + len(body)
            entry = AppendEntry(self.stream, written.to_bytes(_LEAD, "big") + body, self._ledger.clock.now())
            try:
                await self._ledger.write(entry)
            except BaseException:
                self._unsaved.appendleft(batch)  # the next flush tries again
                raise
            self._written = written

    async def _find_end(self) -> None:
        """Read the end of the stream, and announce the stream to the other hubs."""
        extent = await self._ledger.extent(self.stream)
        last = await self._ledger.entries(self.stream, extent.last - 1, 1) if extent.last else []
        await self._ledger.write(PutNewItem(HUBS, self._telemetry.hub, b""))
        self._written = _bytes_up_to(last[-1]) if last else 0

    async def trim(self) -> None:
        """Drop entries that are too old, or beyond the size of a trail."""
        extent = await self._ledger.extent(self.stream)
        if self._written < 0 or extent.first > extent.last:
            return
        oldest, fullest = self._ledger.clock.now() - self._kept, self._written - self._size

        def keeps(entry: StreamEntry) -> bool:
            return entry.at >= oldest and _bytes_up_to(entry) - len(entry.body) >= fullest

        first = await self._seek(self.stream, extent.first, extent.last, keeps)
        if first > extent.first:
            await self._ledger.trim(self.stream, first - 1)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    async def of_record(self, record: Record) -> list[Hop]:
        """Return what happened to a message in the ledger, including refusals under its id shortly before it
        was accepted."""
        return await self.of(record.message.key, begin_of(record))

    async def of(self, key: bytes, since: int) -> list[Hop]:
        """Return what happened to a message since `since` (µs), in order, at all hubs on its ledger. The
        search is bounded: for a message that is repeated hours after its end, the last repeats may be
        missing."""
        self.fold()
        me = self._telemetry.hub
        streams = set(await self._ledger.bucket(HUBS)) if self._size else set()
        if self._recent:
            streams.add(me)
        found: list[tuple[int, Hop]] = []
        for hub in sorted(streams):
            remembered = self._remembered_of(key) if hub == me else []
            begins = _begin(self._recent[0]) if hub == me and self._recent else FOREVER
            shown = "" if len(streams) == 1 else hub
            if since < begins and self._size:
                found += await self._stored(hub, key, since, begins, shown)
            found += [
                (at, _hop(at, what, attempt, why, shown, kind, about))
                for at, what, attempt, why, kind, about in remembered
            ]
        return [hop for _, hop in sorted(found, key=lambda one: one[0])]

    def _remembered_of(self, key: bytes) -> list[NotedHop]:
        return [hop for noted in self._recent for hop in each(noted.get(key, ()))]

    async def _stored(
        self, hub: str, key: bytes, since: int, until: int, shown: str
    ) -> list[tuple[int, Hop]]:
        """Return the hops of a message in the stream of a hub, from before `until`."""
        stream = _stream(hub)
        extent = await self._ledger.extent(stream)
        begin = await self._seek(stream, extent.first, extent.last, lambda entry: entry.at >= since)
        found: list[tuple[int, Hop]] = []
        after, looked, total, count, size = begin - 1, 0, 0, 0, 0
        while after < extent.last and looked < SCANNED_ENTRIES and total < SCANNED_BYTES:
            page = await self._ledger.entries(stream, after, next_page(count, size, PAGE))
            if not page:
                break
            count = len(page)
            size = sum(len(entry.body) for entry in page)
            looked, total = looked + count, total + size
            after = page[-1].n
            for entry in page:
                if key in entry.body:
                    found += _hops_in(entry, key, until, shown)
            if page[0].at - SECOND > until:
                break
        return found

    def _log(self, noted: NotedHops) -> None:
        """Log every hop, including retries and duplicates."""
        for key, hops in noted.items():
            try:
                scope, id_ = names_in(key)
            except UnicodeDecodeError:
                continue
            for _, what, attempt, detail, kind, about in each(hops):
                fields = {
                    "scope": scope, "id": id_, "kind": about if kind in _WITH_KIND else None,
                    "to": self._recipients.get(key), "attempt": attempt or None, "detail": detail,
                }  # fmt: skip
                untold = ", and its sender was not there to be told" if _is_untold(kind, about) else ""
                LOG.debug("%s%s", what, untold, extra=fields)
                if kind is ENDED:
                    self._recipients.pop(key, None)
        while len(self._recipients) > OPEN_KEPT:
            del self._recipients[next(iter(self._recipients))]

    async def _seek(self, stream: str, first: int, last: int, holds: Callable[[StreamEntry], bool]) -> int:
        """Return the number of the first entry for which this holds, as it does for all later ones; beyond
        the last if there is none."""
        low, high = first, last + 1
        while low < high:
            middle = (low + high) // 2
            found = await self._ledger.entries(stream, middle - 1, 1)
            if not found or holds(found[0]):
                high = middle
            else:
                low = found[0].n + 1
        return low


def _count(noted: NotedHops) -> int:
    """Return the number of hops."""
    return sum(map(len, noted.values())) // HOP_WIDTH


def _begin(noted: NotedHops) -> int:
    """Return the time of the first of these hops."""
    begin: int = next(iter(noted.values()))[0]
    return begin


def _split(noted: NotedHops) -> tuple[NotedHops, NotedHops]:
    """Return the hops that fit into one entry, and the rest."""
    rest: NotedHops = dict(noted)
    first: NotedHops = {}
    room = HOPS_IN_ENTRY * HOP_WIDTH
    for key, hops in noted.items():
        first[key], rest[key] = hops[:room], hops[room:]
        room -= len(first[key])
        if rest[key]:
            break
        del rest[key]
    return first, rest


def begin_of(record: Record) -> int:
    """Return the time from which there may be hops of a message."""
    accepted = record.accepted_at
    return max(min((record.message.made or accepted) - SECOND, accepted), accepted - EARLIER)


def _stream(hub: str) -> str:
    return STREAMS + hub


def is_readable(body: bytes) -> bool:
    """Return whether the body of an entry was written by a trail."""
    try:
        _decode(body[_LEAD:])
    except msgspec.DecodeError:
        return False
    return len(body) > _LEAD


def _bytes_up_to(entry: StreamEntry) -> int:
    """Return how many bytes a stream has had up to and including this entry."""
    return int.from_bytes(entry.body[:_LEAD], "big")


def _hops_in(entry: StreamEntry, key: bytes, until: int, hub: str) -> Iterator[tuple[int, Hop]]:
    """Return the hops of one message in an entry. An entry that cannot be decoded is skipped."""
    try:
        noted = _decode(entry.body[_LEAD:])
    except msgspec.DecodeError:
        return
    found = noted.hops.get(key, ())
    for after, word, attempt, detail, *more in found if found and isinstance(found[0], list) else each(found):
        at = noted.began + after
        if at < until:
            what = word if isinstance(word, str) else _WORDS[word]
            kind: int = more[0] if len(more) > 1 else NOTED  # type: ignore[assignment]  # two: kind, about
            yield at, _hop(at, what, attempt, detail, hub, kind, more[-1] if more else "")


def _hop(at: int, what: str, attempt: int, detail: str, hub: str, kind: int, about: object) -> Hop:
    return Hop(at // MS, what, attempt, detail[:DETAIL_LIMIT], hub, _is_untold(kind, about))


def _is_untold(kind: int, about: object) -> bool:
    """Return whether a hop is a verdict or an outcome that its sender was not connected to be sent."""
    return kind == UNHEARD or (about == UNTOLD and kind not in _WITH_KIND)
