"""Pushes: reports from devices to apps, stored in a stream per device and sent from there.

The laws. A push has a number in its device's stream before any app sees it. A push with an id is stored once:
a repeat is answered, and different content under the same id is a conflict. Every connection of an app gets
every push of its devices once, in order. A connection that is behind, or whose socket is slow, is served from
the ledger page by page as its socket drains, so missed pushes never fill memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Final
from weakref import WeakSet

import msgspec

from duly.core import horizon as horizons
from duly.core.account_limits import AccountLimit, AccountLimits
from duly.core.flow_control import next_page
from duly.core.horizon import Horizon
from duly.core.messages import Message, Verdict, key_of
from duly.core.operations import Admit, AppendEntry, PutItem, Recall
from duly.core.units import DAY, FOREVER, MINUTE, MS, SECOND
from duly.errors import DulyError, LedgerError, LedgerUnavailable, Malformed, RateLimited
from duly.runtime.activity_log import ActivityLog
from duly.runtime.limited_repeats import LimitedRepeats
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger
from duly.wire import frames, outgoing
from duly.wire.fields import Fields, pack
from duly.wire.frames import Frame
from duly.wire.outgoing import FrameWithFields, GapFrame, OutgoingFrame, PushFrame
from duly.wire.session import Session

KEPT: Final = 10_000
"""How many pushes of one device an app can catch up on."""
TRIM_EVERY: Final = 1_000
PAGE: Final = 100
NEWS: Final = 4
"""How many new pushes of a device are read together with those of other devices; a connection that lacks more
reads them by itself."""
NEWS_DEVICES: Final = 32
"""Of how many devices new pushes are read with one query; at most 32 MiB together."""
LAST: Final = "last_push"
"""The bucket with a digest of each device's last push without an id."""
SHOWN_BYTES: Final = 500
"""The data of a push is shown to watchers unless it is longer than this."""
COMES_AGAIN: Final = 2 * MINUTE
"""How long later pushes are refused after one that exceeded a limit: the device sends that one again within
this time."""
OFFLINE: Final = frames.dump({"online": False})
"""The data of the push by which a hub says that a device is offline."""
LOOKED_AT: Final = 3
"""How many of the newest pushes of a device are read for one that it sent itself."""
HORIZON: Final = Horizon(keep=30 * DAY, skew=30 * MINUTE)
"""How old a push with an id may be: a device that was away for weeks still reports. Only the id and a digest
are remembered, not the content. After a restore from a backup what may have been stored before is stored
again: devices drop a push that is refused."""


def stream_of(device: str) -> str:
    """Return the stream of a device's pushes."""
    return f"push/{device}"


def device_of(stream: str) -> str:
    """Return the device whose pushes a stream holds."""
    return stream.partition("/")[2]


