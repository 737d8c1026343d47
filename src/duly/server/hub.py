"""The hub: the server that assembles ledger, accounts, applications and listeners.

It starts its parts in order and is ready when all of them serve. To stop, it accepts nothing more, finishes
what it has accepted, and leaves the rest in the ledger. While it runs, a run file in its data folder contains
its address.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from duly.apps.alerts import alert_queries
from duly.apps.alerts import verbs as alert_verbs
from duly.apps.alerts.heartbeats import CHECK_SECONDS as HEARTBEAT_SECONDS
from duly.apps.alerts.service import AlertService
from duly.apps.chat import receipts
from duly.apps.chat.service import ChatPolicy, ChatService
from duly.apps.gateway.service import GatewayService
from duly.core.account_limits import AccountLimits
from duly.core.acl import HUB
from duly.core.steps import TimesLowered
from duly.errors import DulyError, NotAuthenticated, SenderError
from duly.identity.accounts import Accounts, Principal, Role
from duly.identity.authenticator import Authenticator
from duly.identity.login_guard import LoginGuard
from duly.identity.people import People
from duly.runtime.activity_log import ActivityLog
from duly.runtime.refusal_tally import RefusalTally
from duly.runtime.tasks import ENGINE_TRIES, Supervisor
from duly.runtime.telemetry import ChartSnapshot, TelemetrySnapshot
from duly.runtime.time_series import ChartStep
from duly.runtime.trail import Hop
from duly.server import data_folder, runfile
from duly.server.admin import Admin
from duly.server.dashboard.service import Dashboard
from duly.server.floor_watch import FloorWatch
from duly.server.health import HubHealth
from duly.server.listener import Listener
from duly.server.maintenance import Maintenance
from duly.server.metrics import HubMetrics
from duly.server.policies import (
    fanout_policy,
    floor_tolerance,
    gateway_policy,
    limit_policy,
)
from duly.server.revocation import Revocation
from duly.server.router import Router
from duly.server.runfile import RunFile
from duly.server.shutdown import LEDGER_SECONDS, Shutdown
from duly.settings import Settings
from duly.storage import open_ledger
from duly.storage.ledger import Ledger, Record
from duly.storage.secret_box import SecretBox
from duly.transports.http import page_cursors
from duly.transports.http.metrics import ClusterTotal
from duly.wire.frames import ServerCode
from duly.wire.outgoing import trouble
from duly.wire.session import Session

if TYPE_CHECKING:
    from duly.cluster.notifier import Notifier
    from duly.server.mqtt_service import MqttService

LOG: Final = logging.getLogger("duly.server")

SWITCH_SECONDS: Final = 0.001
"""How long the event loop may keep the ledger's thread waiting for the interpreter. With Python's default
of 5 ms, a flush of a dozen statements waits most of its time for its turn: p99 of a chat line is 30 ms
instead of 20."""

COLLECT_AFTER: Final = (50_000, 10, 10)
"""The thresholds of Python's garbage collector. Messages are not part of cycles; with the default of 700 a
hub spends a twentieth of its time on collections, and still most of that with 10,000."""


def tune() -> None:
    """Tune this process for running nothing but a hub."""
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # objects that exist now are never collected
    gc.set_threshold(*COLLECT_AFTER)


class Hub:
    """One hub: its ledger, accounts, applications and listeners."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._folder = Path(settings.data)
        self._token = f"duly_{secrets.token_urlsafe(32)}"
        self.tasks = Supervisor()
        self._shutdown = Shutdown()
        self.admin = Admin(self)
        self.revocation = Revocation(self)
        self.maintenance = Maintenance(self)
        self.health = HubHealth(self)
        self.name = ""
        """created once and stored in the data folder"""
        self.url = ""
        self.mqtt_url = ""
        self.mqtt_websocket_url = ""
        self.mqtt: MqttService | None = None

    # ── starting and stopping ────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start all parts in order; if one fails, those before it are stopped again."""
        try:
            await self._start()
        except BaseException:
            await self._shutdown.run()
            raise

    async def _start(self) -> None:
        settings, shutdown = self.settings, self._shutdown
        listener = Listener(settings)
        data_folder.prepare(self._folder)
        data_folder.warn_of_lost_ledger(settings)
        self.name = data_folder.hub_name(self._folder)
        self.ledger: Ledger = await open_ledger(settings.ledger_url)
        self.ledger.on_read_error = partial(self.tasks.failed, "reading the ledger")
        shutdown.add("the ledger", self.ledger.close, LEDGER_SECONDS)
        listener.check_port()  # before a part is started that takes time, or a port of its own
        shutdown.add("background work", self.tasks.stop)
        box = await data_folder.unlock(self.ledger, settings)
        self.floor = FloorWatch(self.ledger, floor_tolerance(settings))
        await self.floor.refresh()
        await self._open_accounts(box)
        self.activity = ActivityLog(self.ledger)
        logins = RefusalTally(self.activity, self.tasks)
        self.login_guard.on_failure = partial(logins.note, HUB, "login", NotAuthenticated.word)
        shutdown.add("refused logins", logins.stop)
        self.metrics = HubMetrics(self)
        self.telemetry = self.metrics.telemetry
        shutdown.add("metrics", self.metrics.stop)
        await self.metrics.load()
        self.notifier = await self._open_notifier()
        await self._start_applications(box)
        await self.alerts.backlog.refresh()
        if not settings.no_mqtt:
            # Not every hub has MQTT devices: what only they need is loaded only then.
            from duly.server.mqtt_service import MqttService

            self.mqtt = MqttService(settings, self.tasks, shutdown)
            await self.mqtt.start(self.ledger, box, self.accounts, self.gateway, self.activity)
            self.mqtt_url, self.mqtt_websocket_url = self.mqtt.url, self.mqtt.websocket_url
        self.dashboard = Dashboard(self, box, self.login_guard)
        shutdown.call("logins to the dashboard", self.dashboard.access.close)
        shutdown.add("the listener", listener.stop)
        await listener.start(self, self.admin.answer)
        self.url, self.visitors = listener.url, listener.connections
        if self.alerts.links is not None:
            self.alerts.links.lead_to(settings.public_url or self.url)
        self.maintenance.start()
        self.revocation.start()
        self.metrics.start()
        self.dashboard.start()
        shutdown.add("periodic work", self.tasks.stop_periodic)
        shutdown.call("the watch for outages", self.metrics.end_watch)
        runfile.write(self._folder, RunFile(self.url, self._token, os.getpid()))
        shutdown.call("the run file", partial(runfile.remove, self._folder))
        LOG.info(
            "hub %s serves at %s",
            self.name,
            " and ".join(filter(None, (self.url, self.mqtt_url, self.mqtt_websocket_url))),
        )

    async def _open_accounts(self, box: SecretBox) -> None:
        self.accounts = Accounts(self.ledger, box)
        await self.accounts.refresh()
        guard = self.login_guard = LoginGuard()
        self.people = People(
            self.ledger,
            self.accounts,
            guard,
            open_=self.settings.open_registration,
            ended=self.revocation.end_login,
        )
        self._shutdown.call("logins", self.people.close)
        self.authenticator = Authenticator(self.ledger, self.accounts, self.people, guard, self._token)
        self.login = self.authenticator.login
        self.recognise = self.authenticator.recognise
        self.authenticate = self.authenticator.authenticate
        self.cursors = await page_cursors.open_cursors(self.ledger, box)

    async def _start_applications(self, box: SecretBox) -> None:
        settings, ledger, accounts, activity = self.settings, self.ledger, self.accounts, self.activity
        trail = self.metrics.trail
        limits = self.limits = AccountLimits(limit_policy(settings))
        self.gateway = GatewayService(
            ledger, accounts, activity, gateway_policy(settings), self.notifier, trail, limits
        )
        self.floor.on_lowered = lambda limit: self.gateway.engine.put(TimesLowered(limit))
        self.chat = ChatService(
            ledger, accounts, activity, ChatPolicy(settings.friends_only), self.notifier, trail, limits
        )
        self.alerts = AlertService(
            ledger, activity, fanout_policy(settings), private=settings.allow_private_webhooks, box=box,
            folder=self._folder, known=self._may_report, trail=trail, limits=limits,
        )  # fmt: skip
        self.applications = (self.gateway, self.chat, self.alerts)
        self.router = Router(activity, self.applications, self.tasks)
        self.router.count_refused = self.telemetry.count_refused
        self._shutdown.add("the router", self.router.stop)
        for application in self.applications:
            await application.start()
            self._shutdown.add(application.name, application.stop)
            self.tasks.adopt(application.tasks)
            self.tasks.spawn(f"{application.name} engine", application.engine.live, tries=ENGINE_TRIES)
        await self.gateway.kept_traces.load(self.gateway.waiting())
        for name, raw in settings.profiles.items():
            await self.alerts.profiles.set(name, alert_verbs.draft_of(raw))
        for application in (self.gateway, self.chat):
            remote = application.remote
            remote.poll(self.tasks, f"{application.name}'s look at other hubs", remote.refresh)
        self.tasks.every("check of sentinels' heartbeats", HEARTBEAT_SECONDS, self.alerts.heartbeats.check)

    async def _open_notifier(self) -> Notifier | None:
        """Return the notifier, where other hubs may use the same ledger."""
        settings = self.settings
        if self.ledger.sole:
            return None
        from duly.cluster.notifiers import open_notifier

        notifier = open_notifier(settings.notifier or "postgres", self.ledger.worker, settings.ledger_url)
        notifier.tasks = self.tasks
        self.revocation.listen(notifier)
        await notifier.start()
        self._shutdown.add("the notifier", notifier.stop)
        return notifier

    async def stop(self) -> None:
        """Stop all parts, the last one first."""
        LOG.info("hub %s stops", self.name)
        await self._shutdown.run()

    async def run(self) -> None:
        """Wait until an essential part has failed for good, such as an engine that fails repeatedly."""
        await self.tasks.ended()

    # ── what the transports ask for ──────────────────────────────────────────────────────────────

    def sees_from(self, who: Principal) -> int:
        """Return the time before which a caller sees nothing, because the name belonged to an earlier
        account. It is 0 for an admin."""
        return 0 if who.role is Role.ADMIN else self.accounts.created_at(who.name)

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        """Greet a session that has logged in. If that is not possible, the client gets code 4, and the
        connection is closed."""
        try:
            await self.router.connected(session, who, cursors)
        except DulyError as problem:
            session.push(trouble(None, ServerCode.INTERNAL, "internal", str(problem), problem.wait))
            session.close(f"try again soon: {problem}")

    def receiver(self, session: Session, who: Principal) -> Callable[[bytes], bool | Awaitable[bool]]:
        """Return the function that handles a session's frames; it returns what to await before the next
        one."""
        return self.router.receiver(session, who)

    async def refuse(self, session: Session, who: Principal, raw: bytes, problem: SenderError) -> None:
        """Count, record and answer what came on a session but is not a frame."""
        await self.router.refuse(session, who, raw, problem)

    async def receive_all(self, sessions: Sequence[Session], who: Principal, raws: Sequence[bytes]) -> None:
        """Handle frames in order, each with its session."""
        await self.router.receive_all(sessions, who, raws)

    def begin_all(
        self, sessions: Sequence[Session], who: Principal, raws: Sequence[bytes]
    ) -> Coroutine[object, None, None] | None:
        """Handle frames as far as nothing has to be awaited; return the coroutine for the rest, if any."""
        return self.router.begin_all(sessions, who, raws)

    def failed(self, name: str, problem: BaseException) -> None:
        """Log and count a bug in this part of the hub."""
        self.tasks.failed(name, problem)

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Forget a session that has ended."""
        with contextlib.suppress(DulyError):
            await self.router.disconnected(session, who)

    async def hops(self, record: Record, *, receipts_too: bool) -> list[Hop]:
        """Return the steps of a message with their times, as far back as the trail reaches; for a chat line
        also those of its recipients, if the caller may see them."""
        trail = self.metrics.trail
        found = await trail.of_record(record)
        return [*found, *await receipts.hops(trail, record)] if receipts_too else found

    async def measure(self, *, stored: bool = False) -> TelemetrySnapshot:
        """Return all metrics; with `stored`, after storing them, as they are stored."""
        return await self.metrics.measure(stored=stored)

    async def cluster_totals(self) -> list[ClusterTotal]:
        """Return the totals of all hubs on this ledger."""
        return await self.metrics.cluster_totals()

    def chart(self, step: ChartStep) -> ChartSnapshot:
        """Return the columns of a chart of this hub."""
        return self.telemetry.chart(step)

    async def list_devices(
        self, who: Principal, after: str, limit: int
    ) -> tuple[list[dict[str, object]], str | None]:
        """Return a page of the devices that a caller may see, and the name after which the next page
        begins."""
        return await self.gateway.devices.page(who, after, limit)

    async def trace_line(self, record: Record, who: Principal) -> dict[str, object] | None:
        """Return the receipts of a chat line; None for any other message."""
        return await receipts.trace(self.ledger, record, None if who.role is Role.ADMIN else who.name)

    async def list_alerts(
        self, *, standing: str, sentinel: str, limit: int, before: tuple[int, bytes], since: int
    ) -> tuple[list[dict[str, object]], tuple[int, bytes] | None]:
        """Return a page of alerts, the newest first, and where the next page begins."""
        alerts, following = await self.alerts.operations.page(
            standing=standing, sentinel=sentinel, limit=limit, before=before, since=since
        )
        return [alert_queries.show(alert) for alert in alerts], following

    async def show_alert(self, key: bytes) -> dict[str, object] | None:
        """Return one alert; None if the ledger has none of this key."""
        return await self.alerts.show(key)

    async def _may_report(self, name: str) -> bool:
        """Return whether this account may report alerts; another hub may have just created it."""
        reporting = (Role.SENTINEL, Role.ADMIN)
        if self.accounts.stored_role(name) not in reporting:
            await self.accounts.confirmed(name)
        return self.accounts.stored_role(name) in reporting
