"""What the parts that deal with other hubs need of the gateway that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from duly.apps.gateway.pushes import PushService
from duly.apps.gateway.sessions import GatewaySessions
from duly.core.messages import Message
from duly.core.steps import Origin
from duly.runtime.engine import Engine
from duly.runtime.kept_traces import KeptTraces
from duly.runtime.tracing import CommandTraces
from duly.storage.ledger import Record


class LocalGateway(Protocol):
    """What the remote side needs of the gateway that it belongs to."""

    engine: Engine
    pushes: PushService
    sessions: GatewaySessions
    traces: CommandTraces
    kept_traces: KeptTraces

    def waiting(self) -> Iterable[Message]:
        """The commands that wait here for their devices."""
        ...

    async def learn_senders(self, messages: Sequence[Message]) -> None:
        """Look up the senders and grants of commands of other hubs, as far as they are not known here."""
        ...

    def tell_end(self, record: Record, origins: Iterable[Origin]) -> None:
        """Tell apps here how a command has ended at another hub."""
        ...

    async def replaced(self, device: str) -> None:
        """Close the session of a device that has connected to another hub."""
        ...
