"""kill -9 of the hub, of the devices, of the broker, at every named point and at random, under load.

The law is the judge's, in `pressing`. A device that dies between doing and saying so leaves an `unknown`
behind, which is the promise (P3) and not a loss; there may be no more of them than commands it was given.

`make test` kills each of them once or twice, `make proof` at every point and again and again.
`DULY_KILLS` says how many deaths the whole of the last test has, where everything dies in turn, and
`DULY_KILL_SEED` makes it another one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Self

import pytest

from tests import servers
from tests.end_to_end.fused import DEVICE_POINTS, HUB_POINTS
from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import DeviceProcess, HubProcess
from tests.guard import GUARD, LIMIT
from tests.proof import TWO_SIZES, count
from tests.servers import free_port

KILLS = int(os.environ.get("DULY_KILLS", "7"))
"""Deaths in the whole of the last test."""
AT_ONCE = 12
"""Commands under way in all: so many may be unknown after the death of a device."""
DEVICES = ("lock", "lamp")
pytestmark = pytest.mark.timeout(3 * LIMIT)


def remotes_of(hub: HubProcess, tokens: dict[str, str], lasts: float | None = None) -> list[Remote]:
    remotes = [
        Remote(hub, "phone", tokens["phone"], ordered=True),
        Remote(hub, "tablet", tokens["tablet"], ordered=False),
    ]
    for remote in remotes:
        remote.lasts = lasts
    return remotes


class Broker:
    """Between the hub and its devices: embedded in the hub, or an outside one; it dies and comes back."""

    def __init__(self, kind: str) -> None:
        self._port = free_port()
        outside = {"mosquitto": servers.Mosquitto, "rabbitmq": servers.RabbitMq}.get(kind)
        self._outside: servers.MqttServer | None = None if outside is None else outside()

    @property
    def settings(self) -> dict[str, object]:
        """What the hub must know."""
        return {"mqtt_port": self._port} if self._outside is None else {"mqtt": self._outside.url("hub")}

    def url(self, device: str) -> str:
        return f"mqtt://127.0.0.1:{self._port}" if self._outside is None else self._outside.url(device)

    def start(self) -> None:
        if self._outside is not None:
            self._outside.start()

    async def kill(self, hub: HubProcess) -> None:
        if self._outside is None:
            await hub.kill_broker()
        else:
            await asyncio.to_thread(self._outside.stop, signal.SIGKILL)
            await asyncio.to_thread(self._outside.start)
        count("kills", 1)

    def remove(self) -> None:
        if self._outside is not None:
            self._outside.remove()


class KillableParts:
    """A hub, two devices of duly's own, and two apps that press; all can be killed, apart from the apps."""

    def __init__(
        self, folder: Path, broker: Broker | None, *, lasts: float | None = None, **settings: object
    ) -> None:
        self._folder, self.broker, self._lasts = folder, broker, lasts
        self.hub = HubProcess(folder / "hub", **settings, **(broker.settings if broker else {}))

    async def __aenter__(self) -> Self:
        tokens = await self.hub.prepare(["phone", "tablet"], list(DEVICES))
        if self.broker is not None:
            await asyncio.to_thread(self.broker.start)
        await self.hub.start()
        self.devices = [
            DeviceProcess(self._folder / name, name, self._url(name), tokens[name]) for name in DEVICES
        ]
        self.remotes = remotes_of(self.hub, tokens, self._lasts)
        return self

    def _url(self, device: str) -> str:
        return self.hub.url if self.broker is None else self.broker.url(device)

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.devices, self.hub):
            await process.kill()
        if self.broker is not None:
            self.broker.remove()

    async def judge(self, *, deaths: int) -> None:
        """`deaths` of devices: each leaves unknown at most what was under way to it."""
        await judge(
            self.hub,
            [*self.devices],
            self.remotes,
            unknown=deaths * AT_ONCE // 2,
            ledger=self.hub.folder / "ledger.db",
        )


@TWO_SIZES
async def test_the_hub_dies_at_every_point_and_at_random(tmp_path: Path, whole: bool) -> None:
    hub = HubProcess(tmp_path / "hub")
    tokens = await hub.prepare(["phone", "tablet"], list(DEVICES))
    devices = [Lock(hub, tokens[name], tmp_path / name) for name in DEVICES]
    remotes = remotes_of(hub, tokens, lasts=GUARD)
    dice = random.Random(20)
    points = [f"{point}:{dice.randint(5, 60)}" for point in (HUB_POINTS if whole else ["after commit"])]
    await hub.start(points[0])
    try:
        async with pressed(remotes, *devices) as load:
            for point in [*points[1:], ""]:
                await hub.died()
                await hub.start(point)
            for _ in range(3 if whole else 1):
                await load.more(dice.randint(0, 5))
                await asyncio.sleep(dice.uniform(0.02, 0.4))
                await hub.kill()
                await hub.start()
        await judge(hub, [*devices], remotes, ledger=tmp_path / "hub" / "ledger.db")
    finally:
        await hub.kill()


