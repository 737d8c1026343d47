"""The dead man's switch: a sentinel that promised a heartbeat and falls silent is an alert of its own.

The laws. A promise lies in the ledger and outlives hubs. Of several hubs each looks for itself, and what the
first one finds is compared and set: there is one alert of one silence. The alert goes the way of all alerts,
to the people of the sentinel's profile; when the sentinel is heard again it is taken back, so that those who
were told are told. What was noted is carried on after a crash: a silence that is not reported yet is
reported, a return that was not told yet is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import structs

from duly.apps.alerts.notifications import iso, moment, span
from duly.apps.alerts.profiles import Profiles
from duly.core.heartbeats import HeartbeatWatch, Promise
from duly.core.messages import Message, key_of
from duly.core.monitor.signals import EVENT, SILENT, EventData, encode, raw
from duly.core.operations import CheckItem, DropItem, PutItem, PutNewItem
from duly.core.units import MINUTE, MS, SECOND
from duly.errors import DulyError, Malformed
from duly.storage.ledger import Ledger

PROMISES: Final = "heartbeats"
SEEN: Final = "sentinels"
"""Buckets: the promises, by sentinel and profile; and when each sentinel was last connected."""

CHECK_SECONDS: Final = 2.0
SEEN_SECONDS: Final = 30.0
"""How often it is written down that a sentinel was heard without a connection."""
LONGEST: Final = 86_400_000
"""Of a promise, in milliseconds."""


class HeartbeatData(msgspec.Struct, frozen=True):
    """The `data` of a heartbeat: for which profile, and within how many milliseconds the next one comes; 0
    takes the promise back."""

    profile_id: str
    every: int = 0


def read_beat(body: bytes) -> HeartbeatData:
    try:
        beat = msgspec.json.decode(body or b"{}", type=HeartbeatData)
    except msgspec.DecodeError as problem:
        raise Malformed(f"this is not a heartbeat: {problem}") from None
    if not beat.profile_id or not (beat.every == 0 or 1_000 <= beat.every <= LONGEST):
        raise Malformed(
            f"a heartbeat names its profile_id and, in 'every', 1000 to {LONGEST} ms, or 0 for no more"
        )
    return beat


class Heartbeats:
    """Those of one hub. `report` has an alert stored and told, `take_back` tells those who were told of one
    that it is over, `known` says whether there still is a sentinel of a name."""

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
        """when (monotonic) a sign of life was last written down, by sentinel and profile"""
        self._seen: dict[str, float] = {}
        """when (monotonic) it was last written down that each sentinel was there"""

    # ── signs of life ────────────────────────────────────────────────────────────────────────────

    async def beat(self, sentinel: str, beat: HeartbeatData) -> None:
        """A sentinel shows that it is there; returns when that is stored."""
        name = f"{sentinel}/{beat.profile_id}"
        if not beat.every:
            await self._stand_down(name)
            return
        await self._keep(name, sentinel, beat.profile_id, beat.every * MS)

    def owed(self, sentinel: str, profile: str) -> bool:
        """Whether an alert of this sentinel is to be written down as a sign of life, too: its profile demands
        signs of life, and none was written down for a while."""
        found = self._profiles.get(profile)
        if found is None or not found.heartbeat:
            return False
        last = self._beaten.get(f"{sentinel}/{profile}", float("-inf"))
        return asyncio.get_running_loop().time() - last > found.heartbeat / SECOND / 4

    async def note(self, sentinel: str, profile: str) -> None:
        """An alert came: that is a sign of life."""
        with contextlib.suppress(DulyError):
            await self._keep(f"{sentinel}/{profile}", sentinel, profile, None)

    async def _keep(self, name: str, sentinel: str, profile: str, every: int | None) -> None:
        self._beaten[name] = asyncio.get_running_loop().time()
        while True:
            body = await self._ledger.item(PROMISES, name)
            old = Promise(sentinel, profile) if body is None else _decode(body)
            new = old.kept(self._ledger.clock.now(), old.every if every is None else every)
            if await self._swap(name, body, new):
                break
        if new.event:
            await self._returned(name, new)

    async def _stand_down(self, name: str) -> None:
        body = await self._ledger.item(PROMISES, name)
        if body is None:
            return
        promise = _decode(body)
        if promise.event:
            await self._take_back(
                key_of(promise.sentinel, promise.event), "It has said that it need not be watched any more"
            )
        await self._ledger.write(DropItem(PROMISES, name))

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def check(self) -> None:
        """Find who has fallen silent, and carry on with what was noted and not told."""
        with contextlib.suppress(DulyError):  # the next look will do; what was missed begins anew
            await self._check()

    async def _check(self) -> None:
        bodies = await self._ledger.bucket(PROMISES)
        promises = {name: _decode(body) for name, body in bodies.items()}
        for name, one in list(promises.items()):
            if not await self._known(one.sentinel):
                del promises[name]
                await self._ledger.write(DropItem(PROMISES, name, bodies[name]))
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
        """It is heard again: the alert about its silence is taken back, and then forgotten here."""
        profile = self._profiles.get(promise.profile)
        when = moment(promise.heard, "UTC" if profile is None else profile.zone)
        await self._take_back(key_of(promise.sentinel, promise.event), f"It was heard again at {when}")
        body = await self._ledger.item(PROMISES, name)
        if body is not None and _decode(body).event == promise.event and not _decode(body).silent:
            await self._swap(name, body, structs.replace(_decode(body), event=""))
        self._reported.discard(promise.event)

    async def _swap(self, name: str, old: bytes | None, new: Promise) -> bool:
        """Store it, if nothing has been stored since."""
        body = _encode(new)
        if old is None:
            (stored,) = await self._ledger.write(PutNewItem(PROMISES, name, body))
        else:
            stored, *_ = await self._ledger.write(
                CheckItem(PROMISES, name, old, then=(PutItem(PROMISES, name, body),))
            )
        return bool(stored)

    # ── presence ─────────────────────────────────────────────────────────────────────────────────

    def unseen(self, sentinel: str) -> bool:
        """Whether it is to be written down that this one was heard: it was not, for a while."""
        last = self._seen.get(sentinel, float("-inf"))
        return asyncio.get_running_loop().time() - last > SEEN_SECONDS

    async def seen(self, sentinel: str) -> None:
        """It has just connected, left, or said something."""
        self._seen[sentinel] = asyncio.get_running_loop().time()
        with contextlib.suppress(DulyError):
            await self._ledger.write(PutItem(SEEN, sentinel, b"%d" % (self._ledger.clock.now() // MS)))


async def presence(ledger: Ledger, sentinels: set[str]) -> dict[str, Any]:
    """When each of these was last heard (ms), who promised a heartbeat and keeps it, and who is silent."""
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
    """The alert about a silence: the same bytes wherever they are made."""
    meta = encode({"last_heard": iso(promise.heard), "promised": span_of(promise.every)})
    data = EventData(
        promise.profile, SILENT, "", "", promise.silent // MS, promise.severity, 0, device_meta=raw(meta)
    )
    return Message(
        promise.sentinel, promise.event, EVENT, promise.profile, encode(data), promise.silent // MS * MS
    )


def span_of(every: int) -> str:
    """How often, for people."""
    if not every:
        return "as the profile demands"
    return f"every {span(every)}" if every >= MINUTE else f"every {every // SECOND} s"
