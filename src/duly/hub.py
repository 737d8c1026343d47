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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web
from msgspec.structs import replace

from duly import notice
from duly.apps import alert_verbs, desk, retention
from duly.apps.alerts import Alerts
from duly.apps.chat import Chat, ChatPolicy
from duly.apps.control import ControlPolicy
from duly.apps.gateway import Gateway, GatewayPolicy, last_heard
from duly.apps.heartbeats import LOOK_SECONDS as HEARTBEAT_SECONDS
from duly.apps.heartbeats import presence
from duly.apps.neighbours import LOOK_SECONDS
from duly.archive import Archive
from duly.auth import Accounts, LoginGuard, Principal, Role, administer
from duly.backoff import Backoff
from duly.core.horizon import Horizon
from duly.core.parcels import CourierPolicy
from duly.core.units import DAY, SECOND, seconds
from duly.engine import RECOVERY
from duly.errors import (
    DulyError,
    LedgerError,
    Malformed,
    NotAllowed,
    NotAuthenticated,
    ProgramError,
    TooManyLogins,
)
from duly.journal import Journal
from duly.ledger import Ledger
from duly.ledgers import open_ledger
from duly.notice import Notice
from duly.people import People
from duly.reception import Reception
from duly.settings import Settings
from duly.transport import Session
from duly.transports import alert_lists, http, logins, static, websocket
from duly.transports.express import Express

if TYPE_CHECKING:
    from duly.broker import Broker
    from duly.doorbell import Doorbell
    from duly.transports.mqtt import MqttLink

PRUNE_SECONDS: Final = 30.0
REFRESH_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 75.0
"""How long a connection may take for its first request, and between requests."""
ACCOUNTS: Final = "accounts"
"""What is rung when accounts or grants have changed."""
LOCAL: Final = "local"
"""The name of whoever may read the data folder."""


SWITCH_SECONDS: Final = 0.001
"""How long the loop may keep a ledger's thread waiting for the interpreter. With Python's own 5 ms, a flush
of a dozen statements waits most of its time for its turn: p99 of a chat line 30 ms instead of 20."""


COLLECT_AFTER: Final = (10_000, 5, 5)
"""How many new objects are looked through for cycles, and how seldom the older ones. Messages have none; with
Python's own 700 a hub spends a twentieth of its time looking."""


