"""Live updates: sends a page its views again when they change, over one WebSocket per page.

A page names the views that it shows. Each view is rebuilt at most twice a second, once for all pages that
show the same, and sent to pages whose copy differs. A view that takes long is rebuilt less often: all views
together use at most a thirtieth of the hub's time. Without an open page nothing is done. Every few seconds
the sessions of all pages are checked: a page whose session has ended is closed. One visitor may have a
quarter of all pages; one that asks for too much (`query_time`) is answered later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Final, TypeAlias

import msgspec
from aiohttp import WSMsgType, web
from msgspec import Struct

from duly.errors import DulyError
from duly.server.dashboard.query_time import LONGEST, QueryTime
from duly.server.dashboard.visitors import DashboardVisitor
from duly.transports.connections import turn_away
from duly.wire.outgoing import BUG

TICK_SECONDS: Final = 0.5
CHECK_SECONDS: Final = 5.0
"""How often the session of an open page is checked."""
SHARE: Final = 30.0
"""All views together use one part in this many of the hub's time: each is rebuilt no sooner than after this
many times the time it took, times the number of views."""
PACE: Final = {"chart": 2.0}
"""The longest time in seconds between two builds of a view."""
VIEWS_MOST: Final = 8
"""The most views that one page shows at the same time."""
PAGES_MOST: Final = 200
PAGES_EACH: Final = PAGES_MOST // 4
"""The most pages of one visitor."""
WAITING_BYTES: Final = 256 * 1024
"""A page with this many unread bytes is sent nothing more until it has read them."""
SEND_SECONDS: Final = 2.0
MESSAGE_BYTES: Final = 16 * 1024
GONE: Final = 4401
"""The close code for a page whose session has ended."""

MakeView: TypeAlias = Callable[[DashboardVisitor, str, Mapping[str, str]], Awaitable[object]]
CheckSession: TypeAlias = Callable[[DashboardVisitor], Awaitable[bool]]


class ViewRequest(Struct, frozen=True):
    """A page's request: an id of its own, a view, and the view's options."""

    id: int
    view: str = ""
    """empty: the page no longer shows what it asked for under this id"""
    query: dict[str, str] = {}


class _ShownView(Struct):
    """A view that a page shows."""

    key: tuple[str, int, str, tuple[tuple[str, str], ...]]
    query: dict[str, str]
    sent: bytes = b""


class LivePage:
    """One page that is open."""

    def __init__(
        self, socket: web.WebSocketResponse, request: web.Request, visitor: DashboardVisitor
    ) -> None:
        self.socket = socket
        self.visitor = visitor
        self.checked = monotonic()
        self.shown: dict[int, _ShownView] = {}
        self._transport = request.transport

    def ask(self, wanted: ViewRequest) -> None:
        """Show a view from now on, or no longer."""
        if not wanted.view:
            self.shown.pop(wanted.id, None)
        elif wanted.id in self.shown or len(self.shown) < VIEWS_MOST:
            query = tuple(sorted(wanted.query.items()))
            key = (self.visitor.name, int(self.visitor.role), wanted.view, query)
            self.shown[wanted.id] = _ShownView(key, wanted.query)

    @property
    def behind(self) -> bool:
        """Whether the page has not read what it was sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > WAITING_BYTES


