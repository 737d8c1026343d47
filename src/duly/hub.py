"""The server: ledger, accounts, gateway and listeners, put together, started and stopped in order.

The law: it is ready when everything serves, and says so; it stops by taking in nothing more, finishing what
was taken in, and leaving the rest in the ledger. While it runs, a notice in its data folder says where.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from duly import notice
from duly.apps.control import ControlPolicy
from duly.apps.gateway import Gateway, GatewayPolicy, last_heard
from duly.apps.neighbours import LOOK_SECONDS
from duly.auth import Accounts, LoginGuard, Principal, Role, administer
from duly.core.units import SECOND, seconds
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
from duly.reception import Reception
from duly.settings import Settings
from duly.transport import Session
from duly.transports import http, static, websocket

if TYPE_CHECKING:
    from duly.broker import Broker
    from duly.doorbell import Doorbell

PRUNE_SECONDS: Final = 30.0
REFRESH_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 75.0
"""How long a connection may take for its first request, and between requests."""
ACCOUNTS: Final = "accounts"
"""What is rung when accounts or grants have changed."""
LOCAL: Final = "local"
"""The name of whoever may read the data folder."""


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
        self._broker_password = ""

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
        self._reception = Reception(journal, [self.gateway])
        await self.gateway.start()
        closing.push_async_callback(self.gateway.stop)
        if self.gateway.neighbours is not None:
            self._every(LOOK_SECONDS, self.gateway.neighbours.look)
        await self._start_mqtt()
        await self._listen()
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
        """Until the engine ends, which it does by itself only through a bug."""
        await self.gateway.engine.wait()
        raise ProgramError("the engine has ended by itself")

    async def _listen(self) -> None:
        settings = self.settings
        app = web.Application(client_max_size=http.BODY_LIMIT)
        sockets = websocket.WebSockets(self)
        app.on_shutdown.append(sockets.close)
        app.add_routes(
            [
                web.get("/v1/ws", sockets.serve),
                *http.routes(self),
                *static.routes(),
                web.post("/v1/admin/{verb}", self._admin),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, logger=http.LOG, shutdown_timeout=0.5, keepalive_timeout=IDLE_SECONDS
        )
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        tls = None
        if settings.tls_cert:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                tls.load_cert_chain(settings.tls_cert, settings.tls_key)
            except (OSError, ssl.SSLError) as problem:
                raise Malformed(f"the TLS certificate cannot be used: {problem}") from None
        site = web.TCPSite(runner, settings.listen, settings.port, ssl_context=tls, backlog=1024)
        try:
            await site.start()
        except OSError as problem:
            raise self._cannot_listen(problem) from problem
        port = runner.addresses[0][1]
        self.url = f"{'https' if tls else 'http'}://{settings.listen}:{port}"

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
        from duly.transports.mqtt import MqttLink

        devices = MqttDevices(self.gateway, self.accounts, self.journal)
        if self.gateway.neighbours is not None:
            self._every(LOOK_SECONDS, devices.look)
        address = settings.mqtt
        if not address:
            # It speaks no TLS: beyond this machine only for those who said they know.
            listen = settings.listen if settings.insecure else "127.0.0.1"
            self._broker = Broker(self._data, settings.mqtt_port, listen)
            self._broker_password = secrets.token_urlsafe(32)
            await self.renew_broker_users()
            await self._broker.start()
            closing.push_async_callback(self._broker.stop)
            address = self._broker.url.replace("mqtt://", f"mqtt://{HUB}:{self._broker_password}@")
            self.mqtt_url = self._broker.url
        else:
            self.mqtt_url = address.rsplit("@", 1)[-1] if "@" in address else address
            self.mqtt_url = self.mqtt_url if "://" in self.mqtt_url else f"mqtt://{self.mqtt_url}"
        arrivals: asyncio.Queue[tuple[str, bytes, Callable[[], None]]] = asyncio.Queue()

        def heard(topic: str, payload: bytes, retained: bool, ack: Callable[[], None]) -> None:
            arrivals.put_nowait((topic, payload, ack))

        async def read() -> None:
            while True:
                topic, payload, ack = await arrivals.get()
                for attempt in itertools.count(1):
                    # Acknowledgements go out in order: one that never came would stop the broker in the end.
                    try:
                        await devices.receive(topic, payload, ack)
                        break
                    except LedgerError:
                        await asyncio.sleep((RECOVERY.delay(attempt, b"") or 0) / SECOND)

        def back(session_present: bool) -> None:
            self._do(devices.reconnected())

        if settings.mqtt and self.gateway.neighbours is not None and "client_id=" not in address:
            address = f"{address}{'&' if '?' in address else '?'}client_id={self._own_client_id()}"
        link = devices.link = MqttLink(address, heard, subscriptions=devices.subscriptions, on_connect=back)
        await link.start()
        closing.push_async_callback(link.stop)
        reader = asyncio.get_running_loop().create_task(read())
        closing.callback(reader.cancel)
        if self._broker is not None:
            await link.connected()

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
        from duly.broker import BrokerUser
        from duly.dialects.fd import PREFIX
        from duly.mqtt_devices import HUB

        answers = [f"{PREFIX}/+/{kind}" for kind in ("ack", "complete", "failed", "pending")]
        users = [BrokerUser(HUB, self._broker_password, [f"{PREFIX}/#"], [f"{PREFIX}/#"])]
        for name, password in self.accounts.broker_logins().items():
            own = f"{PREFIX}/{name}"
            users.append(
                BrokerUser(name, password, [*answers, f"{own}/status"], [f"{own}/#", f"{PREFIX}/+/status"])
            )
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
        with contextlib.suppress(LedgerError):
            while await self.ledger.prune() == 1_000:
                pass

    async def _refresh(self) -> None:
        if not self.ledger.sole:
            with contextlib.suppress(LedgerError):
                for name in await self.accounts.refresh():
                    self._dismiss(name)

    # ── who ──────────────────────────────────────────────────────────────────────────────────────

    def login(self, token: str | None, address: str) -> Principal:
        if token is None:
            raise NotAuthenticated("no token; send Authorization: Bearer …, or an auth frame")
        # Strangers send anything, also text that UTF-8 cannot carry.
        if secrets.compare_digest(token.encode(errors="surrogatepass"), self._token.encode()):
            return Principal(LOCAL, Role.ADMIN)
        who = self._borrowed.get(token) or self.accounts.authenticate(token)
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

    def receive(self, session: Session, who: Principal, raw: bytes | str) -> Awaitable[bool]:
        return self._reception.receive(session, who, raw)

    async def disconnected(self, session: Session, who: Principal) -> None:
        with contextlib.suppress(DulyError):
            await self._reception.disconnected(session, who)

    def trail(self, key: bytes) -> list[Any]:
        return self.gateway.trail(key)

    @property
    def down(self) -> str | None:
        neighbours = self.gateway.neighbours
        problem = self.gateway.engine.down or (neighbours and neighbours.trouble)
        return str(problem) if problem else None

    def state(self) -> dict[str, Any]:
        neighbours = self.gateway.neighbours
        return {
            "url": self.url,
            "ledger": type(self.ledger).__name__,
            "down": self.down,
            "devices": self.gateway.presence(),
            "hubs": [self.ledger.worker] if neighbours is None else sorted(neighbours.homes.living),
        }

    # ── the command line's door ──────────────────────────────────────────────────────────────────

    async def _admin(self, request: web.Request) -> web.Response:
        try:
            header = request.headers.get("Authorization", "")
            who = self.login(header.removeprefix("Bearer ").strip() or None, request.remote or "?")
            if who.role is not Role.ADMIN:
                raise NotAllowed("only an admin may do that")
            wanted = msgspec.json.decode(await request.read(), type=dict[str, str])
            result = await self._administer(request.match_info["verb"], wanted)
        except (msgspec.DecodeError, KeyError, ValueError) as problem:
            return http.problem(Malformed(str(problem)))
        except DulyError as problem:
            return http.problem(problem)
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    async def _administer(self, verb: str, wanted: dict[str, str]) -> object:
        match verb:
            case "borrow":
                name = wanted["name"]
                found = [account for account in self.accounts.list() if account.name == name]
                if not found:
                    raise NotAllowed(f"there is no {name}; 'duly add' it first")
                token = f"duly_{secrets.token_urlsafe(32)}"
                self._borrowed[token] = Principal(name, found[0].role)
                return {"token": token}
            case "list":
                devices = [one.name for one in self.accounts.list() if one.role is Role.DEVICE]
                result = await administer(self.accounts, verb, wanted)
                return result | {
                    "online": self.gateway.presence(),
                    "heard": await last_heard(self.ledger, devices),
                }
            case _:
                result = await administer(self.accounts, verb, wanted)
                if self._bell is not None:
                    self._bell.ring(ACCOUNTS)
                if verb in ("add", "remove"):
                    self._dismiss(wanted["name"])  # whoever came with a token that is void now
                    await self.renew_broker_users()
                return result

    def _dismiss(self, name: str) -> None:
        self._borrowed = {token: who for token, who in self._borrowed.items() if who.name != name}
        self._reception.dismiss(name)


def control_policy(settings: Settings) -> ControlPolicy:
    return ControlPolicy(
        window=seconds(settings.window),
        max_age=seconds(settings.max_age),
        remember=seconds(settings.remember),
        patience=seconds(settings.patience),
    )
