"""Runs the MQTT side of a hub: an embedded or outside broker, two links to it, and the devices behind it.

Answers and reports arrive over two sessions, so that a device that reports much does not delay answers.
With the embedded broker MQTT is ready when the hub is; an outside broker may come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from duly.apps.gateway.mqtt_devices import MqttDevices
from duly.apps.gateway.service import GatewayService
from duly.broker.acl_dialects import DEVICES, NODES
from duly.broker.clients import BrokerRefusal
from duly.broker.embedded import EmbeddedBroker
from duly.broker.users import HubUsers, end_session, own_session, record, second_session
from duly.core.acl import HUB
from duly.core.units import seconds
from duly.errors import DulyError, NotAuthenticated
from duly.identity.accounts import Accounts
from duly.runtime.activity_log import ActivityLog
from duly.runtime.tasks import Supervisor
from duly.server.shutdown import Shutdown
from duly.settings import Settings
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, shared_secret
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire.task_ids import SECRET_SIZE, TaskIds

SWEEP_SECONDS: Final = 5.0
NODES_SECONDS: Final = 2.0
"""How often the embedded broker is asked for new statuses of nodes."""
ANSWER_WITHIN: Final = 5.0
"""Seconds within which the broker answers the hub; one that does not makes the hub unhealthy."""
_TASKS: Final = "mqtt_tasks"


class MqttService:
    """The MQTT side of one hub; `shutdown` stops what it starts."""

    def __init__(self, settings: Settings, tasks: Supervisor, shutdown: Shutdown) -> None:
        self._settings = settings
        self._tasks = tasks
        self._shutdown = shutdown
        self.broker: EmbeddedBroker | None = None
        """the embedded broker; None if an outside one is used"""
        self.links: dict[str, MqttLink] = {}
        self.url = ""
        self.websocket_url = ""
        """where the embedded broker serves MQTT over WebSocket; empty: nowhere"""
        self.refused = 0
        """what the embedded broker has refused since the start"""
        self.failed_logins = 0
        """how many of those were logins with a wrong token"""
        self._node_status = 0
        """the number of the newest status of a node that was read from the embedded broker"""
        self.on_problem: Callable[[], None] | None = None
        """called when the problem in `state` may have changed"""

    async def start(
        self,
        ledger: Ledger,
        box: SecretBox,
        accounts: Accounts,
        gateway: GatewayService,
        activity: ActivityLog,
    ) -> None:
        """Start the embedded broker unless an outside one is set, and connect to the broker."""
        ids = TaskIds(await shared_secret(ledger, box, _TASKS, SECRET_SIZE))
        devices = MqttDevices(gateway, accounts, activity, ids, self._tasks, on_rush=self._hurry)
        self.devices = devices
        await devices.start()
        gateway.remote.poll(
            self._tasks, "look at MQTT devices of other hubs", devices.sessions.claim_orphaned
        )
        address = self._outside() if self._settings.mqtt else await self._own_broker(accounts, devices)
        if "client_id=" not in self._settings.mqtt:
            folder = Path(self._settings.data)
            address = await own_session(folder, address, embedded=self.broker is not None)
        await self._connect(address, devices)
        self._shutdown.add("MQTT devices", devices.stop)
        if self.broker is not None:
            for link in self.links.values():
                await link.connected()
            await self._clear(self.broker, address, accounts)
            self.broker.clients.callout.admit_all()
            self._tasks.every("statuses of nodes", NODES_SECONDS, self._read_node_statuses)
        self._tasks.every("sweep of silent MQTT devices", SWEEP_SECONDS, devices.sweep)

    async def _clear(self, broker: EmbeddedBroker, address: BrokerAddress, accounts: Accounts) -> None:
        """End what the broker has kept for accounts that were removed while the hub was not running."""

        async def end(client_id: str) -> None:
            await end_session(replace(address, client_id=client_id))

        broker.clients.end_session = end
        with contextlib.suppress(DulyError, msgspec.DecodeError):  # then it is tried again every second
            await broker.clients.clear(await accounts.removed_names())
        await self.take_back()

    def _broker_restarted(self, devices: MqttDevices) -> None:
        devices.presence.broker_restarted()
        self._node_status = 0
        self._tasks.do("revoked tasks in the broker", self.take_back())

    def _outside(self) -> BrokerAddress:
        address = BrokerAddress.parse(self._settings.mqtt)
        self.url = repr(replace(address, username=""))
        return address

    async def _own_broker(self, accounts: Accounts, devices: MqttDevices) -> BrokerAddress:
        settings, users = self._settings, HubUsers(accounts)
        self.broker = EmbeddedBroker(
            Path(settings.data),
            settings.mqtt_port,
            settings.listen,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            on_restart=lambda _: self._broker_restarted(devices),
            on_refused=lambda refused: self._record(devices, refused),
            users=users,
            tasks=self._tasks,
            websocket_port=settings.mqtt_ws_port,
            origins=[*settings.origins, *filter(None, [settings.public_url])],
        )
        self.broker.on_problem = self._problem_changed
        self.broker.clients.given = devices.sessions.given
        devices.presence.watch_connections()
        self.broker.clients.callout.on_connections = devices.connections
        self.broker.clients.callout.admit_first(HUB)
        await self.broker.start()
        self._shutdown.add("the embedded broker", self.broker.stop)
        self.url, self.websocket_url = self.broker.url, self.broker.websocket_url
        # The certificate contains the public name and not 127.0.0.1, so exactly this certificate is expected.
        return replace(
            BrokerAddress.parse(self.url),
            username=HUB,
            password=users.hub_password,
            cafile=settings.tls_cert,
            pinned=bool(settings.tls_cert),
            version=3,  # nats-server speaks no other
        )

    async def _connect(self, address: BrokerAddress, devices: MqttDevices) -> None:
        def received(topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
            # An outside broker may keep old wills; connections to the embedded one are newer than the hub.
            devices.arrived(topic, payload, old and self.broker is not None, old, ack)

        def reconnected(_: bool) -> None:
            self._problem_changed()
            self._tasks.do("mqtt reconnection", devices.sessions.reconnect())

        def reports_back(present: bool) -> None:
            self._problem_changed()
            devices.reports_back(present)

        def reports_lost(_: str) -> None:
            self._problem_changed()
            devices.presence.link_lost()

        devices.sessions.link = self.links["answers"] = MqttLink(
            address,
            received,
            subscriptions=devices.answers,
            on_connect=reconnected,
            on_disconnect=lambda _: self._problem_changed(),
            answer_within=ANSWER_WITHIN,
            tasks=self._tasks,
        )
        devices.reports_link = self.links["reports"] = MqttLink(
            second_session(address),
            received,
            subscriptions=devices.reports,
            before=devices.presence.link_connects,
            on_connect=reports_back,
            on_disconnect=reports_lost,
            answer_within=ANSWER_WITHIN,
            tasks=self._tasks,
        )
        for name, link in self.links.items():
            await link.start()
            self._shutdown.add(f"the MQTT link of {name}", link.stop)

    def _problem_changed(self) -> None:
        if self.on_problem is not None:
            self.on_problem()

    def _record(self, devices: MqttDevices, refused: BrokerRefusal) -> None:
        self.refused += 1
        self.failed_logins += refused.word == NotAuthenticated.word
        record(devices.refusals, refused)

    def _hurry(self) -> None:
        if self.broker is not None:
            self.broker.hurry()

    async def dismiss(self, name: str) -> None:
        """Disconnect an account whose token is void. If the account is gone, its sessions with the embedded
        broker end as well; a broker that is down ends them when it is back."""
        if self.broker is not None:
            with contextlib.suppress(DulyError, msgspec.DecodeError):
                await self.broker.dismiss(name)
        await self.devices.dismiss(name)

    async def take_back(self) -> None:
        """Delete the tasks that the embedded broker keeps for offline devices whose senders may no longer
        command them. An outside broker does not return what it has."""
        if self.broker is None:
            return
        kept = self.broker.clients.kept
        with contextlib.suppress(DulyError, msgspec.DecodeError):  # it is done again when the broker is back
            async for task in kept.tasks(DEVICES, self.devices.tasks):
                if not self.devices.may_have(task.topic, task.payload, task.stored_at):
                    await kept.delete(DEVICES, task)

    async def _read_node_statuses(self) -> None:
        """Read the statuses of nodes that the embedded broker has stored since the last time."""
        assert self.broker is not None
        (topics,) = self.devices.reports
        with contextlib.suppress(DulyError, msgspec.DecodeError):  # it is done again when the broker is back
            async for status in self.broker.clients.kept.retained(NODES, topics, self._node_status):
                self._node_status = status.number
                self.devices.node_reported(status.topic, status.payload, status.stored_at)

    def state(self) -> dict[str, object]:
        """Return the address of the broker, whether it is embedded, the MQTT version it speaks with the hub
        (3 is 3.1.1), and its problem, if any."""
        return {
            "url": self.url,
            "websocket": self.websocket_url or None,
            "embedded": self.broker is not None,
            "version": next((link.version for link in self.links.values() if link.up), None),
            "problem": self.problem,
        }

    @property
    def problem(self) -> str | None:
        """Why the broker cannot be used now; None if it can."""
        down = next((link.problem for link in self.links.values() if not link.up), None)
        problem = (self.broker and self.broker.problem) or down
        return None if problem is None else str(problem)

    def conflicts(self) -> list[str]:
        """Return a sentence about each client id that two clients of the embedded broker compete for."""
        now = seconds(asyncio.get_running_loop().time())
        return [] if self.broker is None else self.broker.clients.conflicts.present(now)
