"""The simulation itself: it repeats exactly, and finds what it should find. That the first seeds pass is
what `make simulate` checks, a part of `make test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from duly.testing.sim import WORLDS, run_seed
from tests.testing.searching import KERNEL

KEPT = [
    2, 5, 19, 180, 447, 10422, 11337, 12777, 13298, 15737, 15980, 15981, 16481, 17301, 25437, 26026, 28813,
]  # fmt: skip
"""Seeds that once broke a promise."""


@pytest.mark.parametrize("seed", KEPT)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    assert run_seed(seed).violations == ()


@pytest.mark.parametrize("worlds", [list(WORLDS)[n::4] for n in range(4)], ids=" ".join)
def test_the_same_seed_gives_the_same_run_in_another_process(worlds: list[str]) -> None:
    """Byte for byte: the digest covers the whole log. Hash randomisation must not matter. A process runs
    two worlds, since it spends as much time on its imports as on a world."""
    runs = [(seed, world) for world in worlds for seed in (3, 11)]
    program = f"from duly.testing.sim import run_seed\nfor run in {runs}: print(run_seed(*run).digest)"
    other = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    here = [run_seed(*run).digest for run in runs]
    assert other.communicate()[0].split() == here


@pytest.mark.parametrize("seed", [5, 7, 14, 19, 26, 66, 260, 357, 429, 462, 690, 5098])
def test_a_seed_that_once_failed_in_the_gateway_world_passes(seed: int) -> None:
    assert run_seed(seed, "gateway").violations == ()


def test_different_seeds_are_different_worlds() -> None:
    assert len({run_seed(seed).digest for seed in range(10)}) == 10


def test_worlds_are_really_bad() -> None:
    """A checker that sees no faults proves nothing."""
    reports = [run_seed(seed) for seed in range(40)]
    assert sum(report.faults for report in reports) > 1_000
    assert sum(report.effects for report in reports) > 300


@pytest.mark.parametrize("seed", [6, 20, 82, 201, 365])
def test_a_seed_that_once_failed_in_the_chat_world_passes(seed: int) -> None:
    assert run_seed(seed, "chat").violations == ()


@pytest.mark.parametrize("seed", [69, 109, 148, 447, 561, 583, 698, 710, 772])
def test_a_seed_that_once_failed_in_the_sentinels_world_passes(seed: int) -> None:
    assert run_seed(seed, "sentinels").violations == ()


@pytest.mark.parametrize("seed", [115, 151, 162, 218, 350])
def test_a_seed_that_once_failed_in_the_nodes_world_passes(seed: int) -> None:
    assert run_seed(seed, "nodes").violations == ()


@pytest.mark.parametrize(
    ("world", "seed"),
    [
        ("hubs", 4696),
        ("journal", 1154),
        ("journal", 1383),
        ("journal", 3906),
        ("journal", 4175),
        ("mqtt", 3387),
        ("mqtt", 4594),
    ],
)
def test_a_seed_that_failed_in_the_long_simulation_passes(world: str, seed: int) -> None:
    assert run_seed(seed, world).violations == ()


def test_a_failure_is_shown_with_a_short_trace_about_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "handlers_side_by_side"
    KERNEL.bugs[name](monkeypatch)
    seed = KERNEL.noticed(name, "recorded")
    assert seed is not None
    report = run_seed(seed)
    violation = report.violations[0]
    assert violation.checker == "ordered"
    assert any("EFFECT" in line for line in violation.trace)
    ids = {line.rsplit("[", 1)[1] for line in violation.trace if line.endswith("]")}
    assert len(ids) == 1


def test_the_command_line_runs_seeds_and_reports(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duly", "sim", "--seeds", "2", "--first", "40", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert (result["seeds"], result["violations"], result["failing"]) == (2, 0, [])
    assert len(result["digests"]) == 2 * len(result["worlds"])


def test_the_command_line_says_what_is_wrong_with_its_arguments() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duly", "sim", "--seeds", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--seeds" in done.stderr


@pytest.mark.parametrize("seed", [5586, 5846])
def test_a_seed_that_once_failed_in_the_mqtt_world_passes(seed: int) -> None:
    assert run_seed(seed, "mqtt").violations == ()


def test_a_seed_that_once_failed_in_the_journal_world_passes() -> None:
    assert run_seed(5065, "journal").violations == ()


@pytest.mark.parametrize("seed", [211, 217, 468, 525, 527, 5260, 5476])
def test_a_seed_that_once_failed_between_hubs_passes(seed: int) -> None:
    assert run_seed(seed, "hubs").violations == ()
