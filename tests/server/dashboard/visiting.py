"""A visitor of the dashboard for tests: what a browser does, without one."""

from __future__ import annotations

import os
import time
import uuid
from types import TracebackType
from typing import Any, Self

import aiohttp

from duly.server.dashboard.visitors import DashboardRole
from tests.local_hub import LocalHub


def mint() -> str:
    """A UUID of version 7, as the page mints it."""
    raw = bytearray(int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10))
    raw[6] = raw[6] & 0x0F | 0x70
    raw[8] = raw[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(raw)))


class PageVisitor:
    """Someone with a session of a role."""

    def __init__(self, local: LocalHub, role: str = "admin", name: str = "ann") -> None:
        self._local = local
        self._role = role
        self._name = name
        self.csrf = ""

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(self._local.url, cookie_jar=aiohttp.CookieJar(unsafe=True))
        await self.log_in()
        return self

    async def log_in(self) -> None:
        access = self._local.hub.dashboard.access
        link = await access.make_link(self._name, DashboardRole.named(self._role))
        status, said = await self.ask("POST", "/page/login", json={"link": link})
        assert status == 200, said
        self.csrf = (await self.get("/page/session"))["csrf"]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        async with self.http.request(method, path, **options) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str, **query: str) -> Any:
        """What a view shows; it must be allowed."""
        status, said = await self.ask("GET", path, params=query)
        assert status == 200, said
        return said

    async def act(self, action: str, **wanted: str) -> tuple[int, Any]:
        """Do something, as the page does it."""
        return await self.ask("POST", f"/page/do/{action}", json=wanted, headers={"X-CSRF-Token": self.csrf})
