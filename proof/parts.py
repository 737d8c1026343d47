"""What a proof consists of: parts, each of steps that can be run and counted by themselves.

A step is a command. What it counts comes from its programs (`proof.counts`), or from the report of
`duly sim`. A command that fails ends the proof; it has printed how its case is replayed.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from proof.hostile import KINDS

PYTHON: Final = ".venv/bin/python"
"""The Python of the working tree, as one types it there."""
SEEDS_AT_ONCE: Final = 50
HOSTILE_AT_ONCE: Final = 250_000
PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-m", "proof")
MANY: Final = ("-n", "auto", "--dist", "worksteal")
"""What is added where a command has many tests; a step with one is run beside other steps."""
KILLS: Final = tuple(
    f"tests/{path}.py"
    for path in (
        "end_to_end/test_kills", "end_to_end/test_injected_kills", "end_to_end/test_hub_processes",
        "end_to_end/test_chat_hub_processes", "end_to_end/test_chaos", "clients/test_sentinel_kills",
        "end_to_end/test_alert_kills",
        "end_to_end/test_many_languages",
    )
)  # fmt: skip
FAULTS: Final = "tests/end_to_end/test_faults.py"
FAULTS_OF: Final = {
    "a hub stands still": "test_a_hub_that_stands_still_for_a_while",
    "a database stands still": "test_a_database_that_stands_still_for_a_while",
    "a full disk": "test_a_disk_that_is_full_and_then_is_not",
    "a failed flush": "test_a_flush_that_fails",
    "a slow disk": "test_a_slow_disk",
    "a clock that is set": "test_a_clock_that_is_set",
    "a cut network": "test_a_network_cut_between_a_hub_and_its_database",
    "a bad network": "test_a_network_that_drops_repeats_and_reorders",
}
"""The tests of `FAULTS`, by the name of the fault."""
FLOOD: Final = "tests/end_to_end/test_flood.py"
COUNTED: Final = (
    *KILLS, FAULTS, FLOOD, "tests/end_to_end/test_power_loss.py", "tests/end_to_end/test_soak.py",
    "tests/testing/test_planted_bugs.py", "tests/end_to_end/test_fuzz.py",
    "tests/transports/mqtt/test_hostile_broker.py",
)  # fmt: skip
"""What has a part of its own; `others` are all else that is marked `proof`."""
CLI: Final = ("alerts", "readme", "send")


class Step(Struct, frozen=True):
    """A command, and what it is called."""

    name: str
    """within its part: a name stands for the seeds that the cases are drawn from, in the short proof too"""
    command: tuple[str, ...]
    env: dict[str, str] = {}
    alone: bool = False
    """it takes all cores by itself; others are run beside each other"""

    @property
    def line(self) -> str:
        """The command as one types it."""
        said = [f"{name}={value}" for name, value in self.env.items()]
        typed = (PYTHON if each == sys.executable else each for each in self.command)
        return f"{' '.join(said)} {shlex.join(typed)}".lstrip()


class Part(Struct, frozen=True):
    """One row of the table: what is counted, and the steps that count it."""

    name: str
    counts: tuple[str, ...]
    """what its programs count"""
    steps: tuple[Step, ...]
    adds: bool = True
    """its runs add up; if not, the last one stands for all, as where each run counts the same again"""


def parts(*, short: bool) -> list[Part]:
    """Return all parts, in the order in which they are run."""
    messages = "messages under faults"
    return [
        Part("simulation", ("runs", "violations"), tuple(_simulation(150 if short else 5_000))),
        Part("planted", ("planted bugs",), (_planted(short=short),), adds=False),
        Part("kills", ("kills", messages), tuple(_kills(short=short))),
        Part("faults", ("faults", messages), tuple(_faults(short=short))),
        Part("flood", ("faults", messages), tuple(_flood(1, 5_000) if short else _flood(21, 50_000))),
        Part("power", ("power losses", messages), tuple(_power(1, 5) if short else _power(20, 25))),
        Part("hostile", ("hostile input", "watched for leaks"), tuple(_hostile(short=short))),
        Part("soak", ("soaked seconds", messages), (_soak(20 if short else 1_800),), adds=False),
        Part("others", (), tuple(_others(short=short))),
    ]


def _pytest(name: str, *args: str, **env: str) -> Step:
    return Step(name, (*PYTEST, *args), env)


def _all_cores(name: str, *args: str, **env: str) -> Step:
    return Step(name, (*PYTEST, *MANY, *args), env, alone=True)


def _simulation(seeds: int) -> Iterator[Step]:
    for first in range(0, seeds, SEEDS_AT_ONCE):
        many = min(SEEDS_AT_ONCE, seeds - first)
        sizes = ("--seeds", str(many), "--first", str(first), "--jobs", "1", "--json")
        yield Step(f"seeds from {first}", (sys.executable, "-m", "duly", "sim", *sizes))


def _planted(*, short: bool) -> Step:
    path = "tests/testing/test_planted_bugs.py"
    if short:  # from the first run on they take half an hour
        recorded = [each if each != "proof" else "not proof" for each in PYTEST]
        return Step("recorded runs", (*recorded, *MANY, path, "-k", "recorded"), alone=True)
    return _all_cores("from the first run", path)


def _kills(*, short: bool) -> Iterator[Step]:
    """Every program dies at its named points as an ordinary process; where hundreds die at random they are
    split off a Python that has imported everything (ADR 86): a start costs a fifteenth."""
    if short:
        yield _all_cores("at named points", *KILLS)
        return
    yield _all_cores("at named points", *KILLS, DULY_TEST_FORK="0")
    for seed in range(8):
        more = {"DULY_KILL_SEED": str(seed)}
        if seed < 4:
            yield _pytest(f"system calls, {seed}", KILLS[1], DULY_INJECTIONS="50", **more)
        for broker in ("embedded", "mosquitto"):
            which = f"everything_dies and whole and {broker}"
            yield _pytest(f"{broker}, {seed}", KILLS[0], "-k", which, DULY_KILLS="60", **more)
        yield _pytest(f"hubs, {seed}", KILLS[2], "-k", "everything_dies", DULY_KILLS="45", **more)
        yield _pytest(f"alerts, {seed}", KILLS[6], DULY_ALERT_KILLS="25", **more)
    for seed in range(2):
        yield _pytest(f"people, {seed}", KILLS[3], DULY_KILLS="60", DULY_KILL_SEED=str(seed))
    yield _pytest("tasks", KILLS[4], DULY_CHAOS="10000")
    yield _pytest("languages", KILLS[7], DULY_PRESSES="400")


def _faults(*, short: bool) -> Iterator[Step]:
    """Faults without a death: what stands still, is full, slow or wrong, fails, or is cut."""
    if short:
        yield _all_cores("one after the other", FAULTS, DULY_FAULTS="1")
        return
    for seed in range(7):
        sizes = {"DULY_FAULTS": "10", "DULY_FAULT_COMMANDS": "500", "DULY_FAULT_SEED": str(seed)}
        for fault, test in FAULTS_OF.items():
            yield _pytest(f"{fault}, {seed}", f"{FAULTS}::{test}", **sizes)


def _flood(times: int, messages: int) -> Iterator[Step]:
    """Commands, tasks, chat lines and alerts by the ten thousand, through a bad network."""
    for seed in range(times):
        yield _pytest(f"seed {seed}", FLOOD, DULY_FLOOD=str(messages), DULY_FLOOD_SEED=str(seed))


def _power(times: int, losses: int) -> Iterator[Step]:
    yield _pytest("a hub without flushes", "tests/end_to_end/test_power_loss.py", "-k", "not_flush")
    for seed in range(times):
        env = {"DULY_POWER_LOSSES": str(losses), "DULY_POWER_SEED": str(seed)}
        yield _pytest(f"seed {seed}", "tests/end_to_end/test_power_loss.py", "-k", "survives", **env)


def _hostile(*, short: bool) -> Iterator[Step]:
    yield _all_cores("a hub and a link", "tests/end_to_end/test_fuzz.py", COUNTED[-1])
    cases = 40_000 if short else 1_750_000
    for kind in KINDS:
        for seed, first in enumerate(range(0, cases, HOSTILE_AT_ONCE)):
            many = str(min(HOSTILE_AT_ONCE, cases - first))
            yield Step(f"{kind}, {seed}", (sys.executable, "-m", "proof.hostile", kind, many, str(seed)))
    files = 300 if short else 1_500
    for seed in range(1 if short else 4):
        command = (sys.executable, "-m", "proof.hostile_ledgers", str(files), str(seed))
        yield Step(f"files of ledgers, {seed}", command)
    answers = 2_000 if short else 20_000
    for seed in range(1 if short else 10):
        command = (sys.executable, "-m", "proof.hostile_webhooks", str(answers), str(seed))
        yield Step(f"answers of webhooks, {seed}", command)


def _soak(seconds: int) -> Step:
    path = "tests/end_to_end/test_soak.py"
    return Step(f"{seconds} s", (*PYTEST, path), {"DULY_SOAK_SECONDS": str(seconds)}, alone=True)


def _others(*, short: bool) -> Iterator[Step]:
    yield _all_cores("marked proof", "tests", *(f"--ignore={path}" for path in COUNTED))
    some = [f"tests/cli/test_{name}.py" for name in CLI] if short else ["tests/cli"]
    plain = (sys.executable, "-m", "pytest", "-q", *MANY, "tests/test_cli.py", *some)
    yield Step("command line", plain, {"DULY_TEST_FORK": "0"}, alone=True)


def environment(step: Step, counts: str) -> dict[str, str]:
    """Return what a step's command finds in its environment. Where it says so, each program is an ordinary
    process, imports and all (tests/fork_server.py)."""
    return os.environ | {"DULY_PROOF_COUNTS": counts} | step.env
