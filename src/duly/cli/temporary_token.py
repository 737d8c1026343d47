"""Acting as an account without its token: a reader of the hub's data folder may ask for a temporary one.

A temporary token ends with the hub that gave it, and when it is not used for a while, so a new one is asked
for before each connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from duly.cli.common import CommandFailed, Exit, HubClient, HubUnreachable, find_hub
from duly.errors import NotAuthenticated


def roles(hub: HubClient) -> dict[str, str]:
    """Returns the role of every account, by name."""
    return {one["name"]: one["role"] for one in hub.ask("/v1/admin/list", {})["accounts"]}


def check_account(hub: HubClient, name: str, role: str) -> None:
    """Fails if there is no such account, before a client waits for a connection."""
    known = roles(hub)
    if name not in known:
        raise CommandFailed(
            Exit.NOT_ALLOWED, f"there is no {role} {name}; create it with: duly add {role} {name}"
        )
    if known[name] != role:
        raise CommandFailed(
            Exit.USAGE, f"{name} is of kind {known[name]}, not of kind {role}; 'duly list' shows all accounts"
        )


def access_source(hub: HubClient, name: str, folder: str | None) -> Callable[[], Awaitable[tuple[str, str]]]:
    """Returns a function that finds the hub of this data folder, and a temporary token of `name` there."""
    last = hub

    async def find() -> tuple[str, str]:
        nonlocal last
        last = find_hub(folder) or last
        try:
            return last.url, await asyncio.to_thread(last.temporary_token, name)
        except HubUnreachable as problem:
            raise TimeoutError(str(problem)) from None
        except CommandFailed as problem:
            raise NotAuthenticated(str(problem)) from None

    return find
