"""Being somebody without a token: whoever may read the hub's data folder may borrow one.

A borrowed token ends with the hub that lent it, and when it is not used for a while, so whoever borrows asks
again before each connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from duly.cli.common import CommandFailed, Exit, HubClient, HubUnreachable, find_hub
from duly.errors import NotAuthenticated


def roles(hub: HubClient) -> dict[str, str]:
    """Everybody's role, by name."""
    return {one["name"]: one["role"] for one in hub.ask("/v1/admin/list", {})["accounts"]}


def check_account(hub: HubClient, name: str, role: str) -> None:
    """Say what is wrong before anybody waits for a connection."""
    known = roles(hub)
    if name not in known:
        raise CommandFailed(
            Exit.NOT_ALLOWED, f"there is no {role} {name}; make it with: duly add {role} {name}"
        )
    if known[name] != role:
        raise CommandFailed(
            Exit.USAGE, f"{name} is of kind {known[name]}, not a {role}; 'duly list' shows who there is"
        )


def borrower(hub: HubClient, name: str, data: str | None) -> Callable[[], Awaitable[tuple[str, str]]]:
    """Where the hub of this data folder is now, and a token with which to be `name` there."""
    lender = hub

    async def borrow() -> tuple[str, str]:
        nonlocal lender
        lender = find_hub(data) or lender
        try:
            return lender.url, await asyncio.to_thread(lender.borrow, name)
        except HubUnreachable as problem:
            raise TimeoutError(str(problem)) from None
        except CommandFailed as problem:
            raise NotAuthenticated(str(problem)) from None

    return borrow
