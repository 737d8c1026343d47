"""`duly demo`: shows what duly does, in a few seconds.

The law: nothing is faked. It runs a real hub, real clients and a faulty network; the result is counted from
the files in which the lock and the lamp recorded their effects, not from what duly says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from duly.cli.common import Exit, count, note, print_json, say, style, table
from duly.cli.device import Effects, SimulatedThing
from duly.cli.options import Json
from duly.errors import DulyError

if TYPE_CHECKING:
    from duly.cli.bad_network import BadConnection, Damage
    from duly.clients.app import App, SentCommand

PACE_SECONDS: Final = 0.1
SETTLE_SECONDS: Final = 90.0
"""Within which every command has ended, on however slow a machine: its expiry, and the wait for an answer."""
TYPES: Final = {"lock": ("lock_control", "open"), "lamp": ("dev_control", "on")}


class DemoOutcome(Struct):
    """How the commands to one device ended."""

    device: str
    sent: int
    arrived: int
    """how many commands reached it, repeats included"""
    outcomes: dict[str, int]
    effects: int
    twice: list[str]
    """ids with more than one effect"""
    missing: list[str]
    """ids that were reported as done and had no effect"""
    false: list[str]
    """ids that were reported as not done and had an effect"""

    @property
    def well(self) -> bool:
        """Whether every command ended, with its effect as reported and never twice."""
        ended = sum(self.outcomes.values()) - self.outcomes.get("none", 0)
        return not (self.twice or self.missing or self.false) and ended == self.sent


def demo(
    commands: Annotated[
        int, typer.Option("--commands", min=1, max=60, help="How many commands to send to each device.")
    ] = 25,
    page: Annotated[
        bool,
        typer.Option("--page", help="Print a link to the hub's dashboard, and continue until Ctrl-C."),
    ] = False,
    json: Json = False,
) -> None:
    """Command a lock over a bad network, and count effects.

    Runs a hub, a lock and a lamp, and between them a network that drops, repeats, delays and reorders frames
    and cuts connections. Everything is in a temporary folder, which is removed at the end; it takes about
    five seconds. With --page you can watch it in a browser until Ctrl-C.
    """
    if not json:
        many = "Commands to each until Ctrl-C" if page else f"{commands} commands to each"
        note(
            "A phone, a hub, a lock and a lamp. Between them a network that drops, repeats, delays",
            f"and reorders frames and cuts connections. {many} …",
            "",
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="duly-demo-") as folder:
        told, damage = asyncio.run(_demo(Path(folder), commands, page=page))
    seconds = time.monotonic() - began
    well = all(one.well for one in told)
    if json:
        print_json({"ok": well, "seconds": round(seconds, 1), "network": damage, "devices": told})
    else:
        _show(told, damage, seconds, well)
    raise typer.Exit(Exit.OK if well else Exit.FAILED)


async def _demo(folder: Path, commands: int, *, page: bool) -> tuple[list[DemoOutcome], Damage]:
    from duly.cli.bad_network import BadConnection, Damage
    from duly.clients.app import App
    from duly.clients.device import Device
    from duly.identity.accounts import Role
    from duly.server.hub import Hub
    from duly.settings import Settings

    damage, chance = Damage(), random.Random()
    async with contextlib.AsyncExitStack() as closing:
        hub = Hub(Settings(data=str(folder / "hub"), port=0, no_mqtt=True))
        await hub.start()
        closing.push_async_callback(hub.stop)
        tokens = {"phone": await hub.accounts.add(Role.APP, "phone")}
        for name in TYPES:
            tokens[name] = await hub.accounts.add(Role.DEVICE, name)
            await hub.accounts.grant("phone", name)
        roads: dict[str, BadConnection] = {}
        for name in tokens:
            roads[name] = BadConnection(hub.url, damage, chance)
            await roads[name].start()
            closing.push_async_callback(roads[name].stop)
        effects: dict[str, Effects] = {}
        for name in TYPES:
            effects[name] = Effects(folder / f"{name}.effects")
            closing.callback(effects[name].close)
            device = Device(roads[name].url, tokens[name], store=str(folder / f"{name}.db"))
            SimulatedThing(name, effects[name], lambda what, more: None).install(device)
            await closing.enter_async_context(device)
        app = await closing.enter_async_context(
            App(roads["phone"].url, tokens["phone"], store=str(folder / "phone.db"))
        )
        if page:
            link = f"{hub.url}/login#{await hub.dashboard.access.make_link()}"
            note("Watch it in a browser; the link works once, and Ctrl-C ends it all:", f"  {link}", "")
        sent = await _send(app, _until_interrupted() if page else range(commands))
        for road in roads.values():
            road.calm = True  # the faults end; what was lost is repeated now
        ends = {name: await _ends(posted) for name, posted in sent.items()}
        return [_judge(name, ends[name], effects[name], roads[name].arrived) for name in TYPES], damage


def _until_interrupted() -> Iterator[int]:
    """Yield numbers from 0 on, until Ctrl-C or a request to end."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    return itertools.takewhile(lambda _: not told.is_set(), itertools.count())


