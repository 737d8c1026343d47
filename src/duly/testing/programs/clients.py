"""The production clients, connected to the simulated hub and broker of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from duly.clients.app import App
from duly.clients.device import Device
from duly.clients.node.node import Node
from duly.clients.sentinel import Sentinel
from duly.core.steps import Effect
from duly.storage.ledger import Ledger
from duly.testing.sim.gateway import SimLink, end_client
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.peers import end_node

if TYPE_CHECKING:
    from duly.clients.base import HubLink


class ProgramApp(App):
    """An app whose connection and memory are simulated."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__("", "", store="simulated")
        self._process = process

    async def _open_ledger(self) -> Ledger:
        return self._process.ledger

    def _open_link(self) -> HubLink:
        return SimLink(self._process, self._up, self._heard, self._positions, self._down)

    def _perform(self, effect: Effect) -> None:
        if self._process.alive:
            super()._perform(effect)


class ProgramDevice(Device):
    """A device whose connection and memory are simulated."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__("", "")
        self._process = process

    async def _open_ledger(self) -> Ledger:
        return self._process.ledger

    def _open_link(self) -> HubLink:
        return SimLink(self._process, self._up, self._heard, down=self._down)

    def _perform(self, effect: Effect) -> None:
        if self._process.alive:
            super()._perform(effect)


class ProgramSentinel(Sentinel):
    """A sentinel whose connection and memory are simulated."""

    def __init__(self, process: SimProcess, profile: str) -> None:
        super().__init__("http://hub", "", profile=profile)
        self._process = process

    async def _open_ledger(self) -> Ledger:
        return self._process.ledger

    def _open_link(self) -> HubLink:
        return SimLink(self._process, self._up, self._heard, down=self._down)

    def _draw(self) -> bytes:
        return self._process.name.encode()

    def _perform(self, effect: Effect) -> None:
        if self._process.alive:
            super()._perform(effect)


class ProgramNode(Node):
    """A node whose broker and memory are simulated."""

    def __init__(self, process: SimProcess, *, ordered: bool) -> None:
        super().__init__(
            f"mqtt://{process.name}@{process.name}?version=3", store="simulated", ordered=ordered
        )
        self._process = process

    async def _open_ledger(self, serve: bool) -> Ledger:
        return self._process.ledger


def kill(client: App | Device | Sentinel | Node) -> None:
    """End a client as the death of its process does."""
    if isinstance(client, Node):
        end_node(client)
    else:
        end_client(client)
