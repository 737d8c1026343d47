"""The notifier carries hints from hub to hub: "look in the ledger".

The law: nothing depends on a hint. It may be lost, late, repeated or made up, and a lost hint costs only
time, since every hub also reads the ledger every second or two. So sending a hint never waits and never
fails.

The hints of one turn of the event loop go out together, each once, so that load makes the notes longer, not
more numerous. A hub does not receive its own hints.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from duly.runtime.tasks import Supervisor, cancel

NOTE_BYTES: Final = 7_000
"""The most bytes of one note: PostgreSQL carries less than 8,000."""
ECHO_AGAIN: Final = 0.25
"""After how many seconds a hint that a notifier sends itself is sent again."""
ECHO: Final = "echo"
"""The hint that a hub sends to itself to check whether the notifier works."""
UNSENT: Final = 10_000
"""How many hints wait for a server that is down or slow; further ones are lost, and would be outdated
anyway."""


class HintSender(Protocol):
    """The part of a notifier that applications use."""

    def hint(self, about: str, name: str = "") -> None:
        """Tell the other hubs to read the ledger: `about` is the kind of thing, `name` which one."""
        ...

    def listen(self, about: str, heard: Callable[[str], None]) -> None:
        """Call `heard(name)` for the other hubs' hints of this kind; it must not block."""
        ...


class Notifier(ABC):
    """Base of all notifiers. Open one with `duly.cluster.notifiers.open_notifier`.

    `me` is the name of this hub, by which it recognises its own hints.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._listeners: dict[str, list[Callable[[str], None]]] = {}
        self._unsent: dict[str, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self.tasks = Supervisor()
        """the background tasks; a hub replaces them with its own before the start"""
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._problem = ""
        self.on_problem: Callable[[], None] = _ignored
        """called when `problem` has changed"""

    @property
    def problem(self) -> str:
        """Why nothing was received at the last attempt to listen; empty when all is well."""
        return self._problem

    @problem.setter
    def problem(self, problem: str) -> None:
        """Set the reason, and report the change."""
        if problem != self._problem:
            self._problem = problem
            self.on_problem()

    async def check(self, within: float) -> float:
        """Send a hint to this hub itself and return how many seconds that took. It is sent again until it is
        heard, since a notifier may only be about to listen. Raises `TimeoutError` if none is heard."""
        loop = asyncio.get_running_loop()
        name = secrets.token_hex(8)
        heard = self._echoes[name] = loop.create_future()
        try:
            async with asyncio.timeout(within):
                while not heard.done():
                    began = loop.time()
                    await self._send(_encode((self._me, [f"{ECHO}/{name}"])))
                    await asyncio.wait([heard], timeout=ECHO_AGAIN)
        finally:
            del self._echoes[name]
        return loop.time() - began

    def listen(self, about: str, heard: Callable[[str], None]) -> None:
        """Call `heard(name)` for the other hubs' hints of this kind; it must not block."""
        self._listeners.setdefault(about, []).append(heard)

    def hint(self, about: str, name: str = "") -> None:
        """Tell the other hubs to read the ledger: `about` is the kind of thing, `name` which one."""
        if len(self._unsent) < UNSENT:
            self._unsent[f"{about}/{name}"] = None
        if self._sending is None:
            self._sending = self.tasks.do("notifier sending", self._send_all())

    async def _send_all(self) -> None:
        # A task starts at the end of this turn of the loop, so every hint of the turn is in the note.
        try:
            while self._unsent:
                topics, self._unsent = list(self._unsent), {}
                for note in _notes(self._me, topics):
                    await self._send(note)
        finally:
            self._sending = None

    def receive(self, note: bytes | str) -> None:
        """Pass the hints of a note to their listeners; a foreign note is ignored."""
        with suppress(msgspec.DecodeError):  # another program uses our channel
            sender, topics = _decode(note)
            if sender == self._me:
                self._receive_own(topics)
                return
            for topic in topics:
                about, _, name = topic.partition("/")
                for heard in self._listeners.get(about, ()):
                    try:
                        heard(name)
                    except Exception as bug:  # a listener that fails must not keep the hint from the others
                        self.tasks.failed("notifier", bug)

    def _receive_own(self, topics: list[str]) -> None:
        for topic in topics:
            about, _, name = topic.partition("/")
            echo = self._echoes.get(name) if about == ECHO else None
            if echo is not None and not echo.done():
                echo.set_result(None)

    @abstractmethod
    async def start(self) -> None:
        """Start to listen. A server that is down is retried quietly for as long as it takes."""

    async def stop(self) -> None:
        """Stop sending."""
        if self._sending is not None:
            await cancel(self._sending)

    @abstractmethod
    async def _send(self, note: bytes) -> None:
        """Send a note, or lose it, without raising an error and without taking long."""


def _ignored() -> None:
    """Do nothing."""


_decode: Final = msgspec.json.Decoder(tuple[str, list[str]]).decode
_encode: Final = msgspec.json.Encoder().encode


def _notes(me: str, topics: list[str]) -> Iterator[bytes]:
    """Split topics into notes of a size that every notifier carries."""
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
