"""Heartbeats: a sentinel that promised heartbeats and falls silent causes an alert about itself.

A promise is stored in the ledger and outlives hubs. Each of several hubs checks for itself, and the first one
that finds a silence stores it by compare-and-set: so there is one alert per silence. The alert is delivered
like any other, to the recipients of the sentinel's profile. When the sentinel is back, the alert is
cancelled, and its recipients are told. A crash loses neither: a silence or a return that is stored but not
reported is reported afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypedDict

import msgspec
from msgspec import structs

from duly.apps.alerts.notifications import iso, moment, span
from duly.apps.alerts.profiles import Profiles
from duly.core.heartbeat_watch import HeartbeatWatch, Promise
from duly.core.messages import Message, key_of
from duly.core.monitor.signals import EVENT, SILENT, EventData, encode, raw
from duly.core.operations import CheckItem, DropItem, PutItem, PutNewItem
from duly.core.units import MINUTE, MS, SECOND
from duly.errors import DulyError, Malformed, NotAllowed
from duly.storage.ledger import Ledger
from duly.wire import optional_fields

PROMISES: Final = "heartbeats"
SEEN: Final = "sentinels"
"""Buckets: the promises by sentinel and profile, and when each sentinel was last connected."""

CHECK_SECONDS: Final = 2.0
"""How often a hub checks for silent sentinels."""
SEEN_AFTER: Final = 30 * SECOND
"""How often the presence of a sentinel without a connection is stored."""
MOST: Final = 100
"""The most promises of one sentinel: each is for another profile, and would be an alert of its own."""
LONGEST: Final = 86_400_000
"""The longest promise, in milliseconds."""


class HeartbeatData(msgspec.Struct, frozen=True):
    """The `data` of a heartbeat: its profile, and the milliseconds within which the next one comes. 0
    withdraws the promise; null, or nothing, neither promises nor withdraws. `held` counts by reason what the
    sentinel has held back since its start; `run` identifies that start."""

    profile_id: str
    every: int | None = None
    run: str = ""
    held: dict[str, int] = {}


def read_beat(body: bytes) -> HeartbeatData:
    """Decode a heartbeat; raises `Malformed` if it is invalid."""
    try:
        beat = optional_fields.decode(body or b"{}", HeartbeatData)
    except msgspec.DecodeError as problem:
        raise Malformed(f"this is not a heartbeat: {problem}") from None
    if not beat.profile_id or not (not beat.every or 1_000 <= beat.every <= LONGEST):
        raise Malformed(
            f"a heartbeat needs a profile_id and an 'every' of 1000 to {LONGEST} ms, or 0 to stop heartbeats"
        )
    return beat


class SentinelPresence(TypedDict):
    """When sentinels were last heard from (ms), which of them keep their promise of heartbeats, and which are
    silent."""

    heard: dict[str, int]
    keeping: list[str]
    silent: list[str]


class Heartbeats:
    """Watches the heartbeats of all sentinels, at one hub. `report` stores an alert and has it delivered,
    `take_back` cancels one, `known` returns whether a sentinel still exists."""

    def __init__(
        self,
        ledger: Ledger,
        profiles: Profiles,
        report: Callable[[Message], Awaitable[None]],
        take_back: Callable[[bytes, str], Awaitable[None]],
        known: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._ledger = ledger
        self._profiles = profiles
        self._report = report
        self._take_back = take_back
        self._known = known
        self._watcher = HeartbeatWatch()
        self._reported: set[str] = set()
        self._beaten: dict[str, float] = {}
        """when (monotonic) a heartbeat was last stored, by sentinel and profile"""
        self._promised: Counter[str] | None = None
        """how many promises each sentinel has, by the last check and the promises made here since"""
        self._seen: dict[str, int] = {}
        """when (steady clock) the presence of each sentinel was last stored"""

    # ── storing heartbeats ───────────────────────────────────────────────────────────────────────

    async def beat(self, sentinel: str, beat: HeartbeatData) -> None:
        """Store a heartbeat of a sentinel; one without a promise counts if its profile demands heartbeats.
        Raises `NotAllowed` if the sentinel has too many promises."""
        name = f"{sentinel}/{beat.profile_id}"
        if beat.every:
            await self._keep(name, sentinel, beat.profile_id, beat.every * MS)
        elif beat.every is not None:
            await self._remove_promise(name, sentinel)
        elif self.owed(sentinel, beat.profile_id):
            await self._keep(name, sentinel, beat.profile_id, None)

    def owed(self, sentinel: str, profile: str) -> bool:
        """Return whether an alert of this sentinel, or a heartbeat without a promise, is stored as a sign of
        life: its profile demands heartbeats, and none was stored for a while."""
        found = self._profiles.get(profile)
        if found is None or not found.heartbeat:
            return False
        last = self._beaten.get(f"{sentinel}/{profile}", float("-inf"))
        return asyncio.get_running_loop().time() - last > found.heartbeat / SECOND / 4

    async def note(self, sentinel: str, profile: str) -> None:
        """Store that an alert has arrived, which counts as a heartbeat."""
        with contextlib.suppress(DulyError):
            await self._keep(f"{sentinel}/{profile}", sentinel, profile, None)

    async def _keep(self, name: str, sentinel: str, profile: str, every: int | None) -> None:
        self._beaten[name] = asyncio.get_running_loop().time()
        while True:
            body = await self._ledger.item(PROMISES, name)
            promised = await self._check_room(sentinel) if body is None else Counter[str]()
            promised[sentinel] += 1
            old = Promise(sentinel, profile) if body is None else _decode(body)
            new = old.kept(self._ledger.clock.now(), old.every if every is None else every)
            if await self._swap(name, body, new):
                break
            promised[sentinel] -= 1
        if new.event:
            await self._returned(name, new)

    async def _check_room(self, sentinel: str) -> Counter[str]:
        """Return how many promises each sentinel has; raises `NotAllowed` if this one may have no more."""
        if self._promised is None:
            bodies = await self._ledger.bucket(PROMISES)
            self._promised = Counter(_decode(body).sentinel for body in bodies.values())
        if self._promised[sentinel] >= MOST:
            raise NotAllowed(
                f"{sentinel} has promised heartbeats for {MOST} profiles; take one back ('every': 0), or "
                "watch for fewer profiles with one account"
            )
        return self._promised

    async def _remove_promise(self, name: str, sentinel: str) -> None:
        """Forget a promise that the sentinel withdraws, but not when the sentinel was last heard from."""
        while (body := await self._ledger.item(PROMISES, name)) is not None:
            promise = _decode(body)
            if promise.event:
                await self._take_back(key_of(sentinel, promise.event), "It has ended its heartbeats itself")
            heard = max(promise.heard, self._ledger.clock.now()) // MS
            then = (DropItem(PROMISES, name), PutItem(SEEN, sentinel, b"%d" % heard))
            if await self._ledger.apply(CheckItem(PROMISES, name, body, then=then)):
                if self._promised is not None:
                    self._promised[sentinel] -= 1
                return

    # ── checking ─────────────────────────────────────────────────────────────────────────────────

    async def check(self) -> None:
        """Find sentinels that have fallen silent, and report what is stored but not reported yet."""
        with contextlib.suppress(DulyError):  # the next check tries again
            await self._check()

    async def _check(self) -> None:
        try:
            bodies = await self._ledger.bucket(PROMISES)
        except DulyError:
            self._watcher.interrupted()
            raise
        promises = {name: _decode(body) for name, body in bodies.items()}
        for name, one in list(promises.items()):
            if not await self._known(one.sentinel):
                del promises[name]
                await self._ledger.write(DropItem(PROMISES, name, bodies[name]))
        self._promised = Counter(one.sentinel for one in promises.values())
        now = self._ledger.clock.now()
        elapsed = round(asyncio.get_running_loop().time() * SECOND)
        for name in self._watcher.overdue(promises, self._patience, elapsed, now):
            profile = self._profiles.get(promises[name].profile)
            silent = promises[name].missed(
                now, promises[name].severity if profile is None else profile.silent
            )
            if await self._swap(name, bodies[name], silent):
                promises[name] = silent
        for name, promise in promises.items():
            if promise.silent and promise.event not in self._reported:
                await self._report(_alert(promise))
                self._reported.add(promise.event)
            elif promise.event and not promise.silent:
                await self._returned(name, promise)

    def _patience(self, promise: Promise) -> int | None:
        profile = self._profiles.get(promise.profile)
        every = promise.every or (0 if profile is None else profile.heartbeat)
        return every + (MINUTE if profile is None else profile.grace) if every else None

    async def _returned(self, name: str, promise: Promise) -> None:
        """Cancel the alert about a silence that is over, and forget it."""
        profile = self._profiles.get(promise.profile)
        when = moment(promise.heard, "UTC" if profile is None else profile.zone)
        await self._take_back(key_of(promise.sentinel, promise.event), f"It was heard again at {when}")
        body = await self._ledger.item(PROMISES, name)
        if body is not None and _decode(body).event == promise.event and not _decode(body).silent:
            await self._swap(name, body, structs.replace(_decode(body), event=""))
        self._reported.discard(promise.event)

    async def _swap(self, name: str, old: bytes | None, new: Promise) -> bool:
        """Store a promise if it has not changed since it was read."""
        body = _encode(new)
        if old is None:
            return await self._ledger.apply(PutNewItem(PROMISES, name, body))
        put = PutItem(PROMISES, name, body)
        return await self._ledger.apply(CheckItem(PROMISES, name, old, then=(put,)))

    # ── presence ─────────────────────────────────────────────────────────────────────────────────

    def unseen(self, sentinel: str) -> bool:
        """Return whether the presence of a sentinel should be stored, because it was not for a while."""
        last = self._seen.get(sentinel)
        return last is None or self._ledger.clock.steady() - last > SEEN_AFTER

    async def seen(self, sentinel: str) -> None:
        """Store that a sentinel has just connected, disconnected or sent something."""
        self._seen[sentinel] = self._ledger.clock.steady()
        with contextlib.suppress(DulyError):
            await self._ledger.write(PutItem(SEEN, sentinel, b"%d" % (self._ledger.clock.now() // MS)))


async def presence(ledger: Ledger, sentinels: set[str]) -> SentinelPresence:
    """Return what the ledger knows of the presence of these sentinels."""
    heard = {name: int(at) for name, at in (await ledger.bucket(SEEN)).items() if name in sentinels}
    keeping: set[str] = set()
    silent: set[str] = set()
    for body in (await ledger.bucket(PROMISES)).values():
        promise = _decode(body)
        if promise.sentinel in sentinels:
            heard[promise.sentinel] = max(heard.get(promise.sentinel, 0), promise.heard // MS)
            (silent if promise.silent else keeping).add(promise.sentinel)
    return {"heard": heard, "keeping": sorted(keeping - silent), "silent": sorted(silent)}


_decode: Final = msgspec.json.Decoder(Promise).decode
_encode: Final = msgspec.json.Encoder().encode


def _alert(promise: Promise) -> Message:
    """Return the alert about a silence; every hub makes the same bytes."""
    meta = encode({"last_heard": iso(promise.heard), "promised": span_of(promise.every)})
    data = EventData(
        promise.profile, SILENT, "", "", promise.silent // MS, promise.severity, 0, device_meta=raw(meta)
    )
    return Message(
        promise.sentinel, promise.event, EVENT, promise.profile, encode(data), promise.silent // MS * MS
    )


def span_of(every: int) -> str:
    """Return the promised interval of heartbeats as text for people."""
    if not every:
        return "as the profile demands"
    return f"every {span(every)}" if every >= MINUTE else f"every {every // SECOND} s"
