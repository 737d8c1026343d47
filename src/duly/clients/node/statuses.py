"""What other nodes tell about themselves: retained by the broker, renewed every heartbeat.

The law: a status is shown as what it is. One that has not been renewed for three heartbeats of its node
(ours, if it does not say how often it reports) is stale: nobody can tell any more. A will carries the time at
which its connection began, so its age says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from duly.core.units import SECOND
from duly.errors import Malformed
from duly.runtime.clock import Clock
from duly.wire import fd
from duly.wire.fd_signatures import FdSignatures

MISSED: Final = 3
LONGEST: Final = 86_400.0
"""Seconds between two reports that are believed: who is silent for longer cannot be said to be there."""
WATCHED: Final = 1_000
"""News that a watcher who does not look may miss the oldest of."""


class NodeStatus(Struct, frozen=True):
    """How a node is, by its own word. `online` is None if it does not say, and if its status was removed."""

    name: str
    online: bool | None = None
    time: float = 0.0
    """when it said so, in seconds since 1970"""
    stale: bool = False
    battery: int | None = None
    rssi: int | None = None
    ip: str = ""
    version: str = ""
    uptime: int = 0
    data: Any = None
    heartbeat: float = 0.0
    """seconds between two reports; 0 if it does not say"""


class _HeardStatus(Struct, frozen=True):
    status: NodeStatus
    stale_at: float
    """on the loop's clock"""


class Statuses:
    """What was heard of others, and who wants to hear more. `subscribe` and `unsubscribe` take the name of a
    node, or + for all of them."""

    def __init__(
        self,
        clock: Clock,
        seal: FdSignatures,
        heartbeat: float,
        subscribe: Callable[[str], Any],
        unsubscribe: Callable[[str], Any],
    ) -> None:
        self._clock, self._seal, self._heartbeat = clock, seal, heartbeat
        self._subscribe, self._unsubscribe = subscribe, unsubscribe
        self._heard: dict[str, _HeardStatus] = {}
        self._watchers: dict[str, set[asyncio.Queue[NodeStatus]]] = {}

    def hear(self, name: str, payload: bytes, old: bool) -> None:
        """Something came on a status topic. Raises `SenderError` if it is no status."""
        told = self._seal.open_status(payload, name)
        if told is not None and fd.is_question(told):
            return
        if told is None:
            self._heard.pop(name, None)
            self._tell(NodeStatus(name))
            return
        now = self._clock.now()
        # What comes live was said now, whatever its clock shows.
        age = max(0, now - told.time) / SECOND if old else 0.0
        heartbeat = min(told.heartbeat / SECOND or self._heartbeat, LONGEST)
        left = MISSED * heartbeat - age
        status = NodeStatus(
            name,
            told.online,
            (told.time or now) / SECOND,
            left <= 0 and told.online is not False,
            told.battery,
            told.rssi,
            told.ip,
            told.version,
            told.uptime // SECOND,
            told.data.value,
            told.heartbeat / SECOND,
        )
        if name in self._watchers or "+" in self._watchers:
            self._heard[name] = _HeardStatus(status, asyncio.get_running_loop().time() + left)
        self._tell(status)

    def known(self, name: str) -> NodeStatus | None:
        heard = self._heard.get(name)
        return None if heard is None else _aged(heard)

    async def get(self, name: str, within: float) -> NodeStatus | None:
        """How this node is; None if the broker knows nothing of it."""
        if name == "+":
            raise Malformed("name one node; watch_status('+') is for all of them")
        if (known := self.known(name)) is not None:
            return known
        async with aclosing(self.watch(name, within)) as news:
            async for status in news:
                return status
        return None

    async def watch(self, name: str, within: float | None = None) -> AsyncGenerator[NodeStatus, None]:
        """Every status of this node (+: of every node), first what the broker retains; again when one becomes
        stale. Ends when nothing comes `within` seconds."""
        if name != "+":
            fd.check_username(name)
        news: asyncio.Queue[NodeStatus] = asyncio.Queue(WATCHED)
        watching = self._watchers.setdefault(name, set())
        watching.add(news)
        for known in list(self._heard):
            if len(watching) > 1 and name in (known, "+"):
                news.put_nowait(_aged(self._heard[known]))
        try:
            if len(watching) == 1:
                await self._subscribe(name)
            while True:
                status = await self._next(name, news, within)
                if status is None:
                    return
                yield status
        finally:
            watching.discard(news)
            if not watching:
                del self._watchers[name]
                self._forget()
                await self._unsubscribe(name)

    async def _next(
        self, name: str, news: asyncio.Queue[NodeStatus], within: float | None
    ) -> NodeStatus | None:
        loop = asyncio.get_running_loop()
        until = None if within is None else loop.time() + within
        while True:
            goes_stale = min(
                (
                    heard.stale_at
                    for known, heard in self._heard.items()
                    if name in (known, "+") and not heard.status.stale and heard.status.online is not False
                ),
                default=None,
            )
            deadline = min((t for t in (goes_stale, until) if t is not None), default=None)
            try:
                async with asyncio.timeout_at(deadline):
                    return await news.get()
            except TimeoutError:
                if until is not None and loop.time() >= until:
                    return None
                self._grow_stale()

    def _forget(self) -> None:
        """What nobody listens to any more grows old here without being so."""
        if "+" not in self._watchers:
            for name in self._heard.keys() - self._watchers.keys():
                del self._heard[name]

    def _grow_stale(self) -> None:
        for name, heard in list(self._heard.items()):
            aged = _aged(heard)
            if aged.stale and not heard.status.stale:
                self._heard[name] = _HeardStatus(aged, heard.stale_at)
                self._tell(aged)

    def _tell(self, status: NodeStatus) -> None:
        for name in (status.name, "+"):
            for news in self._watchers.get(name, ()):
                if news.full():
                    news.get_nowait()
                news.put_nowait(status)


def _aged(heard: _HeardStatus) -> NodeStatus:
    stale = asyncio.get_running_loop().time() >= heard.stale_at and heard.status.online is not False
    return replace(heard.status, stale=stale)
