"""The statuses of other nodes: retained by the broker, renewed at every heartbeat.

The law: a status that has not been renewed for three heartbeats of its node (of this node, if it does not say
how often it reports) is shown as stale. The timestamp of a will is from the start of its connection, so its
age means nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from math import inf
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
"""The longest time between two reports, in seconds, after which a node still counts as online."""
ASK_AGAIN: Final = (0.25, 1.0, 4.0)
"""Seconds after which a watcher asks again, more than once, for the retained status. The embedded broker may
answer with the previous status, and drop the newest one, if that was published while the question arrived; a
busy broker does so for longer."""
WATCHED: Final = 1_000
"""How many statuses wait for a watcher; beyond that the oldest are dropped."""


class NodeStatus(Struct, frozen=True):
    """The status that a node reports. `online` is None if it does not say, or if its status was removed."""

    name: str
    online: bool | None = None
    time: float = 0.0
    """when it was reported, in seconds since 1970"""
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
    payloads: tuple[bytes, bytes] = (b"", b"")
    """the payload as it arrived, and the one before"""


class _StatusWatcher:
    """The statuses that wait for one caller, and when the caller asks again for the retained one."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[NodeStatus] = asyncio.Queue(WATCHED)
        self.ask_again = inf
        self._pauses = iter(ASK_AGAIN)

    def wait_to_ask(self, now: float) -> None:
        """Set when the caller asks next; never after the last pause."""
        self.ask_again = now + next(self._pauses, inf)


class Statuses:
    """The statuses of other nodes, and their watchers. `subscribe` and `unsubscribe` take the name of a node,
    or + for all nodes."""

    def __init__(
        self,
        clock: Clock,
        signatures: FdSignatures,
        heartbeat: float,
        subscribe: Callable[[str], Awaitable[None]],
        unsubscribe: Callable[[str], Awaitable[None]],
    ) -> None:
        self._clock, self._signatures, self._heartbeat = clock, signatures, heartbeat
        self._subscribe, self._unsubscribe = subscribe, unsubscribe
        self._heard: dict[str, _HeardStatus] = {}
        self._watchers: dict[str, set[_StatusWatcher]] = {}

    def hear(self, name: str, payload: bytes, old: bool) -> None:
        """Handle a status. Raises `SenderError` if it is malformed."""
        told = self._signatures.open_status(payload, name)
        if told is not None and fd.is_question(told):
            return
        if told is None:
            self._heard.pop(name, None)
            self._tell(NodeStatus(name))
            return
        known = self._heard.get(name)
        if old and known is not None and payload in known.payloads:
            return  # the broker was asked again, and may answer with the previous status
        now = self._clock.now()
        # A status that is not retained was reported just now, whatever its clock shows.
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
            before = b"" if known is None else known.payloads[0]
            stale_at = asyncio.get_running_loop().time() + left
            self._heard[name] = _HeardStatus(status, stale_at, (payload, before))
        self._tell(status)

    def known(self, name: str) -> NodeStatus | None:
        """Return the last status of a node that is being watched."""
        heard = self._heard.get(name)
        return None if heard is None else _aged(heard)

    async def get(self, name: str, within: float) -> NodeStatus | None:
        """Return the status of this node, or None if the broker has none."""
        if name == "+":
            raise Malformed("give the name of one node; for all nodes use watch_status('+')")
        if (known := self.known(name)) is not None:
            return known
        async with aclosing(self.watch(name, within)) as news:
            async for status in news:
                return status
        return None

    async def watch(self, name: str, within: float | None = None) -> AsyncGenerator[NodeStatus, None]:
        """Yield every status of this node (+: of every node), first the retained one, and again when one
        becomes stale. Ends when nothing comes `within` seconds."""
        if name != "+":
            fd.check_username(name)
        watcher = _StatusWatcher()
        watching = self._watchers.setdefault(name, set())
        watching.add(watcher)
        for known in list(self._heard):
            if len(watching) > 1 and name in (known, "+"):
                watcher.news.put_nowait(_aged(self._heard[known]))
        try:
            if len(watching) == 1:
                await self._subscribe(name)
            watcher.wait_to_ask(asyncio.get_running_loop().time())
            while (status := await self._next(name, watcher, within)) is not None:
                yield status
        finally:
            watching.discard(watcher)
            if not watching:
                del self._watchers[name]
                self._forget()
                await self._unsubscribe(name)

    async def _next(self, name: str, watcher: _StatusWatcher, within: float | None) -> NodeStatus | None:
        loop = asyncio.get_running_loop()
        until = inf if within is None else loop.time() + within
        while True:
            goes_stale = min(
                (
                    heard.stale_at
                    for known, heard in self._heard.items()
                    if name in (known, "+") and not heard.status.stale and heard.status.online is not False
                ),
                default=inf,
            )
            deadline = min(goes_stale, until, watcher.ask_again)
            try:
                async with asyncio.timeout_at(None if deadline == inf else deadline):
                    return await watcher.news.get()
            except TimeoutError:
                if loop.time() >= until:
                    return None
                if loop.time() >= watcher.ask_again:
                    watcher.wait_to_ask(loop.time())
                    await self._subscribe(name)
                self._grow_stale()

    def _forget(self) -> None:
        """Forget the statuses of nodes that are no longer watched: they would only become stale."""
        if "+" not in self._watchers:
            for name in self._heard.keys() - self._watchers.keys():
                del self._heard[name]

    def _grow_stale(self) -> None:
        for name, heard in list(self._heard.items()):
            aged = _aged(heard)
            if aged.stale and not heard.status.stale:
                self._heard[name] = _HeardStatus(aged, heard.stale_at, heard.payloads)
                self._tell(aged)

    def _tell(self, status: NodeStatus) -> None:
        for name in (status.name, "+"):
            for watcher in self._watchers.get(name, ()):
                if watcher.news.full():
                    watcher.news.get_nowait()
                watcher.news.put_nowait(status)


def _aged(heard: _HeardStatus) -> NodeStatus:
    stale = asyncio.get_running_loop().time() >= heard.stale_at and heard.status.online is not False
    return replace(heard.status, stale=stale)
