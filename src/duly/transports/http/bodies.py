"""Bodies of requests: read as far as they may go, in the time they may take.

The law: a caller who has not authenticated is read for a few KiB. What all bodies take together is bounded,
and shared fairly (`duly.transports.read_memory`).
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from duly.core.networks import network_of
from duly.errors import Overloaded, TooLarge
from duly.transports.connections import address_of, waiting_for
from duly.transports.read_memory import MEMORY, Reading

BODY_LIMIT: Final = 8 * 1024 * 1024
"""The largest body of a request by a client that has logged in, in bytes."""
GUEST_LIMIT: Final = 16 * 1024
"""The largest body of a request that any client may make, in bytes: a name, a password, a device's name."""
READ_SECONDS: Final = 30.0
GUEST_SECONDS: Final = 10.0


READING: Final = web.RequestKey("reading", Reading)
"""Under which a request notes what its body takes until it is answered."""
ACCOUNT: Final = web.RequestKey("account", str)
"""Under which a request notes the account that it is made for, once that is known."""


class BodyTimeout(Exception):
    """A body did not arrive in time."""


async def read(request: web.Request, *, guest: bool = False) -> bytes:
    """The body of a request; of a `guest` who has not authenticated only a short one. `TooLarge` says that it
    is over its limit, `BodyTimeout` that it did not come, `Overloaded` that there is no memory for it."""
    limit, seconds = (GUEST_LIMIT, GUEST_SECONDS) if guest else (BODY_LIMIT, READ_SECONDS)
    too_large = TooLarge(f"the body is over {limit} bytes; send less at once")
    if (request.content_length or 0) > limit:
        raise too_large
    memory = request.app.get(MEMORY)
    parts: list[bytes] = []
    size = 0
    deadline = asyncio.timeout(seconds)
    given_up = whole = False

    def give_up() -> None:
        nonlocal given_up
        given_up = True
        parts.clear()
        deadline.reschedule(asyncio.get_running_loop().time())

    reading = request[READING] = Reading(_owner(request), give_up)
    try:
        with waiting_for(request):
            async with deadline:
                while part := await request.content.readany():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    if memory is not None:
                        memory.resize(reading, size)
                    parts.append(part)
                whole = not given_up
    except TimeoutError:
        if not given_up:
            raise BodyTimeout(f"the body did not arrive within {seconds:.0f} s") from None
    finally:
        if memory is not None:
            (memory.complete if whole else memory.end)(reading)
    if not whole:
        raise Overloaded("the hub is busy with large requests; try again in a moment")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def give_back(request: web.Request) -> None:
    """The body of a request is no longer kept."""
    reading, memory = request.get(READING), request.app.get(MEMORY)
    if reading is not None and memory is not None:
        memory.end(reading)


def _owner(request: web.Request) -> str:
    """Whose memory the body takes: the account's, or the address's of a guest."""
    return request.get(ACCOUNT) or f"from {network_of(address_of(request))}"