async def _send(app: App, turns: Iterable[int]) -> dict[str, list[SentCommand]]:
    """Send a command to each device in each turn, without waiting for its end."""
    sent: dict[str, list[SentCommand]] = {name: [] for name in TYPES}
    for n in turns:
        for name, (type_, key) in TYPES.items():
            sent[name].append(await app.post(name, type_, {key: n % 2 == 0}, queue=True, expires=60))
        await asyncio.sleep(PACE_SECONDS)
    return sent


async def _ends(commands: list[SentCommand]) -> dict[str, str]:
    """Return how each command ended, by id; "none" if it did not."""

    async def end(command: SentCommand) -> tuple[str, str]:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                return command.id, (await command.ended()).state
        except TimeoutError:
            return command.id, "none"
        except DulyError as problem:
            return command.id, problem.word

    return dict(await asyncio.gather(*map(end, commands)))


def _judge(name: str, ends: dict[str, str], effects: Effects, arrived: int) -> DemoOutcome:
    happened = Counter(id_ for id_, _, _, _ in effects.read())
    return DemoOutcome(
        name,
        sent=len(ends),
        arrived=arrived,
        outcomes=dict(Counter(ends.values())),
        effects=sum(happened.values()),
        twice=[id_ for id_, times in happened.items() if times > 1],
        missing=[id_ for id_, state in ends.items() if state == "done" and not happened[id_]],
        false=[id_ for id_ in happened if ends.get(id_) not in ("done", "unknown", "none")],
    )


def _show(told: list[DemoOutcome], damage: Damage, seconds: float, well: bool) -> None:
    say(
        f"The network was given {count(damage.frames, 'frame')}. It dropped {damage.dropped}, repeated "
        f"{damage.repeated}, let {damage.overtaken} be overtaken",
        f"and cut {count(damage.cuts, 'connection')}.",
        "",
    )
    rows = []
    for one in told:
        others = {state: n for state, n in one.outcomes.items() if state != "done"}
        numbers: list[int] = [one.sent, one.arrived, one.effects, len(one.twice), one.outcomes.get("done", 0)]
        rest = ", ".join(f"{n} {state}" for state, n in others.items()) or "-"
        rows.append([one.device, *map(str, numbers), rest])
    table(
        ["", "sent", "arrived", "effects", "twice", "done", "ended otherwise, and the phone was told"], rows
    )
    say("")
    if well:
        well_said = "Every command has one outcome; by the devices' own files every effect happened once."
        say(style(f"✓ {well_said} ({seconds:.1f} s)", "green"))
        return
    for one in told:
        for words, ids in (
            ("took effect twice", one.twice),
            ("was reported done and did not happen", one.missing),
            ("was reported as not done and happened", one.false),
        ):
            for id_ in ids:
                say(style(f"✗ {one.device}: {id_} {words}", "red"))
        if one.outcomes.get("none"):
            say(style(f"✗ {one.device}: {one.outcomes['none']} without an outcome", "red"))
