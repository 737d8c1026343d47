"""Shows alerts over HTTP: `GET /v1/alerts`, by page, and one of them. Reports of alerts are frames, which
`messages` takes.

The law: a sentinel sees its own alerts, an admin all of them, any other account none. Addresses are never
shown.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from aiohttp import web

from duly.core.messages import key_of
from duly.core.units import MS
from duly.errors import NotAllowed
from duly.identity.accounts import Principal, Role
from duly.storage.ledger import NEWEST
from duly.transports.http import messages as http
from duly.transports.http.query_options import number

MOST: Final = 1_000


class AlertsBackend(http.MessagesBackend, Protocol):
    """What the lists need of their hub."""

    async def list_alerts(
        self, *, standing: str, sentinel: str, limit: int, before: tuple[int, bytes], since: int
    ) -> tuple[list[dict[str, object]], tuple[int, bytes] | None]:
        """Return a page of alerts accepted since then, newest first, and where the next one begins."""
        ...

    async def show_alert(self, key: bytes) -> dict[str, Any] | None:
        """Return one alert as JSON values; None if the ledger has none with this key."""
        ...


def routes(server: AlertsBackend) -> list[web.RouteDef]:
    """Return the routes for lists of alerts and for single alerts."""
    lists = _Lists(server)
    guarded = http.MessagesEndpoint(server).guarded
    return [
        web.get("/v1/alerts", guarded(lists.page)),
        web.get("/v1/alerts/{sentinel}/{event}", guarded(lists.one)),
    ]


class _Lists:
    def __init__(self, server: AlertsBackend) -> None:
        self._server = server

    async def page(self, request: web.Request, who: Principal) -> web.Response:
        """Answer with a page of alerts, newest first, and a cursor to the next page."""
        query = request.query
        limit, before = number(query.get("limit"), 100, MOST), query.get("before")
        cursors, since = self._server.cursors, self._server.sees_from(who)
        reader = f"alerts/{who.name}/{since}"
        alerts, following = await self._server.list_alerts(
            standing=query.get("status", ""),
            sentinel=query.get("sentinel", "") if _sees_all(who) else who.name,
            limit=limit,
            before=_place(cursors.decrypt(reader, before)) if before else NEWEST,
            since=since,
        )
        begins = (
            cursors.encrypt(reader, following[0].to_bytes(8, "big") + following[1]) if following else None
        )
        return http.as_json({"alerts": alerts, "next": begins})

    async def one(self, request: web.Request, who: Principal) -> web.Response:
        """Answer with one alert, or 404 if it does not exist or belongs to another account."""
        sentinel, event = request.match_info["sentinel"], request.match_info["event"]
        found = None
        if _sees_all(who) or who.name == sentinel:
            found = await self._server.show_alert(key_of(sentinel, event))
        if found is None or found["accepted_at"] < self._server.sees_from(who) // MS:
            detail = f"nothing is known of {sentinel}/{event} (any more), or it is not yours"
            return http.error(404, "not_found", detail)
        return http.as_json(found)


def _sees_all(who: Principal) -> bool:
    if who.role not in (Role.SENTINEL, Role.ADMIN):
        raise NotAllowed(f"{who.name} is {who.role.with_article}; only sentinels and admins see alerts")
    return who.role is Role.ADMIN


def _place(opened: bytes) -> tuple[int, bytes]:
    return int.from_bytes(opened[:8], "big"), opened[8:]