class LiveUpdates:
    """The open pages of one hub. `make` builds a view, `check` returns whether a session is still valid;
    `failed` logs and counts a bug."""

    def __init__(
        self,
        make: MakeView,
        check: CheckSession,
        failed: Callable[[str, BaseException], None],
        query_time: QueryTime,
    ) -> None:
        self._make = make
        self._failed = failed
        self._check = check
        self._query_time = query_time
        self._pages: set[LivePage] = set()
        self._due: dict[tuple[str, int, str, tuple[tuple[str, str], ...]], float] = {}

    @property
    def pages(self) -> int:
        """How many pages are open."""
        return len(self._pages)

    async def serve(self, request: web.Request, visitor: DashboardVisitor) -> web.StreamResponse:
        """Serve one page until it is closed."""
        if (refusal := turn_away(request)) is not None:
            return refusal
        socket = web.WebSocketResponse(heartbeat=20.0, max_msg_size=MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        mine = sum(page.visitor.name == visitor.name for page in self._pages)
        if len(self._pages) >= PAGES_MOST or mine >= PAGES_EACH:
            await socket.close(code=1013, message=b"too many pages are open; close some")
            return socket
        page = LivePage(socket, request, visitor)
        self._pages.add(page)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                try:
                    wanted = msgspec.json.decode(message.data, type=ViewRequest)
                except (msgspec.DecodeError, ValueError, RecursionError):
                    await socket.close(code=1007, message=b"this is not a request for a view")
                    break
                page.ask(wanted)
                if wanted.view:
                    await self._show(page, {})
        finally:
            self._pages.discard(page)
        return socket

    async def tick(self) -> None:
        """Send every page what has changed since the last time."""
        if not self._pages:
            self._due.clear()
            return
        keys = {shown.key for page in self._pages for shown in page.shown.values()}
        self._due = {key: due for key, due in self._due.items() if key in keys}
        made: dict[object, asyncio.Future[bytes]] = {}
        # Concurrently: a view that waits for the ledger does not delay one that does not need it.
        await asyncio.gather(*(self._update(page, made) for page in list(self._pages)))

    async def _update(self, page: LivePage, made: dict[object, asyncio.Future[bytes]]) -> None:
        if monotonic() - page.checked <= CHECK_SECONDS or await self._holds(page):
            await self._show(page, made)

    async def _holds(self, page: LivePage) -> bool:
        page.checked = monotonic()
        try:
            if await self._check(page.visitor):
                return True
        except DulyError:
            return True  # the ledger does not answer just now: the next check decides
        self._pages.discard(page)
        await page.socket.close(code=GONE, message=b"the session has ended")
        return False

    async def _show(self, page: LivePage, made: dict[object, asyncio.Future[bytes]]) -> None:
        await asyncio.gather(*(self._show_one(page, id_, shown, made) for id_, shown in page.shown.items()))

    async def _show_one(
        self, page: LivePage, id_: int, shown: _ShownView, made: dict[object, asyncio.Future[bytes]]
    ) -> None:
        if page.behind or page.socket.closed:
            return
        others = made.get(shown.key)
        if others is not None:
            body = await others
        elif shown.sent and monotonic() < self._due.get(shown.key, 0.0):
            return
        elif not shown.sent and self._query_time.wait(page.visitor.name):
            return  # this visitor asks for too much: it is answered with a later tick
        else:
            mine = made[shown.key] = asyncio.get_running_loop().create_future()
            try:
                body = await self._made(page.visitor, shown)
            except BaseException:
                mine.cancel()
                raise
            mine.set_result(body)
        if body != shown.sent and page.shown.get(id_) is shown:
            shown.sent = body
            await self._send(page, msgspec.json.encode({"id": id_, "is": msgspec.Raw(body)}))

    async def _made(self, visitor: DashboardVisitor, shown: _ShownView) -> bytes:
        began = monotonic()
        try:
            value = await self._make(visitor, shown.key[2], shown.query)
        except DulyError as problem:
            value = {"problem": str(problem), "error": problem.word}
        except Exception as problem:  # a bug in one view must not stop the others
            self._failed("view of the dashboard", problem)
            value = {"problem": BUG, "error": "internal"}
        body = msgspec.json.encode(value)
        took = min(monotonic() - began, LONGEST)
        if not shown.sent:
            self._query_time.spend(visitor.name, took)
        pause = max(TICK_SECONDS / 2, PACE.get(shown.key[2], 0.0), SHARE * took * (len(self._due) or 1))
        self._due[shown.key] = monotonic() + pause
        return body

    async def _send(self, page: LivePage, body: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await page.socket.send_str(body.decode())
        except (TimeoutError, ConnectionError, RuntimeError):
            self._pages.discard(page)

    async def close(self, _: object = None) -> None:
        """Close all pages: the hub stops."""
        for page in list(self._pages):
            await page.socket.close(code=1012, message=b"the hub stops")
        self._pages.clear()
