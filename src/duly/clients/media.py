"""Media: downloads a file from a device in chunks, resumes it after a break, and checks its hash.

The laws. Reading a chunk changes nothing, so it may be asked for any number of times; chunks are a dedup
class of their own, are remembered briefly, and their data is stored nowhere on the way. A download is
finished only when its SHA-256 is right: until then it is stored next to its target in a file named by the
hash, so that the next call resumes it; a file that has changed is fetched again from the start. A download
waits for a device, hub or network that is down, and gives up after `PATIENCE` seconds without progress.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import MediaError, Refused
from duly.runtime.backoff import Backoff
from duly.wire.frames import DeviceCode, ServerCode

CHUNK_BYTES: Final = 96 * 1024
"""The size of a chunk: as base64 in JSON it stays well below the limit of a frame."""
ASK_AGAIN: Final = 5
PATIENCE: Final = 120.0
"""Seconds that a device may be offline or silent during a download."""
PAUSE: Final = RetryPolicy.exponential(200 * MS, 3 * SECOND)
AT_ONCE: Final = 4

T = TypeVar("T")


class Media(Struct, frozen=True):
    """The description of a file that a device serves.

    >>> Media("clip.mp4", size=200_000, sha256="…", chunk=98_304).chunks
    3
    """

    name: str
    size: int
    sha256: str
    chunk: int

    @property
    def chunks(self) -> int:
        """How many chunks the file has."""
        return -(-self.size // self.chunk)


class MediaAnswer(Protocol):
    """The part of an answer that a download reads."""

    @property
    def done(self) -> bool:
        """Whether the device has carried out the command."""
        ...

    @property
    def state(self) -> str:
        """The state in which the command ended, as a word."""
        ...

    @property
    def data(self) -> object:
        """The payload of the answer; None if it has none."""
        ...

    @property
    def detail(self) -> str:
        """The reason for the state, in a sentence; may be empty."""
        ...


class Asker(Protocol):
    """The part of an app that a download uses."""

    def send(self, device: str, type: str, data: object = None) -> Awaitable[MediaAnswer]:
        """Send a command to a device; its answer can be awaited."""
        ...


class Question(Protocol):
    """The part of a command that a device's store reads."""

    @property
    def data(self) -> Any:
        """The payload of the command, decoded from JSON."""
        ...


class _Chunk(Struct, frozen=True):
    data: str = ""


async def download(
    app: Asker, device: str, name: str, to: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Fetch a file. `progress(chunks done, chunks in all)` is called as it goes."""
    media = await _ask(app, device, "media_download", {"name": name}, Media)
    part = to.with_name(f"{to.name}.{media.sha256[:12]}.part")
    done = part.stat().st_size // media.chunk if part.exists() else 0
    with part.open("r+b" if part.exists() else "w+b") as file:
        file.truncate(done * media.chunk)
        file.seek(0, 2)
        while done < media.chunks:
            wanted = range(done, min(done + AT_ONCE, media.chunks))
            for chunk in await asyncio.gather(*(_chunk(app, device, media, n) for n in wanted)):
                file.write(chunk)
                done += 1
            file.flush()
            if progress is not None:
                progress(done, media.chunks)
    found = await asyncio.get_running_loop().run_in_executor(None, _sha256, part)
    if found != media.sha256:
        part.unlink()
        raise MediaError(
            f"{name} arrived damaged (its SHA-256 is {found[:12]}…) and was deleted; download it again"
        )
    return part.replace(to)


async def _chunk(app: Asker, device: str, media: Media, n: int) -> bytes:
    wanted = {"name": media.name, "n": n}
    for _ in range(ASK_AGAIN):
        found = await _ask(app, device, "media_download_chunk", wanted, _Chunk)
        # The hub answers the repeat of an answered question without the data, so a new question is asked.
        if found.data:
            return base64.b64decode(found.data)
    raise MediaError(f"{device} does not give chunk {n} of {media.name}")


async def _ask(app: Asker, device: str, kind: str, data: object, type_: type[T]) -> T:
    """Ask until there is an answer. Reading changes nothing, so a retry is always safe."""
    loop, pause = asyncio.get_running_loop(), Backoff(PAUSE)
    until = loop.time() + PATIENCE
    while True:
        try:
            ack = await app.send(device, kind, data)
        except Refused as refusal:
            if refusal.code not in _AWAY:
                raise
            why = refusal.detail
        else:
            if ack.done:
                return _read(device, kind, ack.data, type_)
            if ack.state not in _LOST:
                raise MediaError(f"{device}: {ack.detail or ack.state}")
            why = ack.detail or ack.state
        if loop.time() >= until:
            raise MediaError(f"{device}: {why}")
        await pause.wait()


def _read(device: str, kind: str, data: object, type_: type[T]) -> T:
    try:
        return msgspec.convert({} if data is None else data, type_)
    except msgspec.ValidationError as problem:
        raise MediaError(f"{device} does not answer {kind} as a device should: {problem}") from None


_AWAY: Final = (ServerCode.OFFLINE, ServerCode.INTERNAL)
"""Codes of the hub after which another try may succeed."""
_LOST: Final = (State.UNKNOWN.word, State.EXPIRED.word, State.SUPERSEDED.word)
"""States of a question that got no answer because a part was offline."""


class MediaStore:
    """The files that a device serves."""

    def __init__(self, refuse: Callable[[int, str], Exception]) -> None:
        self._files: dict[str, Path] = {}
        self._refuse = refuse

    def put(self, name: str, path: Path) -> None:
        """Serve a file under this name."""
        self._files[name] = path

    async def describe(self, command: Question) -> dict[str, object]:
        """Answer `media_download`: name, size, SHA-256 and chunk size."""
        path = self._find(command.data)
        size = path.stat().st_size
        digest = await asyncio.get_running_loop().run_in_executor(None, _sha256, path)
        return {"name": command.data["name"], "size": size, "sha256": digest, "chunk": CHUNK_BYTES}

    async def chunk(self, command: Question) -> dict[str, object]:
        """Answer `media_download_chunk`: chunk `n` as base64."""
        path, n = self._find(command.data), command.data.get("n")
        if not isinstance(n, int) or n < 0:
            raise self._refuse(DeviceCode.BAD_PARAMETERS, "n is the number of a chunk, from 0")
        with path.open("rb") as file:
            file.seek(n * CHUNK_BYTES)
            data = file.read(CHUNK_BYTES)
        if not data:
            raise self._refuse(DeviceCode.BAD_PARAMETERS, f"there is no chunk {n}")
        return {"n": n, "data": base64.b64encode(data).decode()}

    def _find(self, data: object) -> Path:
        name = data.get("name") if isinstance(data, dict) else None
        path = self._files.get(name) if isinstance(name, str) else None
        if path is None or not path.is_file():
            raise self._refuse(DeviceCode.BAD_PARAMETERS, f"there is no media {name!r}")
        return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
