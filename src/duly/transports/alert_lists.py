"""HTTP for whoever looks at alerts: `GET /v1/alerts`, by page, and one of them.

The law: a sentinel sees its own alerts, an admin all of them, anybody else none. Addresses are never shown.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from aiohttp import web

from duly.auth import Principal, Role
from duly.core.messages import key_of
from duly.errors import Malformed, NotAllowed
from duly.ledger import NEWEST
from duly.transports import http

MOST: Final = 1_000


class Server(http.Server, Protocol):
    """What the lists need of their hub."""

    async def list_alerts(
        self, *, standing: str, sentinel: str, limit: int, before: tuple[int, bytes]
    ) -> tuple[list[dict[str, Any]], tuple[int, bytes] | None]:
        """A page of alerts, newest first, and where the next one begins."""
        ...

    async def show_alert(self, key: bytes) -> dict[str, Any] | None: ...


def routes(server: Server) -> list[web.RouteDef]:
    lists = _Lists(server)
    guarded = http.Http(server).guarded
    return [
        web.get("/v1/alerts", guarded(lists.page)),
        web.get("/v1/alerts/{sentinel}/{event}", guarded(lists.one)),
    ]


class _Lists:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def page(self, request: web.Request, who: Principal) -> web.Response:
        query = request.query
        limit, before = http.number(query.get("limit"), 100, MOST), query.get("before")
        alerts, following = await self._server.list_alerts(
            standing=query.get("status", ""),
            sentinel=query.get("sentinel", "") if _sees_all(who) else who.name,
            limit=limit,
            before=_place(before) if before else NEWEST,
        )
        begins = f"{following[0]}-{following[1].hex()}" if following else None
        return http.as_json({"alerts": alerts, "next": begins})

    async def one(self, request: web.Request, who: Principal) -> web.Response:
        sentinel, event = request.match_info["sentinel"], request.match_info["event"]
        found = None
        if _sees_all(who) or who.name == sentinel:
            found = await self._server.show_alert(key_of(sentinel, event))
        if found is None:
            detail = f"nothing is known of {sentinel}/{event} (any more), or it is not yours"
            return http.error(404, "not_found", detail)
        return http.as_json(found)


def _sees_all(who: Principal) -> bool:
    if who.role not in (Role.SENTINEL, Role.ADMIN):
        raise NotAllowed(f"{who.name} is a {who.role.value}; only sentinels and admins see alerts")
    return who.role is Role.ADMIN


def _place(text: str) -> tuple[int, bytes]:
    at, _, key = text.partition("-")
    try:
        if not at.isdecimal() or len(at) > 18:
            raise ValueError
        return int(at), bytes.fromhex(key)
    except ValueError:
        raise Malformed(f"before is the 'next' of the page before, not {text[:80]!r}") from None
