"""Bodies of requests: read as far as they may go, in the time they may take.

The law: a caller who has not authenticated is read for a few KiB. What all bodies take together is bounded:
the next one is told to come back.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from duly.errors import Overloaded, TooLarge
from duly.transports.connections import waiting_for

BODY_LIMIT: Final = 8 * 1024 * 1024
"""The largest body of a request by a client that has logged in, in bytes."""
GUEST_LIMIT: Final = 16 * 1024
"""The largest body of a request that any client may make, in bytes: a name, a password, a device's name."""
ALL_LIMIT: Final = 128 * 1024 * 1024
"""The size of all bodies together that are being read or worked on."""
READ_SECONDS: Final = 30.0
GUEST_SECONDS: Final = 10.0


class Bodies:
    """What the bodies of one hub take."""

    def __init__(self, limit: int = ALL_LIMIT) -> None:
        self._limit = limit
        self._taken = 0

    def take(self, size: int) -> None:
        """Reserves memory for a body; raises `Overloaded` if all bodies together would exceed the limit."""
        if self._taken + size > self._limit:
            raise Overloaded("the hub is busy with large requests; try again in a moment")
        self._taken += size

    def give_back(self, size: int) -> None:
        """Releases memory that `take` has reserved."""
        self._taken -= size


BODIES: Final = web.AppKey("bodies", Bodies)
TAKEN: Final = web.RequestKey("taken", int)
"""Under which a request notes what its body takes until it is answered."""


class BodyTimeout(Exception):
    """A body did not arrive in time."""


async def read(request: web.Request, *, guest: bool = False) -> bytes:
    """The body of a request; of a `guest` who has not authenticated only a short one. `TooLarge` says that it
    is over its limit, `BodyTimeout` that it did not come."""
    limit, seconds = (GUEST_LIMIT, GUEST_SECONDS) if guest else (BODY_LIMIT, READ_SECONDS)
    too_large = TooLarge(f"the body is over {limit} bytes; send less at once")
    if (request.content_length or 0) > limit:
        raise too_large
    bodies = request.app.get(BODIES)
    parts: list[bytes] = []
    size = 0
    try:
        with waiting_for(request):
            async with asyncio.timeout(seconds):
                while part := await request.content.readany():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    if bodies is not None:
                        bodies.take(len(part))
                        request[TAKEN] = request.get(TAKEN, 0) + len(part)
                    parts.append(part)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {seconds:.0f} s") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def give_back(request: web.Request) -> None:
    """The request is answered: its body is no longer kept."""
    taken = request.get(TAKEN, 0)
    bodies = request.app.get(BODIES)
    if taken and bodies is not None:
        bodies.give_back(taken)