@TWO_SIZES
@pytest.mark.parametrize("way", ["websocket", "mqtt"])
async def test_the_devices_die_at_every_point_and_at_random(tmp_path: Path, way: str, whole: bool) -> None:
    dice = random.Random(21)
    points = [f"{point}:{dice.randint(5, 30)}" for point in (DEVICE_POINTS if whole else ["after effect"])]
    async with KillableParts(tmp_path, Broker("embedded") if way == "mqtt" else None, patience=4) as parts:
        lock, lamp = parts.devices
        await lamp.start()
        await lock.start(points[0])
        async with pressed(parts.remotes) as load:
            for point in [*points[1:], ""]:
                await lock.died()
                await lock.start(point)
            for _ in range(2 if whole else 1):
                await load.more(dice.randint(1, 20))
                await asyncio.gather(lock.kill(), lamp.kill())
                await asyncio.gather(lock.start(), lamp.start())
        await parts.judge(deaths=len(points) + 4)


@pytest.mark.parametrize(
    ("broker", "times"),
    [
        ("embedded", 1),
        ("mosquitto", 1),
        pytest.param("embedded", 4, marks=pytest.mark.proof),
        pytest.param("mosquitto", 4, marks=pytest.mark.proof),
        pytest.param("rabbitmq", 1, marks=pytest.mark.proof),  # it takes long to come back
    ],
)
async def test_the_broker_dies_at_random(tmp_path: Path, broker: str, times: int) -> None:
    """Every other time before the devices are back from the time before."""
    dice = random.Random(22)
    async with KillableParts(tmp_path, Broker(broker), patience=LIMIT / 2) as parts:
        await asyncio.gather(*(device.start() for device in parts.devices))
        async with pressed(parts.remotes) as load:
            for time in range(times):
                if time % 2 == 0:
                    await load.more(dice.randint(1, 20))
                await asyncio.sleep(dice.uniform(0, 1))
                assert parts.broker is not None
                await parts.broker.kill(parts.hub)
        await parts.judge(deaths=0)


@TWO_SIZES
async def test_the_hub_dies_with_devices_behind_its_broker(tmp_path: Path, whole: bool) -> None:
    """And the broker with it, every time."""
    dice = random.Random(23)
    points = [f"{point}:{dice.randint(5, 60)}" for point in HUB_POINTS if point.startswith("after")]
    async with KillableParts(tmp_path, Broker("embedded"), lasts=GUARD, patience=LIMIT / 2) as parts:
        await asyncio.gather(*(device.start() for device in parts.devices))
        async with pressed(parts.remotes) as load:
            await load.more(5)
            await parts.hub.kill()
            for point in points if whole else points[:1]:
                await parts.hub.start(point)
                await parts.hub.died()
            await parts.hub.start()
        await parts.judge(deaths=0)


@TWO_SIZES
@pytest.mark.timeout(3 * LIMIT + 3 * KILLS)
@pytest.mark.parametrize("broker", ["embedded", "mosquitto"])
async def test_everything_dies_at_random(tmp_path: Path, broker: str, whole: bool) -> None:
    """So often; mostly when commands are done again, and sometimes before."""
    dice = random.Random(os.environ.get("DULY_KILL_SEED", "24"))
    async with KillableParts(tmp_path, Broker(broker), patience=6) as parts:
        await asyncio.gather(*(device.start() for device in parts.devices))
        deaths = 0
        async with pressed(parts.remotes) as load:
            for _ in range(KILLS if whole else 2):
                if dice.random() < 0.7:
                    await load.more(dice.randint(1, 10))
                await asyncio.sleep(dice.uniform(0, 0.3))
                mortals: list[str | DeviceProcess] = ["hub", "broker", *parts.devices]
                match dice.choice(mortals):
                    case "hub":
                        await parts.hub.kill()
                        await parts.hub.start()
                    case "broker":
                        assert parts.broker is not None
                        await parts.broker.kill(parts.hub)
                    case DeviceProcess() as device:
                        deaths += 1
                        await device.kill()
                        await device.start()
        await parts.judge(deaths=deaths)
