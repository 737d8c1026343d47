"""A simulated network that loses, repeats, delays and so reorders packets, and whose links are cut and
mended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict


class SimCommand(Struct, frozen=True):
    """A message on its way to its recipient."""

    message: Message


class SimAccept(Struct, frozen=True):
    """The verdict on a message, on its way back to the sender."""

    message: Message
    verdict: Verdict


class SimOutcome(Struct, frozen=True):
    """How a message ended, on its way back to the sender."""

    key: bytes
    state: State
    answer: Answer


SimPacket: TypeAlias = SimCommand | SimAccept | SimOutcome


class SimNetwork:
    """Carries packets between processes, with faults."""

    def __init__(self, rng: Random, *, drop: float, repeat: float, slow: float) -> None:
        self._rng = rng
        self.drop = drop
        self.repeat = repeat
        self.slow = slow
        self.cut: set[tuple[str, str]] = set()
        self.faults = 0
        self.captured: list[tuple[str, str, SimPacket]] = []
        self.deliver: Callable[[str, str, SimPacket], None] = lambda source, target, packet: None

    def send(self, source: str, target: str, packet: SimPacket) -> None:
        """Send a packet; it may be lost, repeated or delayed."""
        if isinstance(packet, SimCommand):
            self.captured.append((source, target, packet))
        if (source, target) in self.cut or self._rng.random() < self.drop:
            self.faults += 1
            return
        self._carry(source, target, packet)
        if self._rng.random() < self.repeat:
            self.faults += 1
            self._carry(source, target, packet)

    def _carry(self, source: str, target: str, packet: SimPacket) -> None:
        delay = 0.001 + self._rng.random() * self.slow
        asyncio.get_running_loop().call_later(delay, self.deliver, source, target, packet)

    def sever(self, a: str, b: str) -> None:
        """Cut the link between two processes."""
        self.faults += 1
        self.cut |= {(a, b), (b, a)}

    def mend(self, a: str, b: str) -> None:
        """Restore the link between two processes."""
        self.cut -= {(a, b), (b, a)}

    def heal(self) -> None:
        """End all faults."""
        self.cut.clear()
        self.drop = self.repeat = 0.0
        self.slow = min(self.slow, 0.05)