class PushService:
    """Stores and sends the pushes of one hub. `listeners(device)` returns the connections that may see a
    device's pushes; `stored(device)` is called for every new one; entries older than `born(device)` belong to
    an earlier device of that name. A push cannot have a `reserved` type."""

    def __init__(
        self,
        ledger: Ledger,
        activity: ActivityLog,
        listeners: Callable[[str], Iterable[Session]],
        stored: Callable[[str], None],
        born: Callable[[str], int] = lambda _: 0,
        *,
        reserved: frozenset[str] = frozenset(),
        limit: AccountLimit | None = None,
    ) -> None:
        self._ledger = ledger
        self._activity = activity
        self._listeners = listeners
        self._stored = stored
        self._born = born
        self._reserved = reserved
        self._limit = limit or AccountLimits().pushes
        self._repeats = LimitedRepeats(ledger)
        self._refused: dict[str, tuple[str, int]] = {}
        """by device: the push that exceeded a limit and must be stored first, and until when"""
        self._told: dict[Session, dict[str, int]] = {}
        """by connection: the number of the last push sent, by device"""
        self._behind: dict[Session, dict[str, None]] = {}
        """by connection: the devices whose missed pushes are being sent"""
        self.tasks = Supervisor()
        self._turns: dict[str, asyncio.Lock] = {}
        """locks that keep the pushes of a device in order"""
        self._cut: WeakSet[Session] = WeakSet()
        """connections that sent a push which could not be stored"""

    # ── storing ──────────────────────────────────────────────────────────────────────────────────

    def entry(
        self, device: str, kind: str, data: msgspec.Raw, key: bytes = b"", more: Fields | None = None
    ) -> AppendEntry:
        """Return the operation that stores a push and its own fields; with a `key`, as the end of that
        message."""
        now = self._ledger.clock.now()
        frame = PushFrame(kind, device, data, now // MS)
        push = FrameWithFields(frame, more) if more else frame
        return AppendEntry(stream_of(device), outgoing.encode(push), now, key, ends=bool(key))

    async def store(
        self,
        device: str,
        kind: str,
        data: msgspec.Raw,
        more: Fields | None = None,
        said: bytes = b"",
        old: bool = False,
    ) -> None:
        """Store a push without an id and send it to the apps. A digest of the last one that came over a
        broker is kept: the same bytes (`said`) that a broker retains (`old`) and sends again at every
        connection are not new."""
        entry = self.entry(device, kind, data, more=more)
        mark = blake2b(said, digest_size=16).digest()
        if old and await self._ledger.item(LAST, device) == mark:
            return
        n = await self._ledger.apply(entry, *([PutItem(LAST, device, mark)] if said else []))
        await self.tell(device, n, entry.body)

    async def receive(self, session: Session, device: str, frame: Frame) -> Verdict:
        """Store a push with an id that came over this connection, and return the answer. If it cannot be
        stored, nothing more is accepted from that connection: the device reconnects and sends both in
        order."""
        assert frame.seq_id is not None
        async with self._turns.setdefault(device, asyncio.Lock()):
            if session in self._cut:
                raise LedgerUnavailable("an earlier push could not be stored and comes first")
            try:
                more = frames.more_in_push(frame)
                counted = await self._take(device, frame.seq_id, len(frame.data))
                verdict = await self.store_once(device, frame.seq_id, frame.type, frame.data, more)
                if counted and not verdict.fresh:
                    self._limit.give_back(device, len(frame.data))
                return verdict
            except LedgerError as problem:
                self._cut.add(session)
                session.close(f"come back soon: {problem}")
                raise

    async def receive_without_id(self, device: str, frame: Frame) -> None:
        """Store a push without an id that came over a connection; raises `RateLimited` if there are too
        many."""
        more = frames.more_in_push(frame)
        await self._take(device, None, len(frame.data))
        await self.store(device, frame.type, frame.data, more)

    async def _take(self, device: str, seq_id: str | None, size: int) -> bool:
        """Count a push against the limit of its device; return whether it was counted. If one with an id is
        refused it will be sent again; until then later pushes are refused as well, so that they are stored in
        the order in which they were sent. A repeat of a stored push is not refused."""
        now = self._ledger.clock.now()
        first, until = self._refused.get(device, ("", 0))
        overtakes = until > now and seq_id not in (None, first)
        refusal = (
            RateLimited(f"{first}, an earlier push of {device}, was refused and comes first", SECOND)
            if overtakes
            else self._limit.excess(device, size, now)
        )
        if refusal is None:
            self._refused.pop(device, None)
        elif not await self._repeats.is_repeat(device, seq_id):
            if seq_id is not None and not overtakes:
                self._refused[device] = (seq_id, now + refusal.wait + COMES_AGAIN)
            raise self._limit.refuse(device, refusal)
        return refusal is None

    async def note_dropped(self, device: str, ids: Collection[str]) -> None:
        """Note that pushes with these ids were dropped unread, in this order. Later pushes are refused until
        the first of them that is not stored has been sent again."""
        now = self._ledger.clock.now()
        first: str | None
        first, until = self._refused.get(device, (None, 0))
        if until <= now:
            records = await self._ledger.find_all([key_of(device, seq_id) for seq_id in ids])
            stored = {record.message.id for record in records}
            first = next((seq_id for seq_id in ids if seq_id not in stored), None)
        if first is not None and first in ids:
            self._refused[device] = (first, now + COMES_AGAIN)

    async def store_once(
        self, device: str, seq_id: str, kind: str, data: msgspec.Raw, more: Fields | None = None
    ) -> Verdict:
        """Store a push under its id unless it is stored already, and return the answer."""
        now = self._ledger.clock.now()
        message = Message(device, seq_id, kind, device, _digest(data, more))
        known = self._ledger.recall(message, now)
        if known is not None:
            return known
        entry = self.entry(device, kind, data, message.key, more)
        refusal = horizons.judge(message, HORIZON, now)
        write: Admit | Recall = Recall(message, refusal, now) if refusal is not None else Admit(
            message, horizons.remember_until(message, HORIZON), now, then=(entry,), repeatable=True
        )  # fmt: skip
        results = await self._ledger.write(write)
        if (n := results.find(entry)) is not None:
            await self.tell(device, n, entry.body)
        return results.of(write)

    async def store_from_broker(
        self, device: str, kind: str, data: msgspec.Raw, id_: str | None, more: Fields, said: bytes, old: bool
    ) -> Verdict | None:
        """Store a push of a device behind a broker, and return the verdict to answer it with if it has an
        id."""
        counted = await self._take(device, id_, len(said))
        verdict: Verdict | None = None
        try:
            self.check_type(kind)  # only now: a push that other ones wait for may be refused for good
            if id_ is not None:
                verdict = await self.store_once(device, id_, kind, data, more)
                return verdict
        finally:
            if counted and id_ is not None and (verdict is None or not verdict.fresh):
                self._limit.give_back(device, len(said))
        await self.store(device, kind, data, more, said, old)
        return None

    def check_type(self, kind: str) -> None:
        """Raise `Malformed` if this cannot be the type of a push."""
        if kind in self._reserved or not frames.is_own_type(kind):
            raise Malformed(
                f"{kind[:80]!r} cannot be a push type; use at most 64 characters of a–z, 0–9 and _"
            )

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def enter(self, session: Session, told: dict[str, int]) -> None:
        """Start to send a new connection the pushes that it missed and those to come."""
        self._told[session] = told
        for device in told:
            self._read_on(session, device)

    async def introduce(self, session: Session, device: str, online: Callable[[str], bool]) -> None:
        """Let a connection see one more device: it gets the device's status and its future pushes. The status
        has the number of the device's last push, so that nothing before it seems missing."""
        last = (await self._ledger.extent(stream_of(device))).last
        told = self._told.get(session)
        if told is not None and told.setdefault(device, last) == last > 0:
            status = frames.dump({"online": online(device)})
            now = self._ledger.clock.now() // MS
            session.push(outgoing.numbered(PushFrame(frames.DEVICE_STATUS, device, status, now), last))

    def withdraw(self, session: Session, granted: Collection[str], exists: Callable[[str], bool]) -> None:
        """Stop sending a connection the pushes of some devices, and tell it why. The status has the number of
        the device's last push, as in `introduce`."""
        told = self._told.get(session, {})
        now = self._ledger.clock.now() // MS
        for device in [one for one in told if one not in granted]:
            why = "revoked" if exists(device) else "removed"
            status = frames.dump({"online": False, why: True})
            frame = PushFrame(frames.DEVICE_STATUS, device, status, now)
            session.push(outgoing.numbered(frame, told.pop(device)))

    def knows(self, session: Session, device: str) -> bool:
        """Return whether a connection gets the pushes of this device, or gets no pushes at all."""
        told = self._told.get(session)
        return told is None or device in told

    def leave(self, session: Session) -> None:
        """Forget a connection that has ended."""
        self._told.pop(session, None)

    async def tell(self, device: str, n: int, body: bytes) -> None:
        """Send a stored push to the apps connected to this hub."""
        push = outgoing.read_push(body)
        if self._activity.watchers:
            said = push.frame if isinstance(push, FrameWithFields) else push
            shown = frames.load(said.data) if len(bytes(said.data)) < SHOWN_BYTES else None
            self._activity.see("pushed", device=device, kind=said.type, cursor=n, data=shown)
        self._stored(device)
        frame = outgoing.numbered(push, n)
        for session in self._listeners(device):
            self._tell(session, device, n, frame)
        if n % TRIM_EVERY == 0:
            await self._ledger.trim(stream_of(device), n - KEPT)

    def _tell(self, session: Session, device: str, n: int, frame: OutgoingFrame) -> None:
        """Send a connection the next push; one that is behind, or slow, gets it from the ledger."""
        told = self._told.get(session)
        if told is None:
            return
        if n == told.setdefault(device, n - 1) + 1 and not session.congested:
            told[device] = n
            session.push(frame)
        elif n > told[device]:
            self._read_on(session, device)

    def heads(self) -> dict[str, int]:
        """Return the devices that connections here listen to, with the number up to which all of them are
        served."""
        heads: dict[str, int] = {}
        for told in self._told.values():
            for device, n in told.items():
                heads[device] = min(n, heads.get(device, n))
        return heads

    async def refresh_all(self, devices: Sequence[str]) -> None:
        """Look for new pushes of these devices, which other hubs may have stored, with one query for many
        devices and all their listeners."""
        for i in range(0, len(devices), NEWS_DEVICES):
            await self._read_news(devices[i : i + NEWS_DEVICES])

    async def _read_news(self, devices: Sequence[str]) -> None:
        heads = {device: max(self._heads_of(device), default=None) for device in devices}
        known = [(device, head) for device, head in heads.items() if head is not None]
        found = await self._ledger.entries_after([(stream_of(device), head) for device, head in known], NEWS)
        pages = {device: page for (device, _), page in zip(known, found, strict=True)}
        for device, head in heads.items():
            page = pages.get(device, [])
            if head is None or len(page) == NEWS or any(entry.at < self._born(device) for entry in page):
                self._read_on_all(device, FOREVER)
                continue
            for entry in page:
                frame = outgoing.numbered(outgoing.read_push(entry.body), entry.n)
                for session in self._listeners(device):
                    self._tell(session, device, entry.n, frame)
            self._read_on_all(device, page[-1].n if page else head)

    def _read_on_all(self, device: str, head: int) -> None:
        """Let every connection read that listens to this device and has not been sent everything up to
        `head`."""
        for session in self._listeners(device):
            told = self._told.get(session)
            if told is not None and told.get(device, 0) < head:
                self._read_on(session, device)

    def _heads_of(self, device: str) -> list[int]:
        """Return up to which push each connection that listens to this device has been sent."""
        told = (self._told.get(session, {}) for session in self._listeners(device))
        return [each[device] for each in told if device in each]

    def _read_on(self, session: Session, device: str) -> None:
        behind = self._behind.get(session)
        if behind is not None:
            behind[device] = None
            return
        self._behind[session] = {device: None}
        self.tasks.do("a feed of pushes", self._feed(session), expected=(DulyError,))

    async def _feed(self, session: Session) -> None:
        behind = self._behind[session]
        try:
            while behind:
                device = next(iter(behind))
                del behind[device]
                await self._catch_up(session, device)
        except Exception as problem:  # then it must not go on as if it had been sent everything
            session.close(f"come back soon: {problem}")
            raise
        finally:
            del self._behind[session]

    async def _catch_up(self, session: Session, device: str) -> None:
        stream, count, size = stream_of(device), 0, 0
        extent = await self._ledger.extent(stream)
        told = self._told.get(session)
        if not self._may_see(session, device):
            return
        if told is not None and told.setdefault(device, extent.last) + 1 < extent.first:
            gap = GapFrame(device, told[device], extent.first)
            session.push(gap)
            told[device] = extent.first - 1
        while told is not None and session in self._told:
            if session.congested:
                await session.drained()
            if device not in told:  # withdrawn meanwhile
                return
            entries = await self._ledger.entries(stream, told[device], next_page(count, size, PAGE))
            if not entries or session not in self._told or device not in told:
                return
            if not self._may_see(session, device):
                return
            count, size = len(entries), sum(len(entry.body) for entry in entries)
            for entry in entries:
                if entry.n > told[device]:  # it may have been sent while the ledger was read
                    told[device] = entry.n
                    if entry.at >= self._born(device):  # otherwise it belongs to another device of that name
                        session.push(outgoing.numbered(outgoing.read_push(entry.body), entry.n))

    def _may_see(self, session: Session, device: str) -> bool:
        """Return whether a connection may still see a device's pushes: a grant may be revoked while the
        ledger is read."""
        return session in self._listeners(device)

    async def stop(self) -> None:
        """Stop reading for connections."""
        await self.tasks.stop()


def _digest(data: msgspec.Raw, more: Fields | None = None) -> bytes:
    """Return the digest that is remembered of a push, to detect different content under its id."""
    return msgspec.json.encode(blake2b(pack(data, more or {}), digest_size=16).hexdigest())


async def last_heard(ledger: Ledger, devices: Iterable[str]) -> dict[str, int]:
    """Return when each device last pushed or connected (µs), without those that never did. That a device is
    offline is said by a hub, which may notice it much later."""
    newest = await ledger.newest_entries([stream_of(device) for device in devices], LOOKED_AT)
    said = {
        stream: [entry.at for entry in entries if not _says_offline(outgoing.read_push(entry.body))]
        for stream, entries in newest.items()
    }
    return {device_of(stream): times[-1] for stream, times in said.items() if times}


def _says_offline(push: PushFrame | FrameWithFields[PushFrame]) -> bool:
    frame = push.frame if isinstance(push, FrameWithFields) else push
    return frame.type == frames.DEVICE_STATUS and frame.data == OFFLINE
