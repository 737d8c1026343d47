"""kill -9 of the hub, at every named point and at random, under load.

The law: what was accepted is not lost, nothing is done twice by the device's own log, and every sender learns
how each of its commands ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from pathlib import Path

import aiohttp

from tests.wire.hub_process import POINTS, HubProcess
from tests.wire.raw import Closed, Ids, Json, join

Key = tuple[str, str]
BROKEN = (Closed, aiohttp.ClientError, OSError, TimeoutError, AssertionError)


class Lock:
    """A device as one would be built: it remembers what it did, and writes it down before it says so."""

    def __init__(self, hub: HubProcess, token: str, log: Path) -> None:
        self._hub, self._token, self._log = hub, token, log
        self._answers: dict[Key, Json] = {}

    @property
    def effects(self) -> Counter[Key]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return Counter(tuple(json.loads(line)) for line in lines)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with join(self._hub.url, self._token) as peer:
                    while True:
                        command = await peer.hear(60)
                        key = (command["from"], command["seq_id"])
                        if key not in self._answers:
                            with self._log.open("a") as log:
                                log.write(json.dumps(key) + "\n")
                            self._answers[key] = {"did": command["data"]}
                        await peer.ack(command, data=self._answers[key])
            await asyncio.sleep(0.02)


class Remote:
    """An app as one would be built: it sends again, with the same id, until it knows the end."""

    def __init__(self, hub: HubProcess, name: str, token: str, *, ordered: bool) -> None:
        self._hub, self.name, self._token, self._ordered = hub, name, token, ordered
        self._ids = Ids()
        self._waiting: dict[str, tuple[Json, asyncio.Future[Json]]] = {}
        self._again = asyncio.Event()
        self.accepted: set[str] = set()
        self.ends: dict[str, Json] = {}
        self.trouble: list[Json] = []

    async def send(self, to: str) -> None:
        seq_id = self._ids()
        frame: Json = {"type": "lock_control", "seq_id": seq_id, "to": to, "data": seq_id}
        if not self._ordered:
            frame["order"] = False
        ended: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[seq_id] = (frame, ended)
        self._again.set()
        self.ends[seq_id] = await ended
        del self._waiting[seq_id]

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with join(self._hub.url, self._token) as peer:
                    sending = asyncio.create_task(self._send_all(peer.socket))
                    try:
                        while True:
                            self._hear(await peer.hear(60))
                    finally:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
            await asyncio.sleep(0.02)

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        sent: set[str] = set()
        self._sent = sent
        while True:
            self._again.clear()
            for seq_id, (frame, _) in list(self._waiting.items()):
                if seq_id not in sent:
                    sent.add(seq_id)
                    await socket.send_str(json.dumps(frame))
            await self._again.wait()

    def _hear(self, frame: Json) -> None:
        seq_id = frame.get("seq_id", "")
        if seq_id not in self._waiting:
            return
        match frame["type"], frame["code"]:
            case "server_ack", 0 if seq_id in self.accepted:
                self.trouble.append(frame | {"what": "it was accepted before, and lost"})
            case "server_ack", 0 | 5:
                self.accepted.add(seq_id)
            case "server_ack", 1 | 4:
                asyncio.get_running_loop().call_later(0.03, self._retry, seq_id)
            case "server_ack", _:
                self.trouble.append(frame)
            case _:
                _, ended = self._waiting[seq_id]
                if not ended.done():
                    ended.set_result(frame)

    def _retry(self, seq_id: str) -> None:
        self._sent.discard(seq_id)
        self._again.set()


async def press(remote: Remote, stop: asyncio.Event) -> None:
    """One command after the other to both devices, a few at a time."""

    async def one(to: str) -> None:
        while not stop.is_set():
            await remote.send(to)
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as tasks:
        for to in ("lock", "lamp") * 3:
            tasks.create_task(one(to))


async def test_killed_at_every_point_and_at_random(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub")
    tokens = await hub.prepare(["phone", "tablet"], ["lock", "lamp"])
    devices = [Lock(hub, tokens[name], tmp_path / name) for name in ("lock", "lamp")]
    remotes = [
        Remote(hub, "phone", tokens["phone"], ordered=True),
        Remote(hub, "tablet", tokens["tablet"], ordered=False),
    ]
    dice = random.Random(20)
    points = [f"{point}:{dice.randint(5, 60)}" for point in POINTS]
    await hub.start(points[0])
    living = [asyncio.create_task(run) for run in (*(d.run() for d in devices), *(r.run() for r in remotes))]
    stop = asyncio.Event()
    pressing = [asyncio.create_task(press(remote, stop)) for remote in remotes]
    try:
        for point in [*points[1:], ""]:
            async with asyncio.timeout(15):
                await hub.died()
            await hub.start(point)
        for _ in range(3):
            await asyncio.sleep(dice.uniform(0.02, 0.4))
            await hub.kill()
            await hub.start()
        stop.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*pressing)
        await judge(hub, tokens, devices, remotes)
    finally:
        for task in (*living, *pressing):
            task.cancel()
        await asyncio.gather(*living, *pressing, return_exceptions=True)
        await hub.kill()


async def judge(hub: HubProcess, tokens: dict[str, str], devices: list[Lock], remotes: list[Remote]) -> None:
    effects = sum((device.effects for device in devices), Counter[Key]())
    assert [key for key, times in effects.items() if times > 1] == [], "done twice"
    for remote in remotes:
        assert remote.trouble == []
        assert len(remote.ends) > 100, "too little load to say anything"
        for seq_id, end in remote.ends.items():
            times = effects[remote.name, seq_id]
            assert end["state"] in ("done", "superseded"), end
            assert times == (1 if end["state"] == "done" else 0), (end, times)
            if end["state"] == "done":
                assert end["data"] == {"did": seq_id}
        assert remote.accepted <= set(remote.ends), "accepted and lost"
        states = Counter(end["state"] for end in remote.ends.values())
        assert states["done"] > 100, states
        assert remote.name == "phone" or states["superseded"] == 0
        # Whoever asks again, hears the same.
        async with join(hub.url, tokens[remote.name]) as peer:
            for seq_id, end in dice_sample(remote.ends, 20):
                order = {} if remote.name == "phone" else {"order": False}
                to = end["from"]
                await peer.say("lock_control", seq_id=seq_id, to=to, data=seq_id, **order)
                said = await peer.hear_of(seq_id)
                assert (said["code"], said["state"]) == (5, end["state"])
                again = await peer.hear_of(seq_id)
                assert again == end
    assert sum((device.effects for device in devices), Counter[Key]()) == effects
    assert "Traceback" not in hub.errors, hub.errors


def dice_sample(ends: dict[str, Json], count: int) -> list[tuple[str, Json]]:
    return random.Random(4).sample(sorted(ends.items()), count)
