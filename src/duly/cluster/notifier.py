"""The notifier: "look in the ledger", said from hub to hub.

The law: a ring is a hint and never the truth. It may be lost, late, repeated or made up, and costs time at
most, since whoever listens also looks by himself every second or two. So ringing never waits and never fails.

Rings of one turn of the event loop go out together, each once: load makes the notes longer, not more. A hub
does not hear its own.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from duly.runtime.tasks import Supervisor

NOTE_BYTES: Final = 7_000
"""What fits into one note: PostgreSQL carries less than 8,000 bytes."""
ECHO: Final = "echo"
"""What is rung to hear oneself: whether the bell works."""
UNSENT: Final = 10_000
"""Topics that wait for a bell that is away or slow; what comes then is lost: it would be old news anyway."""


class HintSender(Protocol):
    """What an application needs of a notifier."""

    def ring(self, about: str, name: str = "") -> None:
        """Tell the other hubs to look: `about` is what kind of thing, `name` which one."""
        ...

    def listen(self, about: str, heard: Callable[[str], None]) -> None:
        """Have `heard(name)` called for the others' rings of this kind; it must not block."""
        ...


class Notifier(ABC):
    """Base of all notifiers. Open one with `duly.cluster.notifiers.open_notifier`.

    `me` is who rings, so that nobody hears himself.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._ears: dict[str, list[Callable[[str], None]]] = {}
        self._unsent: dict[str, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self.tasks = Supervisor()
        """what runs here in the background; a hub puts its own in before the start"""
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self.problem = ""
        """why nothing was heard when it was last tried to listen; empty when all is well"""

    async def check(self, within: float) -> float:
        """Ring, and hear it oneself: how many seconds that took. Raises `TimeoutError` if it is not heard."""
        loop = asyncio.get_running_loop()
        name, began = secrets.token_hex(8), loop.time()
        heard = self._echoes[name] = loop.create_future()
        try:
            async with asyncio.timeout(within):
                await self._send(_encode((self._me, [f"{ECHO}/{name}"])))
                await heard
        finally:
            del self._echoes[name]
        return loop.time() - began

    def listen(self, about: str, heard: Callable[[str], None]) -> None:
        self._ears.setdefault(about, []).append(heard)

    def ring(self, about: str, name: str = "") -> None:
        if len(self._unsent) < UNSENT:
            self._unsent[f"{about}/{name}"] = None
        if self._sending is None:
            self._sending = self.tasks.do("notifier sending", self._send_all())

    async def _send_all(self) -> None:
        # A task starts at the end of this turn of the loop, so everything rung in it is in the note.
        try:
            while self._unsent:
                topics, self._unsent = list(self._unsent), {}
                for note in _notes(self._me, topics):
                    await self._send(note)
        finally:
            self._sending = None

    def _heard(self, note: bytes | str) -> None:
        """A note has come, from anybody."""
        with suppress(msgspec.DecodeError):  # somebody else uses our bell; it is not for us
            sender, topics = _decode(note)
            if sender == self._me:
                self._heard_oneself(topics)
                return
            for topic in topics:
                about, _, name = topic.partition("/")
                for heard in self._ears.get(about, ()):
                    try:
                        heard(name)
                    except Exception as bug:  # what one listener fails of must not keep it from the others
                        self.tasks.failed("notifier", bug)

    def _heard_oneself(self, topics: list[str]) -> None:
        for topic in topics:
            about, _, name = topic.partition("/")
            echo = self._echoes.get(name) if about == ECHO else None
            if echo is not None and not echo.done():
                echo.set_result(None)

    @abstractmethod
    async def start(self) -> None:
        """Begin to listen. A bell that is away is tried again, quietly, for as long as it takes."""

    async def stop(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    @abstractmethod
    async def _send(self, note: bytes) -> None:
        """Send a note, or lose it, without raising and without taking long."""


_decode: Final = msgspec.json.Decoder(tuple[str, list[str]]).decode
_encode: Final = msgspec.json.Encoder().encode


def _notes(me: str, topics: list[str]) -> Iterator[bytes]:
    """Topics as notes of a size that every bell carries."""
    part: list[str] = []
    size = 0
    for topic in topics:
        length = len(topic.encode(errors="replace")) * 2 + 3  # at worst every character is escaped
        if size + length > NOTE_BYTES and part:
            yield _encode((me, part))
            part, size = [], 0
        part.append(topic)
        size += length
    yield _encode((me, part))
