"""Being somebody without a token: whoever may read the hub's data folder may borrow one.

A borrowed token ends with the hub that lent it, so a link with one borrows again from each new hub.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from duly.cli.common import Exit, Hub, Trouble, Unreachable, find_hub
from duly.errors import NotAuthenticated

if TYPE_CHECKING:
    from duly.clients.link import Link


def check_account(hub: Hub, name: str, role: str) -> None:
    """Say what is wrong before anybody waits for a connection."""
    roles = accounts(hub)
    if name not in roles:
        raise Trouble(Exit.NOT_ALLOWED, f"there is no {role} {name}; make it with: duly add {role} {name}")
    if roles[name] != role:
        raise Trouble(
            Exit.USAGE, f"{name} is of kind {roles[name]}, not a {role}; 'duly list' shows who there is"
        )


def accounts(hub: Hub) -> dict[str, str]:
    """Everybody's role, by name."""
    return {one["name"]: one["role"] for one in hub.ask("/v1/admin/list", {})["accounts"]}


def borrowing_link(data: str | None, name: str) -> type[Link]:
    """A link that is `name` at the hub of this data folder."""
    from duly.clients.link import Link

    class BorrowingLink(Link):
        lender = ""

        async def _introduce(self, socket: Any) -> Any:
            now = find_hub(data)
            if now is not None and now.token != self.lender:
                try:
                    self._token = await asyncio.to_thread(now.borrow, name)
                except Unreachable as problem:
                    raise TimeoutError(str(problem)) from None
                except Trouble as problem:
                    raise NotAuthenticated(str(problem)) from None
                self.lender = now.token
            return await super()._introduce(socket)

    return BorrowingLink
