"""A sentinel's connection to its tower over plain HTTP: frames in batches by POST.

The law is that of any link: it carries frames while it is up and loses them while it is down. One request is
under way at a time, so frames arrive in order. HTTP has no lasting connection: the link is up while requests
are answered; after a failure it sends empty batches, with back-off, until the tower answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from ssl import SSLContext
from typing import Final

import aiohttp
import msgspec

from duly.clients.websocket_link import RECONNECT, Access
from duly.errors import NotAuthenticated, SenderError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import Supervisor
from duly.wire import frames
from duly.wire.frames import Frame

BATCH_FRAMES: Final = 100
BATCH_BYTES: Final = 1024 * 1024
ANSWER_SECONDS: Final = 60.0


class HttpLink:
    """A link over plain HTTP; a refused token is reported to `denied`, and tried again."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        up: Callable[[Frame], None],
        heard: Callable[[Frame], None],
        down: Callable[[], None],
        denied: Callable[[NotAuthenticated], None],
        access: Access | None = None,
    ) -> None:
        self._url = _messages(url)
        access = access or Access()
        self._where = access.where
        self._token = token
        self._up, self._heard, self._down, self._denied = up, heard, down, denied
        self._tls: SSLContext | bool = access.tls or True
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.tasks = Supervisor()
        self._first: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.connected = False
        self.denial: NotAuthenticated | None = None
        """why the tower refuses us; None after it has accepted us"""

    async def start(self) -> None:
        """Begin to connect."""
        self.tasks.spawn("http link", self._run)

    async def ready(self) -> Frame:
        """Wait until the tower has answered for the first time."""
        return await asyncio.shield(self._first)

    async def stop(self) -> None:
        """Cancel what is under way, and send nothing more."""
        await self.tasks.stop()
        self._first.cancel()

    def send(self, frame: bytes) -> None:
        """Send a frame. While the link is down it is lost."""
        if self.connected:
            self._queue.put_nowait(frame)

    async def _run(self) -> None:
        backoff = Backoff(RECONNECT, self._token)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                try:
                    if self._where is not None:
                        url, self._token = await self._where()
                        self._url = _messages(url)
                    _, date = await self._post(http, [])
                    backoff.worked()
                    await self._serve(http, date)
                except NotAuthenticated as problem:
                    self.denial = problem
                    if self._where is None or not self.connected:  # otherwise it asks for a new token at once
                        self._denied(problem)
                except (aiohttp.ClientError, OSError, SenderError, TimeoutError):
                    pass  # a tower that is down, or breaks the protocol, is tried again
                finally:
                    if self.connected:
                        self.connected = False
                        self._down()
                await backoff.wait()

    async def _serve(self, http: aiohttp.ClientSession, date: str) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()  # sent before the link broke
        self.connected, self.denial = True, None
        welcome = Frame("welcome", time=_ms(date))
        self._up(welcome)
        if not self._first.done():
            self._first.set_result(welcome)
        while True:
            batch = [await self._queue.get()]
            size = len(batch[0])
            while not self._queue.empty() and len(batch) < BATCH_FRAMES and size < BATCH_BYTES:
                batch.append(self._queue.get_nowait())
                size += len(batch[-1])
            answers, _ = await self._post(http, batch)
            for answer in answers:
                with suppress(SenderError):
                    self._heard(frames.decode(answer))

    async def _post(self, http: aiohttp.ClientSession, batch: list[bytes]) -> tuple[list[bytes], str]:
        """Return the answers to a batch, and the tower's `Date`."""
        body = msgspec.json.encode([msgspec.Raw(frame) for frame in batch])
        headers = {"Authorization": f"Bearer {self._token}"}
        async with http.post(self._url, data=body, headers=headers, ssl=self._tls) as response:
            said = await response.read()
            if response.status in (401, 403, 429):
                raise NotAuthenticated(_detail(said) or "the tower does not know this token")
            response.raise_for_status()
            return frames.decode_batch(said) or [], response.headers.get("Date", "")


def _messages(url: str) -> str:
    return url.rstrip("/") + "/v1/messages"


def _ms(date: str) -> int | None:
    """Return the milliseconds of an HTTP `Date`, plus half a second: the header has no fractions."""
    try:
        return round(parsedate_to_datetime(date).timestamp() * 1000) + 500
    except ValueError:
        return None


class _Problem(msgspec.Struct):
    detail: str = ""


def _detail(said: bytes) -> str:
    try:
        return msgspec.json.decode(said, type=_Problem).detail
    except msgspec.DecodeError:
        return ""
