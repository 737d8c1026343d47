"""A sentinel's connection to its tower where only plain HTTP gets through: frames in batches by POST.

The law is that of any link: it carries frames while it can and loses them while it cannot. One request is
under way at a time, so what is sent first arrives first. There is no connection to be up or down; it is up
while requests are answered, and when one is not, an empty batch asks, with back-off, whether they are again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from ssl import SSLContext
from typing import Final

import aiohttp
import msgspec

from duly.clients.websocket_link import RECONNECT
from duly.errors import NotAuthenticated, SenderError
from duly.runtime.backoff import Backoff
from duly.runtime.tasks import Supervisor
from duly.wire import frames
from duly.wire.frames import Frame

BATCH_FRAMES: Final = 100
BATCH_BYTES: Final = 1024 * 1024
ANSWER_SECONDS: Final = 60.0


class HttpLink:
    """One link. `where` says, before each try, where the tower is and with which token: for one that was
    borrowed, and ends when it is not used."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        up: Callable[[Frame], None],
        heard: Callable[[Frame], None],
        down: Callable[[], None],
        denied: Callable[[NotAuthenticated], None],
        where: Callable[[], Awaitable[tuple[str, str]]] | None = None,
        tls: SSLContext | None = None,
    ) -> None:
        self._url = _messages(url)
        self._where = where
        self._token = token
        self._up, self._heard, self._down, self._denied = up, heard, down, denied
        self._tls: SSLContext | bool = tls or True
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.tasks = Supervisor()
        self.connected = False

    async def start(self) -> None:
        self.tasks.spawn("http link", self._run)

    async def stop(self) -> None:
        await self.tasks.stop()

    def send(self, frame: bytes) -> None:
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
                    if self._where is None or not self.connected:  # else another is borrowed at once
                        self._denied(problem)
                except (aiohttp.ClientError, OSError, SenderError, TimeoutError):
                    pass  # a tower that is down, or talks nonsense, is tried again
                finally:
                    if self.connected:
                        self.connected = False
                        self._down()
                await backoff.wait()

    async def _serve(self, http: aiohttp.ClientSession, date: str) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()  # meant for before it broke
        self.connected = True
        self._up(Frame("welcome", time=_ms(date)))
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
        """The answers to a batch, and the tower's time."""
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
    """HTTP's clock has no fractions: half a second more is right on average."""
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
