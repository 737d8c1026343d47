"""The interface between applications and transports: the `Session` of a client.

The laws of every transport. An arriving message is acknowledged only when its handler says that it is
committed, and acknowledgements go out in order of arrival. A message counts as sent only when the receiver
has confirmed it; if the connection is lost first, the sender is told and sends it again, since only its
outbox knows whether that is still wanted. A transport remembers nothing across a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias

from duly.wire.outgoing import OutgoingFrame

Acknowledge: TypeAlias = Callable[[], None]
"""Called when a message is committed. It may be called late, twice, out of order, or after the connection is
gone."""

OnMessage: TypeAlias = Callable[[str, bytes, bool, Acknowledge], None]
"""(topic, payload, old, ack): called in order of arrival, on the event loop; must not block or raise. `old`:
the broker retained the message or sends it again, so it may be from long ago."""


class Session(Hashable, Protocol):
    """One connection of a client, as applications see it: a WebSocket, an MQTT device, an HTTP request that
    waits for its answer.

    An application hands it frames as values; the session encodes them for its wire. While a session is
    `congested`, an application leaves in the ledger what can wait, and reads on when the session has
    `drained`.
    """

    @property
    def congested(self) -> bool:
        """Whether more frames are queued than the client takes in a moment."""
        ...

    @property
    def listening(self) -> bool:
        """Whether a frame pushed now can still reach the client, as far as is known."""
        ...

    async def drained(self, seconds: float | None = None) -> None:
        """Return when the session is no longer congested, when it has ended, or after this time."""
        ...

    def push(self, frame: OutgoingFrame) -> None:
        """Queue a frame for the client. It never blocks and never fails: a session whose client reads nothing
        closes itself."""
        ...

    def close(self, reason: str) -> None:
        """End the connection; the client is told why, if its protocol allows that."""
        ...


class UncongestedSession:
    """Base of the sessions that are never congested: they get few frames, or pass each on at once."""

    __slots__ = ()
    congested = False
    listening = True

    async def drained(self, seconds: float | None = None) -> None:
        """Return at once."""
