"""The dashboard of one hub: its routes, their permissions, and the audit record of actions.

The laws. Every view and every action names the role it needs. A view is the same as JSON (`/messages.json`)
and live (`/page/live`). Every action is recorded in the audit chain with the visitor who asked for it, also
when it is refused; it is refused without the CSRF token of the session. Views need a session as well: only
the shell, its files, the login and the link of a notification are public.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from aiohttp import web
from msgspec import Struct

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import MINUTE, MS, SECOND
from duly.errors import DulyError, Malformed, NotAllowed, NotAuthenticated, RateLimited
from duly.identity.login_guard import LoginGuard
from duly.server.audit_chain import AuditChain
from duly.server.dashboard.access import DashboardAccess, csrf_token
from duly.server.dashboard.ack_page import AckPage
from duly.server.dashboard.alert_views import AlertViews
from duly.server.dashboard.commands import PageCommands
from duly.server.dashboard.device_views import DeviceViews
from duly.server.dashboard.live_updates import TICK_SECONDS, LiveUpdates
from duly.server.dashboard.message_views import MessageViews
from duly.server.dashboard.overview import OverviewViews
from duly.server.dashboard.query_time import QueryTime
from duly.server.dashboard.requests import (
    answer,
    authenticated,
    body_of,
    check_written_here,
    cookie_name,
    session_token,
    text_of,
    with_heads,
)
from duly.server.dashboard.static_files import StaticFiles
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from duly.storage.secret_box import SecretBox
from duly.transports.connections import address_of
from duly.transports.http import messages as http
from duly.transports.http.query_options import number

if TYPE_CHECKING:
    from duly.server.hub import Hub

VIEWER, OPERATOR, ADMIN = DashboardRole.VIEWER, DashboardRole.OPERATOR, DashboardRole.ADMIN
PAGES: Final = (
    "/", "/login", "/messages", "/message", "/devices", "/device", "/alerts", "/alert", "/chat", "/api",
    "/audit",
)  # fmt: skip
"""The addresses of the page; the shell decides by itself what to show."""

ACTIONS: Final = Rate(120, MINUTE)
"""How often a visitor may act; no person does so more often."""

PageView: TypeAlias = Callable[[DashboardVisitor, Mapping[str, str]], Awaitable[object]]
PageAction: TypeAlias = Callable[[DashboardVisitor, dict[str, str]], Awaitable[object]]


class NamedView(NamedTuple):
    """A view and the role that it needs."""

    role: DashboardRole
    make: PageView


class NamedAction(NamedTuple):
    """An action, the role that it needs, and the fields that name what it is done to."""

    role: DashboardRole
    carry_out: PageAction
    target: tuple[str, ...]


class LoginRequest(Struct, frozen=True):
    """The body of a login: the token of a link, or a name and a password."""

    link: str = ""
    name: str = ""
    password: str = ""


class Dashboard:
    """Serves the page of one hub."""

    def __init__(self, hub: Hub, box: SecretBox, guard: LoginGuard) -> None:
        self._hub = hub
        self.access = DashboardAccess(hub.ledger, box, guard)
        self.audit = AuditChain(hub.ledger)
        self.query_time = QueryTime()
        self._acts = RateLimits(ACTIONS)
        self.live = LiveUpdates(self.view, self._holds, hub.failed, self.query_time)
        self._files = StaticFiles()
        commands = PageCommands(hub)
        devices, messages = DeviceViews(hub, commands), MessageViews(hub, commands)
        overview, alerts = OverviewViews(hub, devices), AlertViews(hub)
        self.views = {
            "overview": NamedView(VIEWER, overview.overview),
            "chart": NamedView(VIEWER, overview.chart),
            "messages": NamedView(VIEWER, messages.page),
            "message": NamedView(VIEWER, messages.one),
            "devices": NamedView(VIEWER, devices.page),
            "device": NamedView(VIEWER, devices.one),
            "alerts": NamedView(VIEWER, alerts.page),
            "alert": NamedView(VIEWER, alerts.one),
            "alerts-status": NamedView(VIEWER, alerts.status),
            "alerts-deliveries": NamedView(VIEWER, alerts.deliveries),
            "audit": NamedView(ADMIN, self._audit_page),
            "sessions": NamedView(ADMIN, self._sessions),
        }
        self.actions = {
            "message.resend": NamedAction(OPERATOR, messages.resend, ("scope", "id")),
            "message.cancel": NamedAction(OPERATOR, messages.cancel, ("scope", "id")),
            "message.settle": NamedAction(OPERATOR, messages.settle, ("scope", "id", "as")),
            "command.send": NamedAction(OPERATOR, devices.send, ("device", "type", "id")),
            "channel.test": NamedAction(OPERATOR, alerts.try_channel, ("recipient",)),
            "session.end": NamedAction(ADMIN, self._end_session, ("session",)),
        } | {
            verb: NamedAction(OPERATOR, _on_alerts(alerts, verb), target)
            for verb, target in (
                ("alert.ack", ("sentinel", "event")),
                ("alert.resolve", ("sentinel", "event")),
                ("alert.silence", ("sentinel", "device", "reason", "profile")),
                ("alert.unsilence", ("silence",)),
                ("deliveries.retry", ("sentinel", "event", "recipient")),
                ("deliveries.edit", ("sentinel", "event", "recipient")),
            )
        }

    def start(self) -> None:
        """Begin to send live updates."""
        self._hub.tasks.every("live updates of the dashboard", TICK_SECONDS, self.live.tick)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the page."""
        shell = [web.get(path, self._files.shell) for path in PAGES]
        views = [web.get(f"/{name}.json", self._serve_view(name)) for name in self.views]
        return [
            *shell,
            *views,
            *AckPage(self._hub, self.audit).routes(),
            web.get("/static/{path:.+}", self._files.serve),
            web.get("/page/session", self._guarded(self._session)),
            web.post("/page/login", self._guarded(self._log_in)),
            web.post("/page/logout", self._guarded(self._log_out)),
            web.post("/page/do/{action}", self._guarded(self._act)),
            web.get("/page/live", self._live),
        ]

    # ── views ────────────────────────────────────────────────────────────────────────────────────

    async def view(self, visitor: DashboardVisitor, name: str, query: Mapping[str, str]) -> object:
        """Build a view for a visitor; raises an error if the request is invalid."""
        named = self.views.get(name)
        if named is None:
            raise Malformed(f"there is no view {name[:40]!r}")
        visitor.need(named.role)
        return await named.make(visitor, query)

    def _serve_view(self, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            visitor = await authenticated(self._hub, self.access, request)
            return answer(await self.query_time.spent(visitor.name, self.view(visitor, name, request.query)))

        return self._guarded(serve)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        try:
            visitor = await authenticated(self._hub, self.access, request)
            if request.headers.get("Upgrade", "").lower() != "websocket":
                raise Malformed("live updates come over a WebSocket")
        except DulyError as problem:
            return _refused(problem)
        return await self.live.serve(request, visitor)

    async def _holds(self, visitor: DashboardVisitor) -> bool:
        """Return whether a visitor's session has not ended, or the account of a token is still the same."""
        if visitor.session:
            return await self.access.session(visitor.session) is not None
        try:
            if visitor.account is not None:
                await self._hub.accounts.confirm(visitor.account)
        except NotAuthenticated:
            return False
        return True

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def _session(self, request: web.Request) -> web.Response:
        """Answer who is logged in, with the CSRF token of the session."""
        visitor = await authenticated(self._hub, self.access, request)
        token = csrf_token(session_token(request)) if visitor.session else ""
        return answer(
            {
                "name": visitor.name,
                "role": visitor.role.word,
                "expires": visitor.expires // MS,
                "csrf": token,
                "hub": self._hub.ledger.worker,
            }
        )

    async def _log_in(self, request: web.Request) -> web.Response:
        wanted = await body_of(request, LoginRequest, guest=True)
        address = address_of(request)
        if wanted.link:
            opened = await self.access.follow_link(wanted.link, address)
        else:
            opened = await self.access.log_in(wanted.name, wanted.password, address)
        visitor = opened.visitor
        how = "by link" if wanted.link else "by password"
        await self.audit.add(visitor.name, visitor.role.word, "session.begin", "", f"{how} from {address}")
        response = answer({"name": visitor.name, "role": visitor.role.word})
        response.set_cookie(
            cookie_name(request), opened.token, httponly=True, samesite="Strict", path="/",
            secure=bool(self._hub.settings.tls_cert) or request.secure,
            max_age=14 * 86_400,
        )  # fmt: skip
        return response

    async def _log_out(self, request: web.Request) -> web.Response:
        visitor = await authenticated(self._hub, self.access, request)
        await self._check_written_here(request, visitor, "session.end")
        ended = bool(visitor.session) and await self.access.end_session(visitor.session)
        if ended:
            await self.audit.add(visitor.name, visitor.role.word, "session.end", "its own")
        response = answer({"ended": int(ended)})
        response.del_cookie(cookie_name(request), path="/")
        return response

    async def _sessions(self, visitor: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        shown = [
            {
                "session": key[:16],
                "name": one.name,
                "role": one.role.word,
                "how": one.how,
                "created": one.created // MS,
                "expires": one.expires // MS,
                "mine": key == visitor.session,
            }
            for key, one in await self.access.sessions()
        ]
        return {"sessions": shown, "users": await self.access.users(), "pages": self.live.pages}

    async def _end_session(self, visitor: DashboardVisitor, wanted: dict[str, str]) -> dict[str, object]:
        lead = text_of(wanted, "session")
        found = [key for key, _ in await self.access.sessions() if len(lead) >= 16 and key.startswith(lead)]
        ended = [await self.access.end_session(key) for key in found]
        if not any(ended):
            raise Malformed("there is no such session (any more)")
        return {"ended": sum(ended)}

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    async def _act(self, request: web.Request) -> web.Response:
        visitor = await authenticated(self._hub, self.access, request)
        name = request.match_info["action"]
        self._check_pace(visitor)
        action = self.actions.get(name)
        await self._check_written_here(request, visitor, name if action is not None else "unknown")
        if action is None:
            raise Malformed(f"there is no action {name[:40]!r}")
        wanted = await body_of(request, dict[str, str])
        target = " ".join(text for field in action.target if (text := text_of(wanted, field, 2_000)))
        why = text_of(wanted, "why", 2_000) or text_of(wanted, "note", 2_000)
        try:
            visitor.need(action.role)
            done = await action.carry_out(visitor, wanted)
        except DulyError as problem:
            await self.audit.add(visitor.name, visitor.role.word, name, target, why, f"refused: {problem}")
            raise
        await self.audit.add(visitor.name, visitor.role.word, name, target, why, _result_of(done))
        return answer(done)

    def _check_pace(self, visitor: DashboardVisitor) -> None:
        """Refuse a visitor who acts too often: each action is recorded for ever, also one that is refused."""
        wait = self._acts.take(visitor.name, round(monotonic() * SECOND))
        if wait:
            raise RateLimited(
                f"{visitor.name} acts more than {ACTIONS.amount} times a minute; try again later", wait
            )

    async def _check_written_here(self, request: web.Request, visitor: DashboardVisitor, action: str) -> None:
        """Refuse and record a request that another site's page sends with a session's cookie."""
        try:
            check_written_here(request, visitor)
        except NotAllowed as problem:
            source = request.headers.get("Origin", "no origin")[:200]
            detail = f"from {source}, {address_of(request)}"
            await self.audit.add(visitor.name, visitor.role.word, action, "", detail, f"refused: {problem}")
            raise

    async def _audit_page(self, _: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        limit, before = number(query.get("limit"), 50, 500), text_of(query, "before", 20)
        if before and not before.isdecimal():
            raise Malformed("before is the number of an entry")
        entries, following = await self.audit.newest(limit, int(before or 0))
        return {"entries": entries, "next": None if following is None else str(following)}

    # ── errors ───────────────────────────────────────────────────────────────────────────────────

    def _guarded(
        self, inner: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            try:
                return await inner(request)
            except DulyError as problem:
                return _refused(problem)

        return serve


def _on_alerts(alerts: AlertViews, verb: str) -> PageAction:
    async def act(visitor: DashboardVisitor, wanted: dict[str, str]) -> object:
        return await alerts.act(verb, visitor, wanted)

    return act


def _result_of(done: object) -> str:
    """Return the audit result of an action that raised no error: a command may have been refused."""
    said = done.get("server_ack") if isinstance(done, dict) else None
    if not isinstance(said, dict) or not said.get("error"):
        return "done"
    return f"refused: {said.get('detail') or said['error']}"


def _refused(problem: DulyError) -> web.Response:
    if problem.word == "not_found":
        return with_heads(http.error(404, problem.word, str(problem)))
    return with_heads(http.problem(problem))
