"""Tens of thousands of commands, chat lines and alerts through one hub, and of tasks between two nodes, while
frames are dropped, repeated, overtaken, delayed and cut off, the hub's clock is set by an hour, and the hub
stands still; before a judge that reads only files.

`DULY_FLOOD` is how many messages there are, `DULY_FLOOD_SEED` what the faults are drawn from.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

import aiohttp
import pytest
from aiohttp import web

from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.end_to_end.flood import (
    FloodApp,
    FloodClient,
    FloodDevice,
    FloodPerson,
    FloodSender,
    FloodSentinel,
    NetworkDamage,
)
from tests.end_to_end.flood_judge import judge, judge_tasks
from tests.end_to_end.fused import CLOCK
from tests.end_to_end.processes import HubProcess, tracebacks
from tests.end_to_end.test_chaos import NodeProcess, Parrot, SlowProxy
from tests.guard import GUARD, LIMIT
from tests.proof import count
from tests.servers import Mosquitto

FLOOD: Final = int(os.environ.get("DULY_FLOOD", "20000"))
SEED: Final = os.environ.get("DULY_FLOOD_SEED", "1")
TASKS: Final = FLOOD // 20
"""… of which are tasks between two nodes."""
pytestmark = [pytest.mark.proof, pytest.mark.timeout(4 * LIMIT + FLOOD / 50)]
APPS, DEVICES, PEOPLE = 4, 4, 4
WINDOW: Final = {"app": 60, "person": 25, "guard": 20}
"""Messages of one client that are under way at once."""
EVENTS: Final = 10_000
"""Messages after which the hub's clock is set, or the hub stands still."""


async def _accounts(hub: HubProcess, hook: str) -> dict[str, str]:
    apps, devices = [f"app{n}" for n in range(APPS)], [f"dev{n}" for n in range(DEVICES)]
    tokens = await hub.prepare(apps, devices, ["guard0"], hook)
    async with await open_ledger(hub.ledger_url) as ledger:
        accounts = Accounts(ledger)
        for n in range(PEOPLE):
            tokens[f"person{n}"] = await accounts.add(Role.USER, f"person{n}")
    return tokens


async def make_group(hub: HubProcess, token: str, members: Sequence[str]) -> str:
    """Make a group of a person's, with these others; its name."""
    frame = {
        "type": "group_create", "seq_id": f"{time.time_ns() // 1_000_000}_900000000",
        "data": {"name": "all", "members": [*members]},
    }  # fmt: skip
    own = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{hub.url}/v1/messages", json=frame, headers=own) as answer,
    ):
        return str((await answer.json())["data"]["group"])


class Hook:
    """A receiver of webhooks: it writes down the event and the delivery that it was told of."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "told").open("w", buffering=1)
        self.events: set[str] = set()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/hook", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"

    async def _serve(self, request: web.Request) -> web.Response:
        data = (await request.json())["data"]
        for one in data.get("events", [data]):
            self.events.add(one["event"])
            self._file.write(f'["{one["event"]}", "{one["delivery"]}", ""]\n')
        return web.Response()

    async def stop(self) -> None:
        await self._runner.cleanup()
        self._file.close()


def _clients(
    hub: HubProcess, tokens: dict[str, str], folder: Path, group: str, many: int, damage: NetworkDamage
) -> list[FloodClient]:
    def of(name: str) -> tuple[str, str, str, Path, NetworkDamage, str]:
        return hub.url, name, tokens[name], folder, damage, SEED

    devices = [f"dev{n}" for n in range(DEVICES)]
    people = [f"person{n}" for n in range(PEOPLE)]
    commands, lines, alerts = many * 7 // 10 // APPS, many * 28 // 100 // PEOPLE, many * 2 // 100
    return [
        *(FloodDevice(*of(name)) for name in devices),
        *(
            FloodApp(*of(f"app{n}"), devices=devices, ordered=n % 2 == 0, window=WINDOW["app"], many=commands)
            for n in range(APPS)
        ),
        *(
            FloodPerson(
                *of(name), others=[group, *(other for other in people if other != name)],
                window=WINDOW["person"], many=lines,
            )
            for name in people
        ),
        FloodSentinel(*of("guard0"), window=WINDOW["guard"], many=alerts),
    ]  # fmt: skip


async def _trouble(hub: HubProcess, senders: list[FloodSender], wrong: Path, dice: Random) -> int:
    """Set the hub's clock and let the hub stand still, now and then; how often it was set ahead."""
    ahead, next_ = 0, EVENTS // 2
    while not all(one.finished.is_set() for one in senders):
        await asyncio.sleep(0.05)
        if sum(one.sent for one in senders) < next_:
            continue
        next_ += EVENTS
        what = dice.choice(("behind", "ahead", "still", "still"))
        if what == "still":
            hub.suspend()
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            hub.resume()
        else:
            ahead += 1  # or it is set ahead when it is right again
            wrong.write_text("3600" if what == "ahead" else "-3600")
            os.kill(hub.pid, signal.SIGUSR1)
            await asyncio.sleep(dice.uniform(0.2, 1))
            wrong.write_text("0")
            os.kill(hub.pid, signal.SIGUSR1)
        count("faults", 1)
    return ahead


