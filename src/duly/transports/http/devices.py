"""Lists devices over HTTP: `GET /v1/devices`, by page.

The law: a caller sees only the devices that it may see; the gateway decides which these are.
"""

from __future__ import annotations

from typing import Final, Protocol

from aiohttp import web

from duly.identity.accounts import Principal
from duly.transports.http import messages as http
from duly.transports.http.query_options import number

MOST: Final = 1_000


class DevicesBackend(http.MessagesBackend, Protocol):
    """The interface of the hub for the list of devices."""

    async def list_devices(
        self, who: Principal, after: str, limit: int
    ) -> tuple[list[dict[str, object]], str | None]:
        """Return the devices that a principal may see, by name, and the name after which the next page
        begins."""
        ...


def routes(server: DevicesBackend) -> list[web.RouteDef]:
    """Return the route of the list of devices."""

    async def page(request: web.Request, who: Principal) -> web.Response:
        """Answers with a page of the devices that the caller may see."""
        limit = number(request.query.get("limit"), 100, MOST)
        devices, following = await server.list_devices(who, request.query.get("after", ""), limit)
        return http.as_json({"devices": devices, "next": following})

    return [web.get("/v1/devices", http.MessagesEndpoint(server).guarded(page))]
