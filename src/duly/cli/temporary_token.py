"""Temporary tokens: a user who can read the hub's data folder may act as any account without its token.

A temporary token expires when its hub stops, or when it is unused for a while, so a new one is requested
before each connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from duly.cli.common import CommandFailed, Exit, HubClient, HubUnreachable, find_hub
from duly.errors import NotAuthenticated


def roles(hub: HubClient) -> dict[str, str]:
    """Return the role of every account, by name."""
    return {one["name"]: one["role"] for one in hub.ask("/v1/admin/list", {})["accounts"]}


def check_account(hub: HubClient, name: str, role: str) -> None:
    """Fail if there is no such account; otherwise a client would wait for a connection in vain."""
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
    """Return a function that finds the hub of this data folder and gets a temporary token of `name` from
    it."""
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
