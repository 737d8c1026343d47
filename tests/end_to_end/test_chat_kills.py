"""kill -9 of the hub while people chat, at every named point and at random.

The judge stands outside: it compares what everybody was shown, and where they were told their own lines are,
with what lies in the ledger in the end.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from duly.clients.chat import Chat
from duly.core.messages import names_in
from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.end_to_end.fused import CHAT_POINTS
from tests.end_to_end.processes import HubProcess
from tests.guard import GUARD

NAMES = [f"user{i}" for i in range(6)]
LINES = 20


class ChattingPerson:
    """Says lines to this one and that one, and keeps what it is shown."""

    def __init__(self, name: str, url: str, token: str) -> None:
        self.name = name
        self.chat = Chat(url, token)
        self.shown: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.said: list[tuple[str, int, str]] = []
        self.rng = random.Random(name)

    async def listen(self) -> None:
        async for line in self.chat.lines():
            self.shown[line.conv].append((line.n, f"{line.sender}: {line.text}"))

    async def talk(self, group: str) -> None:
        for i in range(LINES):
            others = [name for name in NAMES if name != self.name]
            to = group if self.rng.random() < 0.5 else self.rng.choice(others)
            sent = await self.chat.send(to, f"{self.name} {i}")
            self.said.append((sent.conv, sent.n, f"{self.name}: {self.name} {i}"))


async def prepare(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True)
    async with await open_ledger(f"sqlite:///{folder}/ledger.db") as ledger:
        accounts = Accounts(ledger)
        return {name: await accounts.add(Role.USER, name) for name in NAMES}


async def judge(folder: Path, people: list[ChattingPerson], group: str) -> None:
    async with await open_ledger(f"sqlite:///{folder}/ledger.db?mode=ro") as ledger:
        convs = {group} | {conv for person in people for conv, _, _ in person.said}
        total = 0
        for conv in convs:
            entries = [e for e in await ledger.entries(f"chat/{conv}", 0, 10_000) if b'"text"' in e.body]
            last = (await ledger.extent(f"chat/{conv}")).last
            assert [e.n for e in await ledger.entries(f"chat/{conv}", 0, 10_000)] == list(range(1, last + 1))
            truth = {e.n: f"{names_in(e.key)[0]}: {_text(e.body)}" for e in entries}
            total += len(truth)
            for person in people:
                if conv != group and person.name not in conv.split("+"):
                    assert conv not in person.shown
                    continue
                numbers = [n for n, _ in person.shown[conv]]
                assert numbers == sorted(set(numbers)), f"{person.name} was shown {numbers} of {conv}"
                view = dict(person.shown[conv]) | {n: text for c, n, text in person.said if c == conv}
                view = {n: text for n, text in view.items() if n in truth}
                assert view == truth, f"{person.name} sees {conv} otherwise"
        assert total == len(people) * LINES
        assert len({(c, n) for p in people for c, n, _ in p.said}) == total


def _text(line: bytes) -> str:
    return str(json.loads(line)["data"]["text"])


def settled(people: list[ChattingPerson], group: str) -> bool:
    """Whether everybody was shown what all the others have said where they are."""
    said = [(person.name, conv, n) for person in people for conv, n, _ in person.said]
    for person in people:
        shown = {(conv, n) for conv, lines in person.shown.items() for n, _ in lines}
        for sender, conv, n in said:
            theirs = conv == group or person.name in conv.split("+")
            if sender != person.name and theirs and (conv, n) not in shown:
                return False
    return True


async def chat_while(folder: Path, deaths: list[str]) -> None:
    """Everybody talks while the hub dies: at its points, one after the other, or when we kill it ('')."""
    tokens = await prepare(folder)
    hub = HubProcess(folder)
    await hub.start()
    people = [ChattingPerson(name, hub.url, tokens[name]) for name in NAMES]
    for person in people:
        await person.chat.__aenter__()
    group = await people[0].chat.create_group("all", *NAMES[1:])
    listening = [asyncio.create_task(person.listen()) for person in people]
    if deaths[0]:
        await hub.kill()
        await hub.start(deaths[0])
    talking = asyncio.gather(*(person.talk(group) for person in people))
    rng = random.Random(7)
    for death in [*deaths[1:], None]:
        if deaths[0]:
            ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(hub.died()), talking]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.wait([talking], timeout=rng.random() * 0.5)
            await hub.kill()
        if hub.alive:
            break
        await hub.start(death or "")
    async with asyncio.timeout(GUARD):
        await talking
        while not settled(people, group):
            if not hub.alive:  # its point came only after all had talked
                await hub.start()
            await asyncio.sleep(0.05)
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    for person in people:
        await person.chat.stop()
    await hub.kill()
    await judge(folder, people, group)


@pytest.mark.parametrize("point", CHAT_POINTS)
async def test_the_hub_dies_at_a_point_while_people_chat(tmp_path: Path, point: str) -> None:
    await chat_while(tmp_path / "hub", [f"{point}:20", f"{point}:1"])


async def test_the_hub_is_killed_at_random_while_people_chat(tmp_path: Path) -> None:
    await chat_while(tmp_path / "hub", ["", "", ""])
