"""MQTT at a hub: its own broker or an outside one, two links to it, and the devices behind it.

The law: answers and reports come in over two sessions, so that a device that reports much delays no answer.
With the hub's own broker MQTT is ready when the hub is; an outside one may come and go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from duly.apps.gateway.mqtt_devices import MqttDevices
from duly.apps.gateway.service import GatewayService
from duly.broker.embedded import EmbeddedBroker
from duly.broker.users import HubUsers, own_session, record, second_session
from duly.core.acl import HUB
from duly.errors import DulyError
from duly.identity.accounts import Accounts
from duly.runtime.audit import AuditLog
from duly.runtime.tasks import Supervisor
from duly.settings import Settings
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, shared_secret
from duly.transports.mqtt.address import BrokerAddress
from duly.transports.mqtt.link import MqttLink
from duly.wire.task_ids import SECRET_SIZE, TaskIds

SWEEP_SECONDS: Final = 5.0
_TASKS: Final = "mqtt_tasks"


class MqttService:
    """The MQTT side of one hub. What it starts is stopped by `closing`."""

    def __init__(self, settings: Settings, tasks: Supervisor, closing: contextlib.AsyncExitStack) -> None:
        self._settings = settings
        self._tasks = tasks
        self._closing = closing
        self.broker: EmbeddedBroker | None = None
        """the hub's own; None: an outside one"""
        self.links: dict[str, MqttLink] = {}
        self.url = ""

    async def start(
        self, ledger: Ledger, box: SecretBox, accounts: Accounts, gateway: GatewayService, journal: AuditLog
    ) -> None:
        """Start the broker, if it is the hub's own, and connect to it."""
        ids = TaskIds(await shared_secret(ledger, box, _TASKS, SECRET_SIZE))
        devices = MqttDevices(gateway, accounts, journal, ids, self._tasks, on_rush=self._hurry)
        self.devices = devices
        gateway.remote.poll(self._tasks, "look at MQTT devices of other hubs", devices.look)
        address = self._outside() if self._settings.mqtt else await self._own_broker(accounts, devices)
        if "client_id=" not in self._settings.mqtt:
            data = Path(self._settings.data)
            address = await own_session(data, address, embedded=self.broker is not None)
        await self._connect(address, devices)
        self._closing.push_async_callback(devices.stop)
        if self.broker is not None:
            for link in self.links.values():
                await link.connected()
        self._tasks.every("sweep of silent MQTT devices", SWEEP_SECONDS, devices.sweep)

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
            on_restart=lambda _: devices.broker_restarted(),
            on_refused=lambda refused: record(devices.refusals, refused),
            users=users,
            tasks=self._tasks,
        )
        self.broker.clients.given = devices.given
        await self.broker.start()
        self._closing.push_async_callback(self.broker.stop)
        self.url = self.broker.url
        # Its certificate names it as the world knows it, not as we do: that very one is what we expect.
        return replace(
            BrokerAddress.parse(self.url),
            username=HUB,
            password=users.hub_password,
            cafile=settings.tls_cert,
            pinned=bool(settings.tls_cert),
        )

    async def _connect(self, address: BrokerAddress, devices: MqttDevices) -> None:
        def heard(topic: str, payload: bytes, old: bool, ack: Callable[[], None]) -> None:
            # Of an outside broker's wills we know nothing; ours began with us, and so did every connection.
            devices.arrived(topic, payload, old and self.broker is not None, ack)

        def back(_: bool) -> None:
            self._tasks.do("mqtt reconnection", devices.answers_back())

        devices.link = self.links["answers"] = MqttLink(
            address, heard, subscriptions=devices.answers, on_connect=back, tasks=self._tasks
        )
        devices.reports_link = self.links["reports"] = MqttLink(
            second_session(address),
            heard,
            subscriptions=devices.reports,
            on_connect=devices.reports_back,
            on_disconnect=lambda _: devices.lost(),
            tasks=self._tasks,
        )
        for link in self.links.values():
            await link.start()
            self._closing.push_async_callback(link.stop)

    def _hurry(self) -> None:
        if self.broker is not None:
            self.broker.hurry()

    def dismiss(self, name: str) -> None:
        """Hang up on an account whose token is void."""
        if self.broker is not None:
            self._tasks.do("broker dismissal", self._dismiss(self.broker, name))

    async def _dismiss(self, broker: EmbeddedBroker, name: str) -> None:
        with contextlib.suppress(DulyError):  # a broker that is away has hung up on everybody
            await broker.dismiss(name)

    def state(self) -> dict[str, Any]:
        """Where the broker is, whether it is the hub's own, and why it does not work, if that is so."""
        down = next((link.problem for link in self.links.values() if not link.up), None)
        problem = (self.broker and self.broker.problem) or down
        said = None if problem is None else str(problem)
        return {"url": self.url, "embedded": self.broker is not None, "problem": said}
