"""The server: ledger, accounts, gateway and listeners, put together, started and stopped in order.

The law: it is ready when everything serves, and says so; it stops by taking in nothing more, finishing what
was taken in, and leaving the rest in the ledger. While it runs, a notice in its data folder says where.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import secrets
import socket
import ssl
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from duly.apps.alerts import operations, retention
from duly.apps.alerts import verbs as alert_verbs
from duly.apps.alerts.archive import Archive
from duly.apps.alerts.heartbeats import LOOK_SECONDS as HEARTBEAT_SECONDS
from duly.apps.alerts.heartbeats import presence
from duly.apps.alerts.service import AlertService
from duly.apps.chat import receipts
from duly.apps.chat.service import ChatPolicy, ChatService
from duly.apps.gateway.control import ControlPolicy
from duly.apps.gateway.policy import GatewayPolicy
from duly.apps.gateway.remote_hubs import LOOK_SECONDS
from duly.apps.gateway.service import GatewayService
from duly.core.backlog import BacklogPolicy
from duly.core.fanout.plan import FanoutPolicy
from duly.core.horizon import Horizon
from duly.core.units import DAY, seconds
from duly.errors import (
    DulyError,
    LedgerError,
    Malformed,
    NotAllowed,
)
from duly.identity.accounts import Accounts, Principal, Role, administer
from duly.identity.authenticator import Authenticator
from duly.identity.login_guard import LoginGuard
from duly.identity.people import People
from duly.runtime.audit import AuditLog
from duly.runtime.tasks import Supervisor
from duly.server import checkup, data_folder, runfile
from duly.server.floor_watch import FloorWatch
from duly.server.router import Router
from duly.server.runfile import RunFile
from duly.settings import LOOPBACK, Settings
from duly.storage import open_ledger
from duly.storage.ledger import Ledger, Record
from duly.transports import connections as visitors
from duly.transports import websocket
from duly.transports.http import alerts as alert_lists
from duly.transports.http import bodies, logins, page_cursors, static
from duly.transports.http import messages as http
from duly.transports.http.fast_path import FastPath
from duly.transports.http.gate import RequestGate
from duly.wire.session import Session

if TYPE_CHECKING:
    from duly.cluster.notifier import Notifier
    from duly.server.mqtt_service import MqttService

ENGINE_TRIES: Final = 5
"""How often in a row an engine may die of a bug; then the process ends, and is started again from outside."""
PRUNE_SECONDS: Final = 30.0
REFRESH_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 75.0
"""How long a connection may take for its first request, and between requests."""
REVOKED_SECONDS: Final = 1.0
"""How long a connection may outlive its account at another hub where no ring is heard."""
ACCOUNTS: Final = "accounts"
"""What is rung when accounts, grants or logins have changed."""


SWITCH_SECONDS: Final = 0.001
"""How long the loop may keep a ledger's thread waiting for the interpreter. With Python's own 5 ms, a flush
of a dozen statements waits most of its time for its turn: p99 of a chat line 30 ms instead of 20."""


COLLECT_AFTER: Final = (10_000, 5, 5)
"""How many new objects are looked through for cycles, and how seldom the older ones. Messages have none; with
Python's own 700 a hub spends a twentieth of its time looking."""


def tune() -> None:
    """Set this process up for being a hub, and nothing else."""
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what is loaded by now stays
    gc.set_threshold(*COLLECT_AFTER)