def tune() -> None:
    """Set this process up for being a hub, and nothing else."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what is loaded by now stays
    gc.set_threshold(*COLLECT_AFTER)


class Hub:
    """One hub."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._data = Path(settings.data)
        self._token = f"duly_{secrets.token_urlsafe(32)}"
        self._borrowed: dict[str, Principal] = {}
        self._guard = LoginGuard()
        self._timers: list[asyncio.TimerHandle] = []
        self._chores: set[asyncio.Task[None]] = set()
        self._closing = contextlib.AsyncExitStack()
        self.url = ""
        self.mqtt_url = ""
        self._broker: Broker | None = None
        self._link: MqttLink | None = None
        self._broker_password = ""
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
        self._data.mkdir(parents=True, exist_ok=True)
        self.ledger: Ledger = await open_ledger(settings.ledger_url)
        closing.push_async_callback(self.ledger.close)
        self._try_port()  # before anything is started that takes time, or a port of its own
        self.accounts = Accounts(self.ledger)
        await self.accounts.refresh()
        journal = self.journal = Journal(self.ledger)
        policy = GatewayPolicy(control=control_policy(settings))
        self._bell = await self._hang_bell()
        self.gateway = Gateway(self.ledger, self.accounts, journal, policy, self._bell)
        self.chat = Chat(self.ledger, self.accounts, journal, ChatPolicy(settings.friends_only), self._bell)
        self.people = People(self.ledger, self.accounts, self._guard, open_=settings.open_registration)
        closing.callback(self.people.close)
        self.alerts = Alerts(
            self.ledger, journal, courier_policy(settings), private=settings.allow_private_webhooks,
            known=lambda name: self.accounts.role_of(name) in (Role.SENTINEL, Role.ADMIN),
        )  # fmt: skip
        self.archive = archive_of(settings)
        self._applications = (self.gateway, self.chat, self.alerts)
        self._reception = Reception(journal, self._applications)
        for application in self._applications:
            await application.start()
            closing.push_async_callback(application.stop)
        for name, raw in settings.profiles.items():
            await self.alerts.profiles.set(name, alert_verbs.draft_of(raw))
        if self.gateway.neighbours is not None:
            self._every(LOOK_SECONDS, self.gateway.neighbours.look)
        if self.chat.elsewhere is not None:
            self._every(LOOK_SECONDS, self.chat.elsewhere.look)
        self._every(HEARTBEAT_SECONDS, self.alerts.heartbeats.look)
        await self._start_mqtt()
        await self._listen(tls)
        self._every(PRUNE_SECONDS, self._prune)
        self._every(REFRESH_SECONDS, self._refresh)
        closing.callback(self._stop_timers)
        notice.post(self._data, Notice(self.url, self._token, os.getpid()))
        closing.callback(notice.remove, self._data)

    async def _hang_bell(self) -> Doorbell | None:
        """The doorbell, where other hubs may be on the same ledger."""
        settings = self.settings
        if self.ledger.sole:
            return None
        from duly.doorbells import open_doorbell

        bell = open_doorbell(settings.doorbell or "postgres", self.ledger.worker, settings.ledger_url)
        bell.listen(ACCOUNTS, lambda _: self._do(self._refresh()))
        await bell.start()
        self._closing.push_async_callback(bell.stop)
        return bell

    async def stop(self) -> None:
        await self._closing.aclose()

    async def run(self) -> None:
        """Until an engine ends, which it does by itself only through a bug."""
        lives = [asyncio.ensure_future(application.engine.wait()) for application in self._applications]
        try:
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for life in lives:
                life.cancel()
        for life in lives:
            if life.done() and not life.cancelled():
                life.result()
        raise ProgramError("the engine has ended by itself")

    async def _listen(self, tls: ssl.SSLContext | None) -> None:
        settings = self.settings
        app = web.Application(client_max_size=http.BODY_LIMIT)
        sockets = websocket.WebSockets(self)
        post = http.Http(self)
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
            app, access_log=None, logger=http.LOG, shutdown_timeout=0.5, keepalive_timeout=IDLE_SECONDS
        )
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        assert runner.server is not None
        express = Express(post.express, runner.server, IDLE_SECONDS)
        self._closing.push_async_callback(express.close)
        try:
            listener = await asyncio.get_running_loop().create_server(
                express, settings.listen, settings.port, ssl=tls, backlog=1024
            )
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

    # ── MQTT: a broker of our own, or somebody else's ────────────────────────────────────────────

    async def _start_mqtt(self) -> None:
        settings, closing = self.settings, self._closing
        if settings.no_mqtt:
            return
        # Not everybody has MQTT devices: what only they need is only then loaded.
        from duly.broker import Broker
        from duly.mqtt_devices import HUB, MqttDevices
        from duly.transports.address import Address
        from duly.transports.mqtt import MqttLink

        devices = MqttDevices(self.gateway, self.accounts, self.journal)
        if self.gateway.neighbours is not None:
            self._every(LOOK_SECONDS, devices.look)
        if not settings.mqtt:
            self._broker = Broker(
                self._data,
                settings.mqtt_port,
                settings.listen,
                tls_cert=settings.tls_cert,
                tls_key=settings.tls_key,
                on_restart=lambda _: devices.broker_restarted(),
            )
            self._broker_password = secrets.token_urlsafe(32)
            await self.renew_broker_users()
            await self._broker.start()
            closing.push_async_callback(self._broker.stop)
            self.mqtt_url = self._broker.url
            # Its certificate names it as the world knows it, not as we do: that very one is what we expect.
            address = replace(
                Address.parse(self.mqtt_url),
                username=HUB,
                password=self._broker_password,
                client_id=HUB,
                cafile=settings.tls_cert,
                pinned=bool(settings.tls_cert),
            )
        else:
            address = Address.parse(settings.mqtt)
            self.mqtt_url = repr(replace(address, username=""))
        arrivals: asyncio.Queue[tuple[str, bytes, bool, Callable[[], None]]] = asyncio.Queue()

        def heard(topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
            # Of an outside broker's wills we know nothing; ours began with us, and so did every connection.
            arrivals.put_nowait((topic, payload, old and self._broker is not None, ack))

        async def read() -> None:
            while True:
                topic, payload, old, ack = await arrivals.get()
                backoff = Backoff(RECOVERY)
                while True:
                    # Acknowledgements go out in order: one that never came would stop the broker in the end.
                    try:
                        await devices.receive(topic, payload, ack, old=old)
                        break
                    except LedgerError:
                        await backoff.wait()

        def back(session_present: bool) -> None:
            self._do(devices.reconnected(session_present))

        if settings.mqtt and self.gateway.neighbours is not None and "client_id=" not in settings.mqtt:
            address = replace(address, client_id=self._own_client_id())
        link = self._link = devices.link = MqttLink(
            address,
            heard,
            subscriptions=devices.subscriptions,
            on_connect=back,
            on_disconnect=lambda _: devices.lost(),
        )
        await link.start()
        closing.push_async_callback(link.stop)
        reader = asyncio.get_running_loop().create_task(read())
        closing.callback(reader.cancel)
        if self._broker is not None:
            await link.connected()
        self._every(REFRESH_SECONDS, devices.sweep)

    def _own_client_id(self) -> str:
        """Hubs that share a broker must not share a session there. Its name is kept: the broker keeps what it
        has for a session that comes back, and would keep it for ever for one that does not."""
        place = self._data / "client_id"
        if not place.exists():
            place.write_text(f"hub-{secrets.token_hex(4)}", encoding="utf-8")
        return place.read_text(encoding="utf-8")

    async def renew_broker_users(self) -> None:
        if self._broker is None:
            return
        from duly.broker_rules import BrokerUser, node
        from duly.dialects.fd import PREFIX
        from duly.mqtt_devices import HUB

        users = [BrokerUser(HUB, self._broker_password, [f"{PREFIX}/#"], [f"{PREFIX}/#"])]
        users += [node(name, password) for name, password in self.accounts.broker_logins().items()]
        await self._broker.set_users(users)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # ── chores ───────────────────────────────────────────────────────────────────────────────────

    def _every(self, period: float, chore: Any) -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            task = loop.create_task(chore())
            self._chores.add(task)
            task.add_done_callback(self._chores.discard)
            self._timers.append(loop.call_later(period, again))
            del self._timers[:-8]

        self._timers.append(loop.call_later(period, again))

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    async def _prune(self) -> None:
        try:
            await self._forget()
            self._unforgotten = None
        except (LedgerError, OSError) as problem:  # the next time will do
            self._unforgotten = str(problem)
        with contextlib.suppress(DulyError):
            await self.alerts.adopt(self._living())

    async def _forget(self) -> dict[str, Any]:
        kept = deliveries_kept(self.settings)
        return await retention.prune(self.ledger, self.alerts.desk, self.archive, kept)

    async def _refresh(self) -> None:
        with contextlib.suppress(LedgerError):
            await self.chat.see_off()
        if not self.ledger.sole:
            with contextlib.suppress(LedgerError):
                for name in await self.accounts.refresh() | await self.people.refresh():
                    self._dismiss(name)
                await self.alerts.refresh()
            before, self._others = self._others, self._living()
            if before - self._others:  # somebody has died: what they were at must not wait for the next round
                with contextlib.suppress(DulyError):
                    await self.alerts.adopt(self._others)

    def _living(self) -> frozenset[str]:
        """The hubs on this ledger."""
        neighbours = self.gateway.neighbours
        return frozenset() if neighbours is None else neighbours.homes.living

    # ── who ──────────────────────────────────────────────────────────────────────────────────────

    async def login(self, token: str | None, address: str) -> Principal:
        if token is None:
            raise NotAuthenticated("no token; send Authorization: Bearer …, or an auth frame")
        # Strangers send anything, also text that UTF-8 cannot carry.
        if secrets.compare_digest(token.encode(errors="surrogatepass"), self._token.encode()):
            return Principal(LOCAL, Role.ADMIN)
        who = self._borrowed.get(token) or self.accounts.authenticate(token)
        if who is None:
            who = await self.people.recognise(token)
        if who is not None:
            # Nobody guesses 32 random bytes: only strangers wait. Otherwise one device with an old token
            # would lock out everybody else behind the same address.
            self._guard.succeeded(address)
            return who
        now = self.ledger.clock.now()
        wait = self._guard.blocked(address, now)
        if wait is not None:
            raise TooManyLogins(f"too many failed logins from {address}; try again in {wait / SECOND:.0f} s")
        self._guard.failed(address, now)
        raise NotAuthenticated("this token is not known; 'duly add' makes one")

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        try:
            await self._reception.connected(session, who, cursors)
        except LedgerError as problem:
            session.close(f"come back soon: {problem}")

    def receive(self, session: Session, who: Principal, raw: bytes | str) -> bool | Awaitable[bool]:
        return self._reception.receive(session, who, raw)

    async def receive_all(self, sessions: Sequence[Session], who: Principal, raws: Sequence[bytes]) -> None:
        await self._reception.receive_all(sessions, who, raws)

    async def disconnected(self, session: Session, who: Principal) -> None:
        with contextlib.suppress(DulyError):
            await self._reception.disconnected(session, who)

    def trail(self, key: bytes) -> list[Any]:
        return self.gateway.trail(key)

    async def list_alerts(
        self, *, standing: str, sentinel: str, limit: int, before: tuple[int, bytes]
    ) -> tuple[list[dict[str, Any]], tuple[int, bytes] | None]:
        alerts, following = await self.alerts.desk.page(
            standing=standing, sentinel=sentinel, limit=limit, before=before
        )
        return [desk.show(alert) for alert in alerts], following

    async def show_alert(self, key: bytes) -> dict[str, Any] | None:
        alert = await self.alerts.desk.get(key)
        return None if alert is None else desk.show(alert)

    @property
    def down(self) -> str | None:
        neighbours = self.gateway.neighbours
        problem = self.gateway.engine.down or self.alerts.engine.down or (neighbours and neighbours.trouble)
        return str(problem) if problem else None

    def state(self) -> dict[str, Any]:
        neighbours = self.gateway.neighbours
        return {
            "url": self.url,
            "ledger": type(self.ledger).__name__,
            "down": self.down,
            "devices": self.gateway.presence(),
            "mqtt": self._mqtt_state(),
            "alerts": self.alerts.state(),
            "unforgotten": self._unforgotten,
            "hubs": [self.ledger.worker] if neighbours is None else sorted(neighbours.homes.living),
        }

    def _mqtt_state(self) -> dict[str, Any] | None:
        link, broker = self._link, self._broker
        if link is None:
            return None
        problem = (broker and broker.problem) or (None if link.up else link.problem)
        said = None if problem is None else str(problem)
        return {"url": self.mqtt_url, "embedded": broker is not None, "problem": said}

    # ── the command line's door ──────────────────────────────────────────────────────────────────

    async def _admin(self, request: web.Request) -> web.Response:
        try:
            header = request.headers.get("Authorization", "")
            who = await self.login(header.removeprefix("Bearer ").strip() or None, request.remote or "?")
            if who.role is not Role.ADMIN:
                raise NotAllowed("only an admin may do that")
            wanted = msgspec.json.decode(await request.read(), type=dict[str, str])
            result = await self._administer(who, request.match_info["verb"], wanted)
        except (msgspec.DecodeError, KeyError, ValueError) as problem:
            return http.problem(Malformed(str(problem)))
        except DulyError as problem:
            return http.problem(problem)
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    async def _administer(self, who: Principal, verb: str, wanted: dict[str, str]) -> object:
        match verb:
            case "borrow":
                name = wanted["name"]
                found = [account for account in self.accounts.list() if account.name == name]
                if not found:
                    raise NotAllowed(f"there is no {name}; 'duly add' it first")
                token = f"duly_{secrets.token_urlsafe(32)}"
                self._borrowed[token] = Principal(name, found[0].role)
                return {"token": token}
            case "login":
                name = wanted["name"]
                if self.accounts.role_of(name) is not Role.USER:
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
                    "heard": await last_heard(self.ledger, devices) | seen["heard"],
                    "silent": seen["silent"],
                }
            case "prune" if "dry" in wanted:
                kept = deliveries_kept(self.settings)
                return await retention.would_prune(self.ledger, self.archive, kept)
            case "prune":
                return await self._forget()
            case _ if "." in verb:
                return await alert_verbs.administer(
                    self.alerts.desk, self.alerts.profiles, verb, wanted, who.name
                )
            case _:
                result = await administer(self.accounts, verb, wanted)
                if self._bell is not None:
                    self._bell.ring(ACCOUNTS)
                if verb == "remove":
                    await self.people.log_out_everywhere(wanted["name"])
                if verb in ("add", "remove"):
                    self._dismiss(wanted["name"])  # whoever came with a token that is void now
                    await self.renew_broker_users()
                    await self.chat.see_off()
                return result

    def dismiss(self, name: str) -> None:
        """Hang up on somebody who has logged out."""
        self._reception.dismiss(name)

    def _dismiss(self, name: str) -> None:
        self._borrowed = {token: who for token, who in self._borrowed.items() if who.name != name}
        self._reception.dismiss(name)


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


def courier_policy(settings: Settings) -> CourierPolicy:
    return CourierPolicy(
        desk.CHANNEL,
        horizon=Horizon(keep=round(settings.alerts_remembered * DAY), skew=3_660 * DAY),
        keep=round(settings.alerts_kept * DAY),
    )


def deliveries_kept(settings: Settings) -> int:
    return round(settings.deliveries_kept * DAY)


def archive_of(settings: Settings) -> Archive:
    return Archive(Path(settings.data) / "archive", round(settings.archives_kept * DAY))
