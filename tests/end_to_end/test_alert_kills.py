"""The tower as a real process, killed at named points and at random, with deliveries in flight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duly.storage import open_ledger
from tests.end_to_end.fused import TOWER_POINTS
from tests.end_to_end.processes import HubProcess
from tests.guard import GUARD, LIMIT
from tests.proof import TWO_SIZES, count
from tests.receivers import Receiver, receiver

KILLS = int(os.environ.get("DULY_ALERT_KILLS", "8"))


class Sentinel:
    """Posts its events one after the other, each until the tower says that it has it; as plain as can be."""

    def __init__(self, hub: HubProcess, name: str, token: str) -> None:
        self._hub = hub
        self._token = token
        self.name = name
        self.accepted: list[str] = []

    async def report(self, count: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http:
            for n in range(count):
                await self._report(http, f"{self.name}-{n:04d}")

    async def _report(self, http: aiohttp.ClientSession, id_: str) -> None:
        data = {
            "profile_id": "home",
            "trigger_reason": "disconnect",
            "device_address": id_,
            "timestamp": time.time_ns() // 1_000_000,
        }
        frame = {"type": "alert_event", "seq_id": id_, "data": data}
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                headers = {"Authorization": f"Bearer {self._token}"}
                url = f"{self._hub.url}/v1/messages"
                async with http.post(url, json=frame, headers=headers) as answer:
                    said = await answer.json()
                    if said["code"] in (0, 5):
                        self.accepted.append(id_)
                        return
            await asyncio.sleep(0.05)


async def everything_settles(hub: HubProcess, events: int, seconds: float = GUARD) -> dict[str, Any]:
    """Until the ledger has all events, and all of them have ended; what it then holds."""
    async with asyncio.timeout(seconds):
        while True:
            async with await open_ledger(f"sqlite:///{hub.folder}/ledger.db?mode=ro") as ledger:
                records = await ledger.of_kind("alert_event", limit=100_000)
                if len(records) == events and all(record.state.terminal for record in records):
                    found = {record.message.id: record.state.word for record in records}
                    made = [await ledger.deliveries(record.message.key) for record in records]
                    return {"states": found, "deliveries": [one for many in made for one in many]}
            await asyncio.sleep(0.2)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "notifications" / "told.jsonl"


async def start(
    tmp_path: Path, hook: Receiver, lines: Path, names: list[str]
) -> tuple[HubProcess, list[Sentinel]]:
    hub = HubProcess(tmp_path / "hub", allow_private_webhooks="true")
    tokens = await hub.prepare([], [], names, hook.url, f"file:{lines.name}?doubt=repeat")
    return hub, [Sentinel(hub, name, tokens[name]) for name in names]


def check(hook: Receiver, lines: Path, held: dict[str, Any], wanted: set[str]) -> None:
    assert set(held["states"]) == wanted, "every event is in the tower, once"
    untold = tuple(id_.encode() for id_ in wanted - set(hook.events))
    assert not untold, [one for one in held["deliveries"] if one.ref.key.endswith(untold)]
    assert set(hook.events) == wanted
    assert len(hook.events) == len(wanted), "whoever keeps ids was told of each once"
    for bodies in hook.taken.values():
        assert all(body == bodies[0] for body in bodies), "the same key always means the same"
    told = []
    for line in lines.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # a kill in the middle of a write leaves a part of a line
            told.append(json.loads(line))
    for id_, times in Counter(one["data"]["event"] for one in told).items():
        assert times <= 2, f"{id_} was told {times} times"
        repeats = [one for one in told if one["data"]["event"] == id_ and one["data"].get("repeat")]
        assert len(repeats) >= times - 1, "a repeat says so"
    refs = Counter((one.ref.key, one.ref.recipient, one.ref.round) for one in held["deliveries"])
    assert set(refs.values()) == {1}
    assert len(refs) == 2 * len(wanted)


@pytest.mark.parametrize("point", TOWER_POINTS)
async def test_a_tower_killed_at_a_point_loses_nothing_and_repeats_nothing(
    tmp_path: Path, lines: Path, point: str
) -> None:
    async with receiver() as hook:
        hub, sentinels = await start(tmp_path, hook, lines, ["gate"])
        await hub.start(f"{point}:7")
        reporting = asyncio.create_task(sentinels[0].report(20))
        await hub.died()
        await hub.start()
        await reporting
        try:
            held = await everything_settles(hub, 20)
        finally:
            await hub.kill()
        check(hook, lines, held, set(sentinels[0].accepted))


@TWO_SIZES
@pytest.mark.timeout(LIMIT + 10 * KILLS)
async def test_a_tower_killed_at_random_again_and_again_tells_everybody_once(
    tmp_path: Path, lines: Path, whole: bool
) -> None:
    kills = KILLS if whole else 5
    rng = random.Random(os.environ.get("DULY_KILL_SEED", "7"))
    async with receiver() as hook:
        hub, sentinels = await start(tmp_path, hook, lines, ["gate", "barn", "yard"])
        await hub.start()
        reporting = asyncio.gather(*(sentinel.report(12 * kills) for sentinel in sentinels))
        for _ in range(kills):
            hook.words += rng.choices(["200", "500", "close", "close after"], [6, 1, 1, 1], k=15)
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            await hub.kill()
            await hub.start()
        await reporting
        hook.words.clear()
        try:
            held = await everything_settles(hub, 36 * kills, 40 + 4 * kills)
        finally:
            await hub.kill()
        check(hook, lines, held, {id_ for sentinel in sentinels for id_ in sentinel.accepted})
        count("messages under faults", 36 * kills)
