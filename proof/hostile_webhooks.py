"""Answers webhooks with hostile bytes: `python -m proof.hostile_webhooks CASES [SEED]`.

A receiver on loopback answers each attempt with a sound HTTP answer that was cut, stretched, spliced with
another, or had bytes and bits changed; it may also close before it has read, or send bodies that never end.
The law: an attempt ends in one of the ways that a tower knows (it arrived, was declined, was not sent, is in
doubt), soon, and leaves neither memory nor a descriptor behind. What was tried is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import resource
import sys
import time
from random import Random
from typing import Final

from duly.apps.alerts.channels import webhook
from duly.apps.alerts.channels.channel import Notification
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.apps.alerts.channels.webhook import WebhookChannel
from duly.errors import Declined, InDoubt, NotSent
from proof.counts import count
from proof.hostile import spoil
from proof.leaks import descriptors

AT_ONCE: Final = 64
"""Attempts that are under way together, over one channel and its connections."""
SLOW: Final = 30.0
"""Seconds that no attempt may take."""
PATIENCE: Final = 0.25
"""Seconds after which the channel gives an answer up here."""
GROWTH: Final = 64 * 1024 * 1024
"""Bytes by which the program may grow."""
ENDLESS: Final = 4 * 1024 * 1024
"""Bytes after which a receiver is tired of an answer that never ends."""

BOMB: Final = gzip.compress(b"0" * 10_000_000)
ANSWERS: Final = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 120\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 Unavailable\r\nRetry-After: Wed, 21 Oct 2099 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\nbye",
    b"HTTP/1.0 500 Oops\r\nSet-Cookie: a=b; Domain=.example\r\nContent-Type: text/html; charset=\xff\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(BOMB), BOMB),
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x05hello",
    b"HTTP/1.1 401 Who\r\nWWW-Authenticate: Digest realm=x, nonce=y\r\nContent-Length: 0\r\n\r\n",
]


class HostileReceiver:
    """A server that reads a request, or does not, and answers with what the dice say."""

    def __init__(self, seed: str) -> None:
        self._rng = Random(seed)
        self.url = ""

    async def start(self) -> asyncio.Server:
        """Listen on a free port of loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                how = self._rng.randrange(20)
                if how == 0:
                    break  # without reading anything
                if not await reader.read(1 << 16) or how == 1:
                    break
                answer = spoil(self._rng, ANSWERS) if how < 18 else self._rng.choice(ANSWERS)
                writer.write(answer)
                if how == 2:
                    await self._go_on_for_long(writer)
                await writer.drain()
                if how < 8:
                    break
        writer.close()

    async def _go_on_for_long(self, writer: asyncio.StreamWriter) -> None:
        more = spoil(self._rng, ANSWERS) * 200
        sent = 0
        while sent < ENDLESS:
            writer.write(more)
            sent += len(more) or 1
            await writer.drain()


async def attempt(channel: WebhookChannel, n: int) -> None:
    """Make one attempt; anything but one of its four ends is an error."""
    body: dict[str, object] = {
        "type": "alert.event",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {"event": f"e{n}"},
    }
    began = time.monotonic()
    with contextlib.suppress(Declined, NotSent, InDoubt):
        async with asyncio.timeout(SLOW):
            await channel.send(Notification(f"delivery_{n}", "a title", "a text", body))
    assert time.monotonic() - began < SLOW, "an attempt does not end"


async def attack(cases: int, seed: int) -> None:
    """Try so many answers."""
    webhook.SECONDS = PATIENCE  # type: ignore[misc]
    open_before = descriptors()
    receiver = HostileReceiver(f"webhooks {seed}")
    server = await receiver.start()
    channel = WebhookChannel(receiver.url, "", ChannelThreads(), private=True)
    before = 0
    try:
        for first in range(0, cases, AT_ONCE):
            await asyncio.gather(*(attempt(channel, n) for n in range(first, min(first + AT_ONCE, cases))))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            before = before or grown
            assert grown - before < GROWTH, f"{grown - before:,} bytes more after {first:,} answers"
    finally:
        await channel.close()
        server.close()
    async with asyncio.timeout(SLOW):  # the receiver closes its ends when it is next asked
        while descriptors() > open_before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    count("hostile input", cases, f"python -m proof.hostile_webhooks {cases} {seed}")


if __name__ == "__main__":
    try:
        asyncio.run(attack(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
    except Exception as problem:
        sys.exit(f"{problem!r}; replay: python -m proof.hostile_webhooks {' '.join(sys.argv[1:])}")
