"""A hundred people on three hubs, while hubs, Redis, PostgreSQL and their own connections die.

They speak plain WebSocket (nothing of duly's clients), send again with the same id what was not answered,
and come back to another hub with what they have seen. The judge reads the tables of the ledger and compares:
every view of every conversation is the same, complete, in order, without repeats, and all that was said is
there once.

`make test` lets something die once among thirty of them; `DULY_KILLS` says how often something dies in the
whole, and `DULY_KILL_SEED` makes it another one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import asyncpg
import pytest
from deploy.cluster import Cluster, HubServer

from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.end_to_end.processes import tracebacks
from tests.proof import TWO_SIZES, count

KILLS = int(os.environ.get("DULY_KILLS", "8"))
GROUPS = 5
RESEND = 2.0


class Size(NamedTuple):
    """How many people there are, how much they say, at least, and how often something dies; on a busy machine
    each death takes seconds."""

    people: int
    lines: int
    deaths: int


ONE_ROUND, WHOLE = Size(30, 50, 1), Size(100, 200, KILLS)
Line = tuple[str, str]
"""(who said it, under which id)"""


class Talker:
    """One person with one device, who notes what they see."""

    def __init__(self, name: str, token: str, hubs: list[HubServer], dice: random.Random) -> None:
        self.name = name
        self._token, self._hubs, self._dice = token, hubs, dice
        self._ids = (f"{time.time_ns() // 1_000_000}_{n}" for n in itertools.count())
        self.unanswered: dict[str, dict[str, Any]] = {}
        self.said: dict[str, tuple[str, int]] = {}
        self.views: dict[str, dict[int, Line]] = {}
        self._reached: dict[str, int] = {}
        self.connections = 0
        self.trouble: list[object] = []
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def live(self, http: aiohttp.ClientSession) -> None:
        while True:
            # A hub that hangs up before its welcome sends no JSON: aiohttp calls that a TypeError.
            with suppress(aiohttp.ClientError, OSError, TimeoutError, TypeError):
                url = self._dice.choice(self._hubs).url
                async with http.ws_connect(f"{url}/v1/ws", timeout=aiohttp.ClientWSTimeout(1)) as socket:
                    await self._talk(socket)
            self._socket = None
            await asyncio.sleep(self._dice.uniform(0.1, 0.4))

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        cursors = {conv: self.reached(conv) for conv in self.views}
        await socket.send_json({"type": "auth", "token": self._token, "cursors": cursors})
        if (await socket.receive_json(timeout=10))["type"] != "welcome":
            return
        self.connections += 1
        self._socket = socket
        for frame in list(self.unanswered.values()):
            await socket.send_json(frame)
        async for message in socket:
            await self._hear(socket, json.loads(message.data))

    async def _hear(self, socket: aiohttp.ClientWebSocketResponse, frame: dict[str, Any]) -> None:
        match frame:
            case {"type": "server_ack", "seq_id": seq_id, "code": 0 | 5, "conv": conv, "n": n}:
                self.unanswered.pop(seq_id, None)
                self._note(conv, n, (self.name, seq_id))
                if self.said.setdefault(seq_id, (conv, n)) != (conv, n):
                    self.trouble.append(("two places", seq_id, self.said[seq_id], (conv, n)))
            case {"type": "server_ack", "code": code} if code != 4:
                self.trouble.append(frame)
            case {"type": "server_ack" | "receipt" | "presence" | "typing"}:
                pass
            case {"conv": conv, "n": n, "from": who, "seq_id": seq_id}:
                self._note(conv, n, (who, seq_id))
                await socket.send_json({"type": "ack", "conv": conv, "n": self.reached(conv)})

    def _note(self, conv: str, n: int, line: Line) -> None:
        if self.views.setdefault(conv, {}).setdefault(n, line) != line:
            self.trouble.append(("two lines under one number", conv, n))

    def reached(self, conv: str) -> int:
        """The last line before which there is none missing."""
        view, n = self.views[conv], self._reached.get(conv, 0)
        while n + 1 in view:
            n += 1
        self._reached[conv] = n
        return n

    async def say(self, to: str) -> None:
        seq_id = next(self._ids)
        frame = {"type": "group_chat" if to.startswith("#") else "one_chat", "seq_id": seq_id, "to": to}
        self.unanswered[seq_id] = frame | {"data": {"text": f"{self.name} {seq_id}"}}
        await self.press()

    async def press(self) -> None:
        """Send what is not answered, once more."""
        with suppress(ConnectionError, RuntimeError):
            for frame in list(self.unanswered.values())[:20]:
                if self._socket is not None and not self._socket.closed:
                    await self._socket.send_json(frame)

    async def stumble(self) -> None:
        if self._socket is not None:
            await self._socket.close()


async def settle(ledger_url: str, people: int) -> dict[str, str]:
    async with await open_ledger(ledger_url) as ledger:
        accounts = Accounts(ledger)
        return {f"p{n}": await accounts.add(Role.USER, f"p{n}") for n in range(people)}


async def make_groups(hub: HubServer, tokens: dict[str, str], dice: random.Random) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    async with aiohttp.ClientSession() as http:
        for n in range(GROUPS):
            members = dice.sample(sorted(tokens), 12)
            frame = {
                "type": "group_create",
                "seq_id": f"{time.time_ns() // 1_000_000}_{10_000 + n}",
                "data": {"name": f"club {n}", "members": members[1:]},
            }
            own = {"Authorization": f"Bearer {tokens[members[0]]}"}
            async with http.post(f"{hub.url}/v1/messages", json=frame, headers=own) as answer:
                groups[(await answer.json())["data"]["group"]] = set(members)
    return groups


async def stored(ledger_url: str) -> dict[str, dict[int, Line]]:
    """What the tables say: conversation → number → who said it, under which id."""
    connection = await asyncpg.connect(ledger_url)
    try:
        rows = await connection.fetch("SELECT stream, n, key FROM duly_entries WHERE stream LIKE 'chat/%'")
    finally:
        await connection.close()
    found: dict[str, dict[int, Line]] = {}
    for stream, n, key in rows:
        who, _, seq_id = bytes(key)[6:].partition(b"\0")
        found.setdefault(stream.removeprefix("chat/"), {})[n] = (who.decode(), seq_id.decode())
    return found


async def trouble(cluster: Cluster, dice: random.Random, deaths: int) -> Counter[str]:
    """Something dies, again and again."""
    done: Counter[str] = Counter()
    while done.total() < deaths:
        await asyncio.sleep(dice.uniform(0.3, 1.2))
        what = dice.choice(["hub", "hub", "redis", "postgres"])
        done[what] += 1
        if what == "hub":
            hub = dice.choice(cluster.hubs)
            await asyncio.to_thread(hub.stop, signal.SIGKILL)
            await asyncio.sleep(dice.uniform(0, 1))
            await asyncio.to_thread(hub.start)
            count("kills", 1)
        elif what == "redis":
            assert cluster.redis is not None
            await asyncio.to_thread(cluster.redis.stop, signal.SIGKILL)
            await asyncio.sleep(dice.uniform(0, 1))
            await asyncio.to_thread(cluster.redis.start)
            count("kills", 1)
        else:
            await asyncio.to_thread(cluster.postgres.stop, signal.SIGKILL)
            await asyncio.to_thread(cluster.postgres.start)
            count("kills", 1)
    return done


def wrong(talkers: list[Talker], there: dict[str, dict[int, Line]], groups: dict[str, set[str]]) -> list[str]:
    """Whose view differs from what is stored, and what was said and is not there."""
    found: list[str] = []
    for conv, lines in there.items():
        if sorted(lines) != list(range(1, len(lines) + 1)):
            found.append(f"{conv} has gaps")
        members = groups.get(conv) or set(conv.split("+")) if not conv.startswith("~") else set()
        found += [
            f"{one.name} sees {len(one.views.get(conv, {}))} of {len(lines)} in {conv}"
            for one in talkers
            if one.name in members and one.views.get(conv, {}) != lines
        ]
    places = Counter(line for lines in there.values() for line in lines.values())
    found += [f"stored twice: {line}" for line, times in places.items() if times > 1]
    found += [f"{one.name} had no answer to {len(one.unanswered)}" for one in talkers if one.unanswered]
    found += [
        f"lost: {one.name} {id_}" for one in talkers for id_ in one.said if (one.name, id_) not in places
    ]
    return found + [f"{one.name}: {what}" for one in talkers for what in one.trouble]


@TWO_SIZES
@pytest.mark.timeout(300 + 5 * KILLS)
async def test_everybody_sees_the_same_while_everything_dies(tmp_path: Path, whole: bool) -> None:
    size = WHOLE if whole else ONE_ROUND
    dice = random.Random(os.environ.get("DULY_KILL_SEED", "5"))
    cluster = await asyncio.to_thread(lambda: Cluster(mqtt=False))
    try:
        tokens = await settle(cluster.ledger, size.people)
        await asyncio.to_thread(cluster.start)
        groups = await make_groups(cluster.hubs[0], tokens, dice)
        talkers = [Talker(name, token, cluster.hubs, dice) for name, token in tokens.items()]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            lives = [asyncio.create_task(one.live(http)) for one in talkers]
            breaking = asyncio.create_task(trouble(cluster, dice, size.deaths))
            said = 0
            while not breaking.done() or said <= size.lines:
                one = dice.choice(talkers)
                mine = [group for group, members in groups.items() if one.name in members]
                await one.say(
                    dice.choice(mine) if mine and dice.random() < 0.4 else dice.choice(talkers[:20]).name
                )
                said += 1
                if dice.random() < 0.05:
                    await dice.choice(talkers).stumble()
                if dice.random() < 0.05:
                    await dice.choice(talkers).press()
                await asyncio.sleep(0.01)
            assert (await breaking).total() >= size.deaths
            differences = ["not looked yet"]
            for _ in range(60):
                await asyncio.sleep(RESEND)
                for one in talkers:
                    await one.press()
                differences = wrong(talkers, await stored(cluster.ledger), groups)
                if not differences:
                    break
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
        assert [life.exception() for life in lives if not life.cancelled()] == []
        assert differences == []
        assert said > size.lines
        count("messages under faults", said)
        assert sum(one.connections for one in talkers) > size.people
        errors = "".join(hub.errors for hub in cluster.hubs)
        assert "Traceback" not in errors, tracebacks(errors)
    finally:
        await asyncio.to_thread(cluster.stop)