async def until_told(people: list[FloodPerson], hook: Hook, alerts: int) -> None:
    """Until every person was told every line, and the receiver of webhooks every alert."""
    async with asyncio.timeout(2 * GUARD):
        for person in people:
            person.hang_up()  # what was lost before the end is told at the next connection
        while len(hook.events) < alerts:
            await asyncio.sleep(0.05)
        before: object = None
        while True:
            furthest: dict[str, int] = {}
            for person in people:
                for conv, n in person.whole.items():
                    furthest[conv] = max(n, furthest.get(conv, 0))
            behind = [p.name for p in people if any(n < furthest[conv] for conv, n in p.whole.items())]
            if not behind and before == furthest:
                break
            before = furthest
            await asyncio.sleep(0.5)


async def test_a_flood_of_messages_through_a_bad_network(tmp_path: Path) -> None:
    many, damage, folder = FLOOD - TASKS, NetworkDamage(), tmp_path / "histories"
    folder.mkdir()
    wrong = tmp_path / "clock"
    wrong.write_text("0")
    hook = Hook(folder)
    hub = HubProcess(tmp_path / "hub", allow_private_webhooks="true")
    hub.preload = {CLOCK: str(wrong)}
    tokens = await _accounts(hub, await hook.start())
    await hub.start()
    group = await make_group(hub, tokens["person0"], [f"person{n}" for n in range(1, PEOPLE)])
    clients = _clients(hub, tokens, folder, group, many, damage)
    senders = [one for one in clients if isinstance(one, FloodSender)]
    tasks = [asyncio.create_task(one.run()) for one in clients]
    tasks += [asyncio.create_task(one.repeat()) for one in senders]
    try:
        trouble = asyncio.create_task(_trouble(hub, senders, wrong, Random(f"trouble {SEED}")))
        done, _ = await asyncio.wait([trouble, *tasks], return_when=asyncio.FIRST_COMPLETED)
        assert done == {trouble}, f"a client of the test has ended: {done}"
        damage.calm = True
        async with asyncio.timeout(GUARD):
            await asyncio.gather(*(one.ask_again() for one in senders if isinstance(one, FloodApp)))
        alerts = next(one.sent for one in senders if isinstance(one, FloodSentinel))
        await until_told([one for one in clients if isinstance(one, FloodPerson)], hook, alerts)
    finally:
        for task in (*tasks, trouble):
            task.cancel()
        await asyncio.gather(*tasks, trouble, return_exceptions=True)
        for client in clients:
            client.close()
        with suppress(ProcessLookupError):
            os.kill(hub.pid, signal.SIGTERM)  # it brings its tables up to date, which are read then
        await hub.ended()
        await hook.stop()
    assert "Traceback" not in hub.errors, tracebacks(hub.errors)
    assert min(damage.dropped, damage.repeated, damage.overtaken, damage.delayed, damage.cuts) > 0, vars(
        damage
    )
    shutil.copy(hub.folder / "ledger.db", folder / "ledger.db")
    found = judge(folder, unknown=trouble.result() * APPS * WINDOW["app"])
    assert not found.wrong, f"{found}\nthe histories are in {folder}"
    count("faults", damage.cuts)
    count("messages under faults", found.messages.total())


async def test_a_flood_of_tasks_between_two_nodes(tmp_path: Path, mosquitto_server: Mosquitto) -> None:
    """Through connections that are cut and held back, beside a client that says a twentieth of it again."""
    dice = Random(f"tasks {SEED}")
    async with SlowProxy(mosquitto_server.port) as proxy:
        # Accounts of their own: the broker is other tests' too.
        names = (f"A{dice.randrange(1 << 32):x}", f"B{dice.randrange(1 << 32):x}")
        nodes = [
            NodeProcess(f"mqtt://{name}@127.0.0.1:{proxy.port}", name, other, tmp_path, TASKS // 2)
            for name, other in (names, names[::-1])
        ]
        parrot = Parrot(f"mqtt://parrot{SEED}@127.0.0.1:{mosquitto_server.port}", list(names), dice)
        await parrot.link.start()
        trouble = asyncio.create_task(proxy.misbehave(dice))
        try:
            for node in nodes:
                await node.start()
            cuts = 0
            while any(len(node.lines("ended")) < TASKS // 2 for node in nodes):
                assert all(node.alive for node in nodes), [node.errors for node in nodes]
                ended = sum(len(node.lines("ended")) for node in nodes)
                if ended * 20 // TASKS > cuts:  # also where a fast machine has done all of it in a second
                    cuts += 1
                    proxy.cut()
                await asyncio.sleep(0.01)
        finally:
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)
            for node in nodes:
                await node.end(signal.SIGTERM)  # it brings its tables up to date, which are read then
            await parrot.link.stop()
    for node in nodes:
        assert "Traceback" not in node.errors, tracebacks(node.errors)
    assert parrot.repeated > 0
    assert proxy.connections > 4, "too few cuts to say anything"
    found = judge_tasks(tmp_path, names, TASKS // 2)
    assert not found.wrong, f"{found}\nthe histories are in {tmp_path}"
    count("faults", proxy.connections - 2)
    count("messages under faults", found.messages.total())
