"""The protocol by which the code for other hubs uses its own gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from duly.apps.gateway.device_list import DeviceList
from duly.apps.gateway.pushes import PushService
from duly.apps.gateway.sessions import GatewaySessions
from duly.core.messages import Message
from duly.core.steps import Origin
from duly.runtime.engine import Engine
from duly.runtime.kept_traces import KeptTraces
from duly.runtime.tracing import CommandTraces
from duly.runtime.trail import Trail
from duly.storage.ledger import Record


class LocalGateway(Protocol):
    """The parts of a gateway that its remote side uses."""

    devices: DeviceList
    engine: Engine
    pushes: PushService
    sessions: GatewaySessions
    traces: CommandTraces
    kept_traces: KeptTraces
    trail: Trail

    def waiting(self) -> Iterable[Message]:
        """Return the commands that wait here for their devices."""
        ...

    async def learn_senders(self, messages: Sequence[Message]) -> None:
        """Look up the senders and grants of other hubs' commands that are not known here yet."""
        ...

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        """Send the outcome of a command that ended at another hub to the apps here."""
        ...

    async def replaced(self, device: str) -> None:
        """Close the session of a device that has connected to another hub."""
        ...
