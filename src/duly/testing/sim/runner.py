"""Runs many worlds on all cores, and reports what broke a promise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Struct

from duly.core.messages import names_in
from duly.testing.sim.chat import CHAT_CHECKERS, ChatWorld
from duly.testing.sim.checkers import CHECKERS, Checker
from duly.testing.sim.gateway import GatewayWorld
from duly.testing.sim.journal import JOURNAL_CHECKERS, JournalWorld
from duly.testing.sim.mqtt import MQTT_CHECKERS, MqttWorld
from duly.testing.sim.multi_hub import MULTI_HUB_CHECKERS, MultiHubWorld
from duly.testing.sim.peers import NodesWorld
from duly.testing.sim.plan import SimPlan, plan
from duly.testing.sim.push_checkers import GATEWAY_CHECKERS
from duly.testing.sim.sentinels import SENTINEL_CHECKERS, SentinelWorld
from duly.testing.sim.tower import TOWER_CHECKERS, TowerWorld
from duly.testing.sim.world import World


class Violation(Struct, frozen=True):
    """A promise that a world broke, and what happened around it."""

    checker: str
    sentence: str
    key: bytes
    trace: tuple[str, ...]


class SimReport(Struct, frozen=True):
    """The result of one seed. `digest` covers the whole log: the same seed gives the same digest."""

    seed: int
    world: str
    messages: int
    faults: int
    effects: int
    digest: str
    violations: tuple[Violation, ...]


WORLDS: Final[Mapping[str, type[World]]] = {
    "kernel": World,
    "journal": JournalWorld,
    "gateway": GatewayWorld,
    "hubs": MultiHubWorld,
    "chat": ChatWorld,
    "tower": TowerWorld,
    "sentinels": SentinelWorld,
    "nodes": NodesWorld,
    "mqtt": MqttWorld,
}
CHECKERS_OF: Final[Mapping[str, tuple[Checker[Any], ...]]] = {
    "journal": JOURNAL_CHECKERS,
    "gateway": GATEWAY_CHECKERS,
    "hubs": MULTI_HUB_CHECKERS,
    "chat": CHAT_CHECKERS,
    "tower": TOWER_CHECKERS,
    "sentinels": SENTINEL_CHECKERS,
    "mqtt": MQTT_CHECKERS,
}
"""The checkers of worlds with other or further promises."""


def checkers_of(world: str) -> tuple[str, ...]:
    """Return the names of what is checked in a world."""
    return (*(checker.__name__ for checker in CHECKERS_OF.get(world, CHECKERS)), "sound", "awake")


def run_seed(seed: int, world: str = "kernel") -> SimReport:
    """Run and check one seed in one world; a failure is shrunk to the mildest plan that still fails."""
    report = _run(plan(seed), world)
    return _shrink(plan(seed), report) if report.violations else report


def hush() -> None:
    """Silence the logs of simulated programs: their disks fail on purpose, and the checkers find what is
    wrong."""
    for name in ("duly", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def run_seeds(
    seeds: Iterable[int], jobs: int | None = None, worlds: Iterable[str] = tuple(WORLDS)
) -> Iterator[SimReport]:
    """Run many seeds, each in every world, in parallel; reports come in the order of the seeds."""
    pairs = [(seed, world) for seed in seeds for world in worlds]
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield from (run_seed(*pair) for pair in pairs)
        return
    with ProcessPoolExecutor(jobs, initializer=hush) as pool:
        yield from pool.map(run_seed, *zip(*pairs, strict=True), chunksize=4)


def _run(chosen: SimPlan, name: str = "kernel") -> SimReport:
    world = WORLDS[name](chosen)
    world.run()
    violations = tuple(
        Violation(checker.__name__, sentence, key, _trace(world, key))
        for checker in CHECKERS_OF.get(name, CHECKERS)
        for sentence, key in checker(world)
    )
    violations += tuple(
        Violation("sound", f"a program ended by {bug!r}", b"", _trace(world, b"")) for bug in world.bugs
    )
    violations += tuple(
        Violation("awake", f"the engine of {name} slept beyond a timer", b"", _trace(world, b""))
        for name in sorted(world.asleep)
    )
    log = world.log
    inside = sum(len(node.disk.streams.get("effects", ())) for node in world.nodes.values())
    return SimReport(
        chosen.seed,
        name,
        len(log.wanted),
        world.faults + world.network.faults,
        len(log.effects) + inside,
        blake2b(repr(log.lines).encode(), digest_size=8).hexdigest(),
        violations,
    )


_MILDER: tuple[Callable[[SimPlan], dict[str, float]], ...] = (
    lambda p: {"replays": 0},
    lambda p: {"conflicts": 0},
    lambda p: {"reinstalls": 0},
    lambda p: {"steps": 0},
    lambda p: {"faulty_disk": 0},
    lambda p: {"cuts": 0},
    lambda p: {"failing": 0},
    lambda p: {"skew": 0},
    lambda p: {"repeat": 0},
    lambda p: {"crash": 0},
    lambda p: {"drop": 0},
    lambda p: {"senders": 1},
    lambda p: {"receivers": 1},
    lambda p: {"messages": max(1, p.messages // 2)},
    lambda p: {"messages": max(1, p.messages - 1)},
)


def _shrink(chosen: SimPlan, report: SimReport) -> SimReport:
    """Leave out faults that the failure does not need."""
    checker = report.violations[0].checker
    shrinking = True
    while shrinking:
        shrinking = False
        for milder in _MILDER:
            candidate = msgspec.structs.replace(chosen, **milder(chosen))
            if candidate == chosen:
                continue
            attempt = _run(candidate, report.world)
            if any(violation.checker == checker for violation in attempt.violations):
                chosen, report, shrinking = candidate, attempt, True
    return report


def _trace(world: World, key: bytes) -> tuple[str, ...]:
    """Return the lines of the log about one message, and those about no message, such as crashes."""
    return tuple(
        f"{at:9.3f}  {who:<5}  {what}" + (f"  [{names_in(about)[1]}]" if about else "")
        for at, who, what, about in world.log.lines
        if about in (b"", key)
    )
