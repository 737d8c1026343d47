"""The traces of commands that one hub accepts and another one hands over.

The law: a trace accompanies its command and decides nothing. A lost trace costs the spans of the other hub,
never a command. It travels with the hint that the command was stored; for a command that has waited, or that
a dead hub has left, it is read from the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from duly.apps.gateway.local_gateway import LocalGateway
from duly.cluster.notifier import HintSender
from duly.core.messages import Message, key_of
from duly.core.operations import OpenDelivery
from duly.errors import Malformed

TRACE: Final = "trace"
"""The hint with the trace of a command: traceparent/device/scope/id."""


class SharedTraces:
    """Passes traces from hub to hub."""

    def __init__(self, notifier: HintSender, local: LocalGateway) -> None:
        self._notifier = notifier
        self._local = local
        notifier.listen(TRACE, self._heard)

    def hint(self, message: Message) -> None:
        """Tell the hub of a device the trace of the command that was stored for it."""
        trace = self._local.traces.handed_on(message.key)
        if trace:
            self._notifier.hint(TRACE, f"{trace}/{message.recipient}/{message.scope}/{message.id}")

    def resume(self, found: Sequence[OpenDelivery]) -> None:
        """Continue the traces that came with hints."""
        traces = self._local.traces
        for item in found if traces.hinted else ():
            traces.resume_hinted(item.message)

    async def resume_kept(self, found: Sequence[OpenDelivery]) -> None:
        """Continue the traces that hubs have stored in the ledger."""
        self.resume(found)
        if found:
            await self._local.kept_traces.resume([item.message for item in found])

    def _heard(self, name: str) -> None:
        trace, _, rest = name.partition("/")
        device, _, key = rest.partition("/")
        scope, _, id_ = key.partition("/")
        if device in self._local.sessions.devices:
            with suppress(Malformed):
                self._local.traces.hint(key_of(scope, id_), trace)
