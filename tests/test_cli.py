from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from duly.cli import VERBS, app


def duly(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "duly", *args], capture_output=True, text=True, check=False)


def processor_seconds(*args: str) -> float:
    """The least processor time of several runs of Python: other processes may keep the machine busy."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *args], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def modules_after(program: str) -> set[str]:
    """The names of the modules that Python has loaded after a program."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


def test_help_takes_a_third_of_a_second_and_loads_no_verb() -> None:
    assert processor_seconds("-m", "duly", "--help") < 0.3
    show_help = "from duly.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    loaded = modules_after(show_help)
    assert loaded.isdisjoint({"asyncio", "msgspec", "rich"})
    own = {name for name in loaded if name.startswith("duly.cli.")}
    assert own == {"duly.cli.common", "duly.cli.group", "duly.cli.output"}


def test_duly_is_imported_in_a_tenth_of_a_second_and_loads_a_name_when_it_is_used() -> None:
    assert processor_seconds("-c", "import duly") < 0.1
    assert modules_after("import duly").isdisjoint({"asyncio", "msgspec"})
    assert "duly.run_once" in modules_after("import duly; duly.once")


@pytest.mark.parametrize("name", VERBS)
def test_the_list_of_verbs_says_what_the_verb_says_itself(name: str) -> None:
    command_line: Any = typer.main.get_command(app)
    assert VERBS[name].sentence == command_line.commands[name].get_short_help_str(limit=150)


def test_help_shows_every_verb() -> None:
    shown = " ".join(duly("--help").stdout.split())
    for name, verb in VERBS.items():
        assert f"{name} {verb.sentence}" in shown


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert duly("--version").stdout == f"duly {version('duly')}\n"


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = duly("frobnicate")
    assert done.returncode == 2
    assert "frobnicate" in done.stderr
