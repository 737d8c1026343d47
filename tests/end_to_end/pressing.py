"""Apps and a device that duly did not write, for a hub that is being killed; and who judges what came of it.

The judge's law: what was accepted is not lost, nothing is done twice by the devices' own files, every sender
learns how each of its commands ended, and that is what the files say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import aiohttp
import asyncpg

from tests.end_to_end.processes import tracebacks
from tests.end_to_end.raw import Closed, Ids, Json, join
from tests.guard import GUARD, LIMIT
from tests.proof import count

Key = tuple[str, str]
ENDS = ("done", "superseded", "unknown")
BROKEN = (Closed, aiohttp.ClientError, OSError, TimeoutError, AssertionError)


class Address(Protocol):
    """Where clients connect: a hub, a balancer, or several hubs of which each asking names another."""

    @property
    def url(self) -> str: ...


class Server(Address, Protocol):
    """A hub, or several, and what they log."""

    @property
    def errors(self) -> str:
        """What it has complained about."""
        ...


class Doer(Protocol):
    @property
    def did(self) -> list[Key]:
        """What it did, in order, by its own file: (app, id)."""
        ...


class Lock:
    """A device as one would be built: it remembers what it did, and writes it down before it says so."""

    def __init__(self, hub: Address, token: str, log: Path) -> None:
        self._hub, self._token, self._log = hub, token, log
        self._answers: dict[Key, Json] = {}

    @property
    def did(self) -> list[Key]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [tuple(json.loads(line)) for line in lines]

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with join(self._hub.url, self._token) as peer:
                    while True:
                        command = await peer.hear(60)
                        peer.heard.clear()
                        if command["type"] == "server_ack":
                            continue  # the hub cannot serve it now, and hangs up
                        key = (command["from"], command["seq_id"])
                        if key not in self._answers:
                            with self._log.open("a") as log:
                                log.write(json.dumps(key) + "\n")
                            self._answers[key] = command["data"]
                        await peer.ack(command, data=self._answers[key])
            await asyncio.sleep(0.02)


class Remote:
    """An app as one would be built: it sends again, with the same id, until it knows the end."""

    lasts: float | None = None
    """Seconds until its commands expire, if not as the hub decides: half a minute, which is less than some
    starts of a hub on a busy machine."""

    def __init__(self, hub: Address, name: str, token: str, *, ordered: bool) -> None:
        self._hub, self.name, self.token, self.ordered = hub, name, token, ordered
        self._ids = Ids()
        self._waiting: dict[str, tuple[Json, asyncio.Future[Json]]] = {}
        self._again = asyncio.Event()
        self._sent: set[str] = set()
        self.frames: dict[str, Json] = {}
        self.accepted: set[str] = set()
        self.ends: dict[str, Json] = {}
        self._done: Counter[str] = Counter()
        """its commands that are done, by device"""
        self.trouble: list[Json] = []

    async def send(self, to: str) -> None:
        seq_id = self._ids()
        frame: Json = {"type": "lock_control", "seq_id": seq_id, "to": to}
        frame |= {"data": {"open": True, "n": seq_id}} | ({} if self.ordered else {"order": False})
        if self.lasts is not None:
            frame["exp"] = round((time.time() + self.lasts) * 1000)
        ended: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self.frames[seq_id] = frame
        self._waiting[seq_id] = (frame, ended)
        self._again.set()
        await ended
        del self._waiting[seq_id]

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with join(self._hub.url, self.token) as peer:
                    sending = asyncio.create_task(self._send_all(peer.socket))
                    try:
                        while True:
                            self._hear(await peer.hear(60))
                            peer.heard.clear()
                    finally:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
            await asyncio.sleep(0.02)

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._sent.clear()
        while True:
            self._again.clear()
            for seq_id, (frame, _) in list(self._waiting.items()):
                if seq_id not in self._sent:
                    self._sent.add(seq_id)
                    await socket.send_str(json.dumps(frame))
            await self._again.wait()

    def _hear(self, frame: Json) -> None:
        seq_id = frame.get("seq_id", "")
        if frame["type"] == "ack":
            self._learn(seq_id, frame)
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

    def _learn(self, seq_id: str, end: Json) -> None:
        """One end, unless it was unknown: that may be settled once."""
        known = self.ends.get(seq_id)
        if known is None or known["state"] == "unknown":
            self.ends[seq_id] = end
            self._done[self.frames[seq_id]["to"]] += end["state"] == "done"
        elif known != end:
            self.trouble.append(end | {"what": f"it had ended as {known}"})

    def done(self, to: str) -> int:
        """How many of its commands to a device are done."""
        return self._done[to]

    def under_way(self) -> dict[str, str]:
        """The commands that have not ended, and whether the hub has accepted them."""
        return {one: "accepted" if one in self.accepted else "sent" for one in self._waiting}

    def _retry(self, seq_id: str) -> None:
        self._sent.discard(seq_id)
        self._again.set()


async def press(remote: Remote, stop: asyncio.Event, at_once: int) -> None:
    """One command after the other to both devices, so many to each at a time."""

    async def one(to: str) -> None:
        while not stop.is_set():
            await remote.send(to)
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as tasks:
        for to in TARGETS * at_once:
            tasks.create_task(one(to))


TARGETS = ("lock", "lamp")
AT_ONCE = 3
"""Commands of every app to every device that are under way at once."""
LEAST = 20
"""Commands of every app to every device that are done before anything can be said of a test."""


class Load:
    """How far the commands of several apps have come."""

    def __init__(self, remotes: list[Remote]) -> None:
        self._remotes = remotes

    def _done(self) -> int:
        """Commands that are done, of the app and the device that have fewest."""
        return min(one.done(to) for one in self._remotes for to in TARGETS)

    async def more(self, commands: int) -> None:
        """Until so many more of every app to every device are done: what was broken works again."""
        await self._reach(self._done() + commands)

    async def enough(self) -> None:
        """Until so many of every app are done that something can be said of it."""
        await self._reach(LEAST + 1)

    async def _reach(self, done: int) -> None:
        async with asyncio.timeout(GUARD):
            while self._done() < done:
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def pressed(remotes: list[Remote], *more: Lock, at_once: int = AT_ONCE) -> AsyncIterator[Load]:
    """Under load while the block runs and until enough was done, and then until everything has ended."""
    clients: list[Remote | Lock] = [*remotes, *more]
    living = [asyncio.create_task(one.run()) for one in clients]
    stop, load = asyncio.Event(), Load(remotes)
    pressing = [asyncio.create_task(press(remote, stop, at_once)) for remote in remotes]
    try:
        yield load
        await load.enough()
        stop.set()
        _, late = await asyncio.wait(pressing, timeout=LIMIT)
        assert not late, [one.under_way() for one in remotes]
        await asyncio.gather(*pressing)
    finally:
        ended = [task.exception() for task in living if task.done()]
        for task in (*living, *pressing):
            task.cancel()
        await asyncio.gather(*living, *pressing, return_exceptions=True)
        assert not ended, f"a client of the test has ended: {ended}"


async def judge(
    hub: Server,
    devices: list[Doer],
    remotes: list[Remote],
    *,
    unknown: int = 0,
    ledger: Path | str | None = None,
    ends: tuple[str, ...] = ENDS,
) -> None:
    """`unknown`: of how many commands it may be so that nobody can tell. `ledger`: the hub's file, or the URL
    of its PostgreSQL, which has to say the same; it is read without any code of duly's. `ends`: how commands
    may end."""
    did = [key for device in devices for key in device.did]
    effects = Counter(did)
    assert [key for key, times in effects.items() if times > 1] == [], "done twice"
    sent = {
        (remote.name, seq_id): frame["to"] for remote in remotes for seq_id, frame in remote.frames.items()
    }
    for device in devices:
        assert len({sent.get(key) for key in device.did}) <= 1, "done elsewhere, or never sent"
    for remote in remotes:
        assert remote.trouble == []
        assert remote.accepted <= set(remote.ends), "accepted and lost"
        states = Counter(end["state"] for end in remote.ends.values())
        assert states["done"] > LEAST, f"too little load to say anything: {states}"
        strange = [end for end in remote.ends.values() if end["state"] not in ends]
        assert not strange, strange
        assert remote.ordered or states["superseded"] == 0
        for seq_id, end in remote.ends.items():
            times = effects[remote.name, seq_id]
            match end["state"]:
                case "done":
                    assert (times, end["data"]["n"]) == (1, seq_id), (end, times)
                case "superseded" | "expired":
                    assert times == 0, end
        for device in devices:
            numbers = [int(seq_id.split("_")[1]) for app, seq_id in device.did if app == remote.name]
            late = [(n, then) for n, then in pairwise(numbers) if then < n]
            assert not (remote.ordered and late), f"out of order: {late}"
        await _ask_again(hub, remote)
    doubts = {
        (remote.name, seq_id): end
        for remote in remotes
        for seq_id, end in remote.ends.items()
        if end["state"] == "unknown"
    }
    assert len(doubts) <= unknown, doubts
    since = Counter(key for device in devices for key in device.did)
    assert max(since.values(), default=0) <= 1, "done twice"
    # A device that has just started may still do what nobody could tell of; asking again causes nothing.
    assert set(since - effects) <= doubts.keys(), "done because it was asked for again"
    assert "Traceback" not in hub.errors, tracebacks(hub.errors)
    if ledger is not None:
        compare(await dump(ledger), remotes)
    count("messages under faults", sum(len(remote.ends) for remote in remotes))


STATES = {10: "done", 11: "failed", 12: "expired", 13: "superseded", 14: "cancelled", 15: "unknown"}


async def dump(ledger: Path | str) -> dict[tuple[str, str], list[str]]:
    """What a hub's ledger says of every command: the states by the device and the id that its data names."""
    rows = await (_rows_of_a_file(ledger) if isinstance(ledger, Path) else _rows_of_postgres(ledger))
    found: dict[tuple[str, str], list[str]] = {}
    for recipient, body, state in rows:
        said = re.search(rb'"n":\s*"([0-9_]+)"', body)
        assert said, body
        found.setdefault((recipient, said[1].decode()), []).append(STATES.get(state, f"open ({state})"))
    return found


