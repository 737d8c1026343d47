"""A client's connection to its hub: one WebSocket, which reconnects with back-off whenever it breaks.

The law: a link carries frames while it is up and loses them while it is down. Nothing durable is here; the
outbox or inbox behind it repeats what was lost. `up` is called at every new connection, `down` whenever a
connection ends that the client did not end itself. If the hub refuses the token at the first login, the link
gives up, unless there is a `denied` callback: then that is called, and the link tries again.

A URL may name several hubs, separated by commas: when one does not answer, the next is tried. The token
decides which one is tried first, so that clients spread over the hubs. When none of them answers, that is
logged once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ssl import SSLContext
from typing import Final, TypeAlias
from zlib import crc32

import aiohttp
from msgspec import Struct

from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import Malformed, NotAuthenticated, SenderError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import Supervisor
from duly.wire import frames
from duly.wire.frames import FRAME_LIMIT, Frame

LOG: Final = logging.getLogger("duly.link")

RECONNECT: Final = RetryPolicy.exponential(200 * MS, 10 * SECOND)


FindHub: TypeAlias = Callable[[], Awaitable[tuple[str, str]]]
"""Returns a hub's address and a token for it."""


class Access(Struct, frozen=True):
    """How a client reaches its hub, if a URL and a token are not enough."""

    where: FindHub | None = None
    """called before each connection, for a hub that moves or tokens that expire"""
    tls: SSLContext | None = None
    """the TLS context of https:// and wss:// addresses; None verifies certificates as usual"""


class WebSocketLink:
    """A connection to one of the hubs in `url`; `cursors` are sent to the hub at every connection."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        up: Callable[[Frame], None],
        heard: Callable[[Frame], None],
        down: Callable[[], None] = lambda: None,
        cursors: Callable[[], dict[str, int] | None] = lambda: None,
        access: Access | None = None,
        denied: Callable[[NotAuthenticated], None] | None = None,
    ) -> None:
        self._urls, self._token = hubs(url), token
        access = access or Access()
        self._where = access.where
        self._up = up
        self._heard = heard
        self._down = down
        self._cursors = cursors
        self._denied = denied
        self._tls: SSLContext | bool = access.tls or True
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.tasks = Supervisor()
        self._first: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.denial: NotAuthenticated | None = None
        """why the hub refuses us; None after it has accepted us"""
        self._stopping = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether frames can be sent now."""
        return self._socket is not None

    async def start(self) -> None:
        """Begin to connect."""
        self.tasks.spawn("websocket link", self._run)

    async def ready(self) -> Frame:
        """Wait for the first welcome. Raises `NotAuthenticated` if the hub refuses the token."""
        return await asyncio.shield(self._first)

    async def stop(self) -> None:
        """Disconnect, and do not connect again."""
        self._stopping.set()
        await self.tasks.stop()
        if not self._first.done():
            self._first.cancel()

    def send(self, frame: bytes) -> None:
        """Send a frame. While the link is down it is lost."""
        if self._socket is not None:
            self._queue.put_nowait(frame)

    async def _run(self) -> None:
        hub, failures, backoff = crc32(self._token.encode()), 0, Backoff(RECONNECT, self._token)
        async with aiohttp.ClientSession() as http:
            while not self._stopping.is_set():
                try:
                    if self._where is not None:
                        url, self._token = await self._where()
                        self._urls = hubs(url)
                    url = self._urls[hub % len(self._urls)] + "/v1/ws"
                    async with http.ws_connect(
                        url, heartbeat=20, max_msg_size=FRAME_LIMIT, ssl=self._tls
                    ) as socket:
                        welcome = await self._introduce(socket)
                        backoff.worked()
                        failures = 0
                        await self._serve(socket, welcome)
                except NotAuthenticated as problem:
                    self.denial = problem
                    if self._denied is not None:
                        self._denied(problem)
                    elif not self._first.done():
                        self._first.set_exception(problem)
                        return
                except (aiohttp.ClientError, OSError, SenderError, TimeoutError) as problem:
                    failures += 1  # a hub that is down, or breaks the protocol, is tried again
                    if failures == len(self._urls):
                        why = str(problem) or "no answer in time"
                        LOG.warning("%s cannot be reached; trying again: %s", ", ".join(self._urls), why)
                finally:
                    self._socket = None
                hub += 1
                await backoff.wait(self._stopping, among=len(self._urls))

    async def _introduce(self, socket: aiohttp.ClientWebSocketResponse) -> Frame:
        auth = Frame("auth", token=self._token, cursors=self._cursors())
        await socket.send_frame(frames.encode(auth), aiohttp.WSMsgType.TEXT)
        async with asyncio.timeout(10):
            message = await socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(
                "the hub closed the connection before its welcome"
            )  # it is shutting down: try again
        answer = frames.decode(message.data)
        if answer.type != "welcome":
            raise NotAuthenticated(answer.detail or "the hub does not know this token")
        return answer

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse, welcome: Frame) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()  # meant for the connection that broke
        self._socket = socket
        self.denial = None
        gone = (aiohttp.ClientError, OSError)
        writer = self.tasks.do("websocket writer", self._write(socket), expected=gone)
        if writer is not None:
            writer.add_done_callback(lambda _: self._written(socket))
        try:
            self._up(welcome)
            if not self._first.done():
                self._first.set_result(welcome)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    with suppress(SenderError):
                        self._heard(frames.decode(message.data))
        finally:
            self._socket = None
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            if not self._stopping.is_set():
                self._down()

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await socket.send_frame(await self._queue.get(), aiohttp.WSMsgType.TEXT)

    def _written(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Disconnect if nothing more can be written to a connection, so that the link reconnects."""
        if self._socket is socket:
            self.tasks.do("websocket hang-up", self._hang_up(socket))

    async def _hang_up(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await socket.close()


def hubs(urls: str) -> list[str]:
    """Return the hubs in a URL, separated by commas.

    >>> hubs("ws://a:7800/, https://b")
    ['http://a:7800', 'https://b']
    """
    named = [url.strip().rstrip("/") for url in urls.split(",")]
    for url in named:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise Malformed(f"{url!r} is not a hub's address; write http://127.0.0.1:7800")
    return [url.replace("ws://", "http://", 1).replace("wss://", "https://", 1) for url in named]
