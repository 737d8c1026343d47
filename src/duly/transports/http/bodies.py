"""Bodies of requests: reads them within limits of size and time.

The law: at most a few KiB are read from an unauthenticated caller. The memory of all bodies together is
bounded, and shared fairly (`duly.transports.read_memory`).
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
"""The key under which a request notes the memory of its body until it is answered."""
ACCOUNT: Final = web.RequestKey("account", str)
"""The key under which a request notes its account, once that is known."""


class BodyTimeout(Exception):
    """A body did not arrive in time."""


async def read(request: web.Request, *, guest: bool = False) -> bytes:
    """Return the body of a request; from an unauthenticated `guest` only a short one. Raises `TooLarge` over
    the limit, `BodyTimeout` if it does not arrive in time, `Overloaded` if there is no memory for it."""
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
    """Release the memory of a request's body."""
    reading, memory = request.get(READING), request.app.get(MEMORY)
    if reading is not None and memory is not None:
        memory.end(reading)


def _owner(request: web.Request) -> str:
    """Return whose memory the body uses: the account's, or the address of a guest."""
    return request.get(ACCOUNT) or f"from {network_of(address_of(request))}"
