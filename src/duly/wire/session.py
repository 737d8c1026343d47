"""Transport: how bytes get to the other side and back.

The laws every transport keeps. Nothing that arrives is acknowledged before the handler says that it is
committed, and acknowledgements go out in the order of arrival. Nothing that is sent counts as sent before the
other side has confirmed it; when the connection is lost first, the sender is told and sends again, since only
his outbox knows whether that is still wanted. A transport remembers nothing across a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias

Acknowledge: TypeAlias = Callable[[], None]
"""Says that a message is committed. May be late, repeated, out of order, after the connection is gone."""

OnMessage: TypeAlias = Callable[[str, bytes, bool, Acknowledge], None]
"""(topic, payload, old, ack); called in order of arrival, on the event loop; must not block or raise. `old`:
it was kept by the broker, or is sent again, so it may have been said long ago."""


class Session(Hashable, Protocol):
    """Somebody connected: anything that frames can be pushed to.

    Who has much to say asks first: while a session is `congested`, what can wait is left where it is, and
    goes on when it has `drained`.
    """

    @property
    def congested(self) -> bool:
        """Whether more is queued for it than goes out soon."""
        ...

    async def drained(self, seconds: float | None = None) -> None:
        """Waits until it is no longer congested, or over; or until this time has passed."""
        ...

    def push(self, frame: bytes) -> None:
        """Send a frame; never blocks, never fails: a session that stands still closes itself."""
        ...

    def close(self, reason: str) -> None: ...


class UncongestedSession:
    """A session that is never congested: it takes little, or passes everything on at once."""

    __slots__ = ()
    congested = False

    async def drained(self, seconds: float | None = None) -> None:
        return


class Link(Protocol):
    """A connection to a broker that comes back by itself."""

    @property
    def up(self) -> bool: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Returns when the broker has confirmed it. Waits for room, not for a connection."""
        ...

    def publish_nowait(self, topic: str, payload: bytes, *, retain: bool = False) -> asyncio.Future[None]: ...
    async def subscribe(self, *filters: str, latest: bool = False) -> None: ...
    async def unsubscribe(self, *filters: str) -> None: ...
