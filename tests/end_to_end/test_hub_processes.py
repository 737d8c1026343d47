"""Three hubs, PostgreSQL, Redis, a broker and a balancer, as processes: each dies, stands still or forgets,
under load, and the judge of `pressing` decides what that has cost.

`make test` does each thing once, `make proof` goes on; `DULY_KILLS` says how many deaths the test has where
everything dies.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from deploy.cluster import Cluster, HubServer

from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import ROOT, DeviceProcess
from tests.end_to_end.raw import curl, join
from tests.guard import GUARD, LIMIT
from tests.proof import TWO_SIZES, WHOLE, count
from tests.stopwatch import MachineStopwatch

KILLS = int(os.environ.get("DULY_KILLS", "8"))
BEGUN = 20
"""So many commands are done before anything dies."""


class Hubs:
    """All hubs as one, that names another one each time it is asked: what a client with several URLs does."""

    def __init__(self, hubs: list[HubServer], first: int = 0) -> None:
        self._hubs = hubs
        self._turn = itertools.cycle(range(len(hubs)))
        for _ in range(first):
            next(self._turn)

    @property
    def url(self) -> str:
        return self._hubs[next(self._turn)].url

    @property
    def errors(self) -> str:
        return "".join(hub.errors for hub in self._hubs)


class Scene:
    """Hubs with a lock on a WebSocket, a lamp behind the broker, and two apps that press."""

    def __init__(self, cluster: Cluster, folder: Path, tokens: dict[str, str]) -> None:
        self.cluster, self.tokens = cluster, tokens
        self.lock = Lock(Hubs(cluster.hubs, 1), tokens["lock"], folder / "lock")
        assert cluster.broker is not None
        self.lamp = DeviceProcess(folder / "lamp", "lamp", cluster.broker.url("lamp"))
        self.remotes = [
            Remote(Hubs(cluster.hubs, 0), "phone", tokens["phone"], ordered=True),
            Remote(Hubs(cluster.hubs, 2), "tablet", tokens["tablet"], ordered=False),
        ]

    async def judge(self, *, unknown: int = 0) -> None:
        # Without hints everything takes a second or two, so there is less of it.
        hubs, ledger = Hubs(self.cluster.hubs), self.cluster.ledger
        await judge(hubs, [self.lock, self.lamp], self.remotes, unknown=unknown, ledger=ledger)


async def people(ledger_url: str) -> dict[str, str]:
    async with await open_ledger(ledger_url) as ledger:
        accounts = Accounts(ledger)
        tokens = {name: await accounts.add(Role.APP, name) for name in ("phone", "tablet")}
        tokens |= {name: await accounts.add(Role.DEVICE, name) for name in ("lock", "lamp")}
        for app in ("phone", "tablet"):
            for device in ("lock", "lamp"):
                await accounts.grant(app, device)
    return tokens


@asynccontextmanager
async def scene(folder: Path, **settings: Any) -> AsyncIterator[Scene]:
    cluster = await asyncio.to_thread(lambda: Cluster(**settings))
    it: Scene | None = None
    try:
        it = Scene(cluster, folder, await people(cluster.ledger))
        await asyncio.to_thread(cluster.start)
        await it.lamp.start()
        yield it
    finally:
        if it is not None:
            await it.lamp.kill()
        await asyncio.to_thread(cluster.stop)


async def replace(hub: HubServer, rest: float = 0.0) -> None:
    await asyncio.to_thread(hub.stop, signal.SIGKILL)
    await asyncio.sleep(rest)
    await asyncio.to_thread(hub.start)
    count("kills", 1)


@TWO_SIZES
@pytest.mark.timeout(120)
async def test_hubs_die_one_after_the_other(tmp_path: Path, whole: bool) -> None:
    dice = random.Random(30)
    async with scene(tmp_path) as it:
        async with pressed(it.remotes, it.lock) as load:
            await load.more(BEGUN)
            for hub in (*it.cluster.hubs, *it.cluster.hubs) if whole else it.cluster.hubs[:2]:
                await replace(hub, dice.uniform(0, 1.5))
                await asyncio.sleep(dice.uniform(0.2, 1))
        await it.judge()


@WHOLE
@pytest.mark.timeout(120)
async def test_redis_is_killed_paused_and_flushed(tmp_path: Path, whole: bool) -> None:
    async with scene(tmp_path) as it:
        redis = it.cluster.redis
        assert redis is not None
        async with pressed(it.remotes, it.lock) as load:
            await load.more(BEGUN)
            await asyncio.to_thread(redis.stop, signal.SIGKILL)
            await asyncio.sleep(2 if whole else 0.5)
            await asyncio.to_thread(redis.start)
            await asyncio.sleep(1 if whole else 0.2)
            os.kill(redis.pid, signal.SIGSTOP)
            await asyncio.sleep(3 if whole else 1)
            os.kill(redis.pid, signal.SIGCONT)
            flushing = await asyncio.create_subprocess_exec("redis-cli", "-p", str(redis.port), "flushall")
            assert await flushing.wait() == 0
            await asyncio.sleep(1)
        await it.judge()


@WHOLE
@pytest.mark.timeout(120)
async def test_postgres_is_restarted_and_the_hubs_go_on_by_themselves(tmp_path: Path, whole: bool) -> None:
    async with scene(tmp_path, notifier="postgres") as it:
        postgres, hubs = it.cluster.postgres, it.cluster.hubs
        async with pressed(it.remotes, it.lock) as load:
            await load.more(BEGUN)
            for how in (signal.SIGINT, signal.SIGKILL) if whole else (signal.SIGKILL,):
                await asyncio.to_thread(postgres.stop, how)
                took = MachineStopwatch()
                async with asyncio.timeout(GUARD):
                    while not all([(await curl(f"{hub.url}/v1/health")).status == 503 for hub in hubs]):
                        await asyncio.sleep(0.1)
                frame = {"type": "lock_control", "seq_id": f"{time.time_ns() // 1_000_000}_0", "to": "lock"}
                said = await curl(f"{hubs[0].url}/v1/messages", it.tokens["phone"], body=frame)
                assert (said.status, said.json["code"]) == (503, 4)
                assert "retry-after" in said.headers
                await asyncio.to_thread(postgres.start)
                async with asyncio.timeout(GUARD):
                    while not all([(await curl(f"{hub.url}/v1/health")).status == 200 for hub in hubs]):
                        await asyncio.sleep(0.1)
                assert took.seconds < 25
                await load.more(BEGUN)
        await it.judge()


@WHOLE
@pytest.mark.timeout(120)
async def test_through_the_balancer_clients_need_not_know_how_many_hubs_there_are(
    tmp_path: Path, whole: bool
) -> None:
    async with scene(tmp_path) as it:
        balancer = it.cluster.balancer
        assert balancer is not None
        clients: list[Lock | Remote] = [it.lock, *it.remotes]
        for client in clients:
            client._hub = balancer
        async with pressed(it.remotes, it.lock) as load:
            await load.more(BEGUN)
            for hub in it.cluster.hubs[:2] if whole else it.cluster.hubs[:1]:
                await replace(hub, 1 if whole else 0)
            await load.more(BEGUN)
        await it.judge()


@pytest.mark.proof  # its one round is the tests above
@pytest.mark.timeout(150 + 5 * KILLS)
async def test_everything_dies_at_random(tmp_path: Path) -> None:
    dice = random.Random(os.environ.get("DULY_KILL_SEED", "31"))
    # Longer than everything takes to come back on a busy machine: else hubs say of some commands, rightly,
    # that they do not know.
    async with scene(tmp_path, patience="25") as it:
        cluster, deaths = it.cluster, 0
        assert cluster.redis is not None
        async with pressed(it.remotes, it.lock):
            for _ in range(KILLS):
                await asyncio.sleep(dice.uniform(0.2, 1))
                match dice.choice(("hub", "hub", "redis", "postgres", "lamp", "broker")):
                    case "hub":
                        await replace(dice.choice(cluster.hubs), dice.uniform(0, 1))
                    case "redis":
                        await asyncio.to_thread(cluster.redis.stop, signal.SIGKILL)
                        await asyncio.to_thread(cluster.redis.start)
                        count("kills", 1)
                    case "postgres":
                        how = dice.choice((signal.SIGINT, signal.SIGKILL))
                        await asyncio.to_thread(cluster.postgres.stop, how)
                        await asyncio.to_thread(cluster.postgres.start)
                        count("kills", how is signal.SIGKILL)
                    case "broker":
                        assert cluster.broker is not None
                        await asyncio.to_thread(cluster.broker.stop, signal.SIGKILL)
                        await asyncio.to_thread(cluster.broker.start)
                        count("kills", 1)
                    case _:
                        deaths += 1
                        await it.lamp.kill()
                        await it.lamp.start()
        await it.judge(unknown=deaths * 12)


async def test_a_hub_that_died_is_missed_and_its_devices_are_said_to_be_gone(tmp_path: Path) -> None:
    cluster = await asyncio.to_thread(lambda: Cluster(2, notifier="postgres", mqtt=False))
    try:
        tokens = await people(cluster.ledger)
        await asyncio.to_thread(cluster.start)
        one, other = cluster.hubs
        async with join(one.url, tokens["phone"]) as phone:
            phone.presence = True
            async with join(other.url, tokens["lock"]):
                assert (await phone.hear())["data"] == {"online": True}
                await asyncio.to_thread(other.stop, signal.SIGKILL)
                assert (await phone.hear())["data"] == {"online": False}
            seq_id = await phone.command("lock")
            assert (await phone.hear_of(seq_id))["error"] == "offline"
    finally:
        await asyncio.to_thread(cluster.stop)


@pytest.mark.timeout(LIMIT + 30)
async def test_the_script_starts_everything_and_says_where() -> None:
    script = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cluster", cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert script.stdout is not None
        told: dict[str, str] = {}
        async with asyncio.timeout(GUARD):
            while "accounts" not in told:
                line = await script.stdout.readline()
                assert line, "it ended"
                name, _, value = line.decode().partition(" ")
                told[name] = value.strip()
        health = await curl(f"{told['balancer']}/v1/health")
        assert health.json == {"ok": True}
        assert len(told["hubs"].split(",")) == 3
    finally:
        script.terminate()
        await script.wait()
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http:
            await http.get(told["balancer"])
