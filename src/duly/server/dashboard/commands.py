"""Commands that are sent from the dashboard.

They are handled like those of apps: admitted once per id, ordered, acknowledged twice. Their sender is the
account `dashboard`, an admin that is created with the first command and whose token no client has; the audit
chain records which person sent a command. The page creates the id once per form, so a double click, a reload
or a lost answer causes one effect.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from duly.errors import Conflict, Malformed
from duly.identity.accounts import Principal, Role
from duly.server.dashboard.visitors import DashboardVisitor
from duly.transports.http.frame_batches import hand_over
from duly.wire import outgoing
from duly.wire.fields import Fields

if TYPE_CHECKING:
    from duly.server.hub import Hub

SENDER: Final = "dashboard"
"""The account that sends what people send from the page."""
SEES_ALL: Final = Principal("local", Role.ADMIN)
_UUID7: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class PageCommands:
    """Sends the commands of one hub's dashboard."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def send(
        self,
        visitor: DashboardVisitor,
        id_: str,
        device: str,
        kind: str,
        data: Raw,
        fields: Fields | None = None,
        *,
        queue: bool = False,
    ) -> dict[str, object]:
        """Send a command; returns its scope, its id and the `server_ack`."""
        if not _UUID7.fullmatch(id_):
            raise Malformed("the id of a command from the page is a UUID of version 7, minted by the page")
        frame: dict[str, object] = dict(fields or {})
        frame |= {"type": kind, "seq_id": id_, "to": device, "data": data}
        if queue:
            frame["queue"] = True
        batch = await hand_over(self._hub, await self._sender(), [msgspec.json.encode(frame)])
        # A repeat of one that has ended has its `ack` in it, as JSON.
        said = msgspec.json.decode(outgoing.encode(batch.waiters[0].answer))
        return {"scope": SENDER, "id": id_, "server_ack": said}

    async def _sender(self) -> Principal:
        accounts = self._hub.accounts
        role = await accounts.find_role(SENDER)
        if role is None:
            with suppress(Conflict):  # another hub was faster
                await accounts.add(Role.ADMIN, SENDER)
            await accounts.confirmed(SENDER)
            role = accounts.stored_role(SENDER)
        if role is not Role.ADMIN:
            raise Malformed(
                f"the account {SENDER!r} is not an admin, so the page cannot send commands; "
                f"'duly remove {SENDER}' frees the name"
            )
        return Principal(SENDER, Role.ADMIN, epoch=accounts.epoch(SENDER))