async def _rows_of_a_file(ledger: Path) -> list[tuple[str, bytes, int]]:
    """Its tables are complete once its journal is empty."""
    db = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    try:
        async with asyncio.timeout(GUARD):
            while db.execute("SELECT count(*) FROM journal").fetchone() != (0,):
                await asyncio.sleep(0.05)
        return db.execute(
            "SELECT recipient, body, state FROM messages WHERE kind = 'lock_control'"
        ).fetchall()
    finally:
        db.close()


async def _rows_of_postgres(ledger: str) -> list[tuple[str, bytes, int]]:
    db = await asyncpg.connect(ledger)
    try:
        rows = await db.fetch("SELECT recipient, body, state FROM duly_messages WHERE kind = 'lock_control'")
        return [tuple(row) for row in rows]
    finally:
        await db.close()


def compare(stored: dict[tuple[str, str], list[str]], remotes: list[Remote]) -> None:
    """The ledger knows every command with the end that its sender has learned, and no other command."""
    learned: dict[tuple[str, str], list[str]] = {}
    for remote in remotes:
        for seq_id, end in remote.ends.items():
            learned.setdefault((remote.frames[seq_id]["to"], seq_id), []).append(end["state"])
    differ = {
        key
        for key in stored.keys() | learned.keys()
        if sorted(stored.get(key, [])) != sorted(learned.get(key, []))
    }
    settled = {key for key in differ if "unknown" in learned.get(key, ()) and key in stored}
    assert not differ - settled, {key: (stored.get(key), learned.get(key)) for key in differ - settled}


async def _ask_again(hub: Server, remote: Remote) -> None:
    """Whoever asks again hears the same."""
    async with join(hub.url, remote.token) as peer:
        for seq_id, end in random.Random(4).sample(sorted(remote.ends.items()), 20):
            frame = dict(remote.frames[seq_id])
            await peer.say(frame.pop("type"), **frame)
            said = await peer.hear_of(seq_id)
            assert (said["code"], said["state"]) == (5, end["state"])
            again = await peer.hear_of(seq_id)
            assert again == end, (again, end)