class Hub:
    """One hub."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._data = Path(settings.data)
        self._token = f"duly_{secrets.token_urlsafe(32)}"
        self.tasks = Supervisor()
        self._closing = contextlib.AsyncExitStack()
        self.url = ""
        self.mqtt_url = ""
        self.mqtt: MqttService | None = None
        self._unforgotten: str | None = None
        """why what is due to be forgotten could not be, when it was last tried"""
        self._others: frozenset[str] = frozenset()
        """the hubs on this ledger that lived when we last looked"""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open everything, in order; what fails closes what was open."""
        try:
            await self._start()
        except BaseException:
            await self._closing.aclose()
            raise

    async def _start(self) -> None:
        settings, closing = self.settings, self._closing
        tls = _server_tls(settings)
        data_folder.prepare(self._data)
        self.ledger: Ledger = await open_ledger(settings.ledger_url)
        closing.push_async_callback(self.ledger.close)
        self._try_port()  # before anything is started that takes time, or a port of its own
        closing.push_async_callback(self.tasks.stop)
        box = await data_folder.unlock(self.ledger, settings)
        self._floor = FloorWatch(self.ledger)
        await self._floor.look()
        self.accounts = Accounts(self.ledger, box)
        await self.accounts.refresh()
        journal = self.journal = AuditLog(self.ledger)
        policy = gateway_policy(settings)
        self._bell = await self._hang_bell()
        self.gateway = GatewayService(self.ledger, self.accounts, journal, policy, self._bell)
        self.chat = ChatService(
            self.ledger, self.accounts, journal, ChatPolicy(settings.friends_only), self._bell
        )
        guard = LoginGuard()
        self.people = People(
            self.ledger, self.accounts, guard, open_=settings.open_registration, ended=self._logged_out
        )
        closing.callback(self.people.close)
        self._authenticator = Authenticator(self.ledger, self.accounts, self.people, guard, self._token)
        self.login = self._authenticator.login
        self.cursors = await page_cursors.open_cursors(self.ledger, box)
        self.alerts = AlertService(
            self.ledger, journal, fanout_policy(settings), private=settings.allow_private_webhooks, box=box,
            known=self._may_report,
        )  # fmt: skip
        self.archive = archive_of(settings)
        self._applications = (self.gateway, self.chat, self.alerts)
        self._router = Router(journal, self._applications)
        for application in self._applications:
            await application.start()
            closing.push_async_callback(application.stop)
            self.tasks.spawn(f"{application.name} engine", application.engine.live, tries=ENGINE_TRIES)
        for name, raw in settings.profiles.items():
            await self.alerts.profiles.set(name, alert_verbs.draft_of(raw))
        if self.gateway.remote is not None:
            self.tasks.every("gateway's look at other hubs", LOOK_SECONDS, self.gateway.remote.look)
        if self.chat.remote is not None:
            self.tasks.every("chat's look at other hubs", LOOK_SECONDS, self.chat.remote.look)
        self.tasks.every("look at sentinels' heartbeats", HEARTBEAT_SECONDS, self.alerts.heartbeats.look)
        if not settings.no_mqtt:
            # Not every hub has MQTT devices: what only they need is only then loaded.
            from duly.server.mqtt_service import MqttService

            self.mqtt = MqttService(settings, self.tasks, closing)
            await self.mqtt.start(self.ledger, box, self.accounts, self.gateway, journal)
            self.mqtt_url = self.mqtt.url
        await self._listen(tls)
        self.tasks.every("pruning", PRUNE_SECONDS, self._prune)
        self.tasks.every("refreshing accounts", REFRESH_SECONDS, self._refresh)
        if not self.ledger.sole:
            self.tasks.every("hanging up on the revoked", REVOKED_SECONDS, self._hang_up_on_revoked)
        closing.push_async_callback(self.tasks.stop_periodic)
        runfile.post(self._data, RunFile(self.url, self._token, os.getpid()))
        closing.callback(runfile.remove, self._data)

    async def _hang_bell(self) -> Notifier | None:
        """The notifier, where other hubs may be on the same ledger."""
        settings = self.settings
        if self.ledger.sole:
            return None
        from duly.cluster.notifiers import open_notifier

        bell = open_notifier(settings.notifier or "postgres", self.ledger.worker, settings.ledger_url)
        bell.tasks = self.tasks

        def changed(_: str) -> None:
            self.tasks.do("hanging up on the revoked", self._hang_up_on_revoked())

        bell.listen(ACCOUNTS, changed)
        await bell.start()
        self._closing.push_async_callback(bell.stop)
        return bell

    async def stop(self) -> None:
        await self._closing.aclose()

    async def run(self) -> None:
        """Until a part that is needed is given up: an engine that died of a bug again and again."""
        await self.tasks.ended()

    async def _listen(self, tls: ssl.SSLContext | None) -> None:
        settings = self.settings
        names = frozenset({settings.listen}) if settings.listen in LOOPBACK else None
        gate = RequestGate(settings.origins, names)
        app = web.Application(middlewares=[gate.middleware])
        app[bodies.BODIES] = bodies.Bodies()
        sockets = websocket.WebSockets(self)
        post = http.MessagesEndpoint(self)
        app.on_shutdown.append(sockets.close)
        app.add_routes(
            [
                web.get("/v1/ws", sockets.serve),
                *http.routes(post),
                *logins.routes(self),
                *alert_lists.routes(self),
                *static.routes(),
                web.post("/v1/admin/{verb}", self._admin),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, logger=http.LOG, shutdown_timeout=0.5, keepalive_timeout=IDLE_SECONDS,
            lingering_time=1.0, read_bufsize=16 * 1024,
        )  # fmt: skip
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        server = runner.server
        assert server is not None
        room = visitors.raise_descriptor_limit() - visitors.RESERVE
        self.visitors = visitors.ClientConnections(room, settings.connections_per_address, IDLE_SECONDS)
        express = FastPath(
            post.express, lambda visitor: visitors.Handler(server, visitor), self.visitors, gate.answers_to
        )
        self._closing.push_async_callback(express.close)
        try:
            listener = await asyncio.get_running_loop().create_server(
                express, settings.listen, settings.port, ssl=tls, backlog=1024,
                ssl_handshake_timeout=visitors.GUEST_SECONDS if tls else None,
            )  # fmt: skip
        except OSError as problem:
            raise self._cannot_listen(problem) from problem
        self._closing.callback(listener.close)
        port = listener.sockets[0].getsockname()[1]
        host = f"[{settings.listen}]" if ":" in settings.listen else settings.listen
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    def _try_port(self) -> None:
        listen = self.settings.listen
        family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        try:
            socket.create_server((listen, self.settings.port), family=family).close()
        except OSError as problem:
            raise self._cannot_listen(problem) from problem

    def _cannot_listen(self, problem: OSError) -> Malformed:
        listen, port = self.settings.listen, self.settings.port
        if problem.errno != errno.EADDRINUSE:
            return Malformed(f"cannot listen on {listen} port {port}: {problem.strerror}")
        return Malformed(
            f"port {port} on {listen} is taken; stop the other program, or use another port, "
            f"--port {port % 65_535 + 1} or --port 0 for any free one"
        )

    # ── chores ───────────────────────────────────────────────────────────────────────────────────

    async def _prune(self) -> None:
        try:
            await self._forget()
            await self._floor.look()
            self._unforgotten = None
        except (LedgerError, OSError) as problem:  # the next time will do
            self._unforgotten = str(problem)
        with contextlib.suppress(DulyError):
            await self.alerts.adopt(self._living())

    async def _forget(self) -> dict[str, Any]:
        kept = deliveries_kept(self.settings)
        return await retention.prune(self.ledger, self.alerts.operations, self.archive, kept)

    async def _refresh(self) -> None:
        with contextlib.suppress(LedgerError):
            await self.chat.remove_from_chat()
        if not self.ledger.sole:
            with contextlib.suppress(LedgerError):
                await self._hang_up(await self.accounts.refresh(), await self.people.refresh())
                await self.alerts.refresh()
            before, self._others = self._others, self._living()
            if before - self._others:  # somebody has died: what they were at must not wait for the next round
                with contextlib.suppress(DulyError):
                    await self.alerts.adopt(self._others)

    async def _hang_up_on_revoked(self) -> None:
        """Hang up on those whose account or login has ended at another hub, and cancel what is no longer
        allowed."""
        with contextlib.suppress(LedgerError):
            before = self.accounts.version
            await self._hang_up(await self.accounts.catch_up(), await self.people.catch_up())
            if self.accounts.version != before:
                await self.gateway.review()

    async def _hang_up(self, accounts: frozenset[str], logins_: frozenset[Principal] = frozenset()) -> None:
        for name in accounts:
            self._router.dismiss(name)
            if self.mqtt is not None:
                self.mqtt.dismiss(name)
        for who in logins_:
            self.chat.dismiss(who.name, who.device)

    def _logged_out(self, name: str, device: str) -> None:
        """Somebody's login has ended here, or all of them."""
        self.chat.dismiss(name, device)
        if self._bell is not None:
            self._bell.ring(ACCOUNTS)

    def _living(self) -> frozenset[str]:
        """The hubs on this ledger."""
        remote = self.gateway.remote
        return frozenset() if remote is None else remote.registry.living

    # ── who ──────────────────────────────────────────────────────────────────────────────────────

    def born(self, who: Principal) -> int:
        """When somebody's account was made: what is older was another's of that name. An admin sees all."""
        return 0 if who.role is Role.ADMIN else self.accounts.born(who.name)

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        try:
            await self._router.connected(session, who, cursors)
        except LedgerError as problem:
            session.close(f"come back soon: {problem}")

    def receive(self, session: Session, who: Principal, raw: bytes | str) -> bool | Awaitable[bool]:
        return self._router.receive(session, who, raw)

    async def receive_all(self, sessions: Sequence[Session], who: Principal, raws: Sequence[bytes]) -> None:
        await self._router.receive_all(sessions, who, raws)

    async def disconnected(self, session: Session, who: Principal) -> None:
        with contextlib.suppress(DulyError):
            await self._router.disconnected(session, who)

    def trail(self, key: bytes) -> list[Any]:
        return self.gateway.trail(key)

    async def list_devices(
        self, who: Principal, after: str, limit: int
    ) -> tuple[list[dict[str, Any]], str | None]:
        return await self.gateway.devices.page(who, after, limit)

    async def trace_line(self, record: Record, who: Principal) -> dict[str, Any] | None:
        return await receipts.trace(self.ledger, record, None if who.role is Role.ADMIN else who.name)

    async def list_alerts(
        self, *, standing: str, sentinel: str, limit: int, before: tuple[int, bytes], since: int
    ) -> tuple[list[dict[str, Any]], tuple[int, bytes] | None]:
        alerts, following = await self.alerts.operations.page(
            standing=standing, sentinel=sentinel, limit=limit, before=before, since=since
        )
        return [operations.show(alert) for alert in alerts], following

    async def show_alert(self, key: bytes) -> dict[str, Any] | None:
        alert = await self.alerts.operations.get(key)
        return None if alert is None else operations.show(alert)

    @property
    def down(self) -> str | None:
        try:
            self.ledger.check()
        except LedgerError as unfit:
            return str(unfit)
        remote = self.gateway.remote
        engines = (application.engine.down for application in self._applications)
        problem = self._floor.problem or next(filter(None, engines), None) or (remote and remote.trouble)
        return str(problem) if problem else None

    @property
    def problems(self) -> dict[str, str]:
        return self.tasks.problems

    def state(self) -> dict[str, Any]:
        remote = self.gateway.remote
        return {
            "url": self.url,
            "ledger": type(self.ledger).__name__,
            "down": self.down,
            "devices": self.gateway.presence(),
            "mqtt": None if self.mqtt is None else self.mqtt.state(),
            "alerts": self.alerts.state(),
            "unforgotten": self._unforgotten,
            "problems": self.problems,
            "failures": dict(self.tasks.failures),
            "floor": self._floor.state(),
            "hubs": [self.ledger.worker] if remote is None else sorted(remote.registry.living),
        }

    # ── the command line's door ──────────────────────────────────────────────────────────────────

    async def _may_report(self, name: str) -> bool:
        """Whether this account may report alerts; also one that another hub has made just now."""
        reporting = (Role.SENTINEL, Role.ADMIN)
        if self.accounts.role_of(name) not in reporting:
            await self.accounts.confirmed(name)
        return self.accounts.role_of(name) in reporting

    async def _admin(self, request: web.Request) -> web.Response:
        try:
            who = await http.entered(self, request)
            if who.role is not Role.ADMIN:
                raise NotAllowed("only an admin may do that")
            wanted = msgspec.json.decode(await bodies.read(request), type=dict[str, str])
            result = await self._administer(who, request.match_info["verb"], wanted)
        except DulyError as problem:
            return http.problem(problem)
        except (msgspec.DecodeError, KeyError, ValueError) as problem:
            return http.problem(Malformed(str(problem)))
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    async def _administer(self, who: Principal, verb: str, wanted: dict[str, str]) -> object:
        match verb:
            case "borrow":
                return {"token": await self._authenticator.temporary_token(wanted["name"])}
            case "login":
                name = wanted["name"]
                if await self.accounts.find_role(name) is not Role.USER:
                    raise NotAllowed(f"there is no user {name}; 'duly add user {name}' first")
                return {"token": await self.people.let_in(name, wanted.get("device", ""))}
            case "list":
                devices = [one.name for one in self.accounts.list() if one.role is Role.DEVICE]
                sentinels = {one.name for one in self.accounts.list() if one.role is Role.SENTINEL}
                seen = await presence(self.ledger, sentinels)
                there = self.alerts.online | set(seen["keeping"])
                result = await administer(self.accounts, verb, wanted)
                return result | {
                    "online": sorted({*self.gateway.presence(), *there}),
                    "heard": await self.gateway.devices.last_heard(devices) | seen["heard"],
                    "silent": seen["silent"],
                }
            case "floor":
                return await self._floor.administer(wanted)
            case "doctor":
                policy = control_policy(self.settings)
                return self.state() | await checkup.examine(self.settings, policy, self.ledger, self._bell)
            case "prune" if "dry" in wanted:
                kept = deliveries_kept(self.settings)
                return await retention.would_prune(self.ledger, self.archive, kept)
            case "prune":
                return await self._forget()
            case _ if "." in verb:
                return await alert_verbs.administer(
                    self.alerts.operations, self.alerts.profiles, verb, wanted, who.name
                )
            case _:
                result = await administer(self.accounts, verb, wanted)
                await self.gateway.review()
                if self._bell is not None:
                    self._bell.ring(ACCOUNTS)
                if verb == "remove":
                    await self.people.log_out_everywhere(wanted["name"])
                if verb in ("add", "remove"):
                    await self._hang_up(frozenset({wanted["name"]}))  # who came with a token that is void now
                    await self.chat.remove_from_chat()
                return result


def _server_tls(settings: Settings) -> ssl.SSLContext | None:
    if not settings.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as problem:
        files = f"{settings.tls_cert} with {settings.tls_key}"
        raise Malformed(f"the TLS certificate {files} cannot be used: {problem}") from None
    return context


def control_policy(settings: Settings) -> ControlPolicy:
    return ControlPolicy(
        window=seconds(settings.window),
        max_age=seconds(settings.max_age),
        remember=seconds(settings.remember),
        patience=seconds(settings.patience),
    )


def gateway_policy(settings: Settings) -> GatewayPolicy:
    return GatewayPolicy(
        control=control_policy(settings),
        backlog=BacklogPolicy(settings.max_queued, settings.max_queued_bytes),
        max_exp=seconds(settings.max_exp),
    )


def fanout_policy(settings: Settings) -> FanoutPolicy:
    return FanoutPolicy(
        operations.CHANNEL,
        horizon=Horizon(keep=round(settings.alerts_remembered * DAY), skew=3_660 * DAY),
        keep=round(settings.alerts_kept * DAY),
    )


def deliveries_kept(settings: Settings) -> int:
    return round(settings.deliveries_kept * DAY)


def archive_of(settings: Settings) -> Archive:
    return Archive(Path(settings.data) / "archive", round(settings.archives_kept * DAY))
