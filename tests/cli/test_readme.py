"""What a stranger does first: the README's commands, as printed, with a hub beside them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from duly.testing.sim.runner import WORLDS
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).parents[2]
DEVICE, NODES, ALERTS = 1, 3, 5
"""The sections of these subjects, in either language."""


def commands(readme: str, section: int) -> list[str]:
    """The commands of a section, counted from 1, without what is said of them."""
    text = re.split(r"^## ", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE)[section]
    found: list[str] = re.findall(r"^\$ (duly .*|\w=.*)$", text, re.MULTILINE)
    return [re.sub(r" +# .*", "", command) for command in found]


@pytest.fixture
def mqtt_port(cli: CommandLine) -> str:
    hub = cli.start("up", "--port", "0", "--mqtt-port", "0")
    return hub.line("ready").rsplit(":", 1)[1]


def shell(cli: CommandLine, lines: list[str]) -> str:
    """What a shell prints that is given these lines; what it leaves behind is ended."""
    duly = cli.folder / "bin" / "duly"
    duly.parent.mkdir(exist_ok=True)
    duly.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m duly "$@"\n')
    duly.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *lines])],
        cwd=cli.folder,
        env=cli.env | {"PATH": f"{duly.parent}:{cli.env['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("section", [DEVICE, NODES, ALERTS])
def test_the_chinese_readme_has_the_same_commands(section: int) -> None:
    assert commands("README.zh-CN.md", section) == commands("README.md", section) != []


@pytest.mark.usefixtures("mqtt_port")
def test_a_lock_is_opened(cli: CommandLine) -> None:
    accounts, device, send = commands("README.md", DEVICE)
    shell(cli, [accounts])
    cli.start(*shlex.split(device)[1:]).line("is online")
    assert "code 0, done" in shell(cli, [send])


def test_a_node_does_a_task(cli: CommandLine, mqtt_port: str) -> None:
    lines = [line.replace("7883", mqtt_port) for line in commands("README.md", NODES)]
    # B runs in the background, and may still be saying that it is online.
    assert '"the lamp is on"' in shell(cli, lines).splitlines()


def test_an_alert_is_told_and_taken_over(cli: CommandLine) -> None:
    hub = cli.start("up", "--port", "0", "--no-mqtt")
    hub.line("ready")
    profile, trigger, listed, ack = commands("README.md", ALERTS)
    shell(cli, [profile, trigger])
    hub.line("critical: smoke")
    assert "open" in shell(cli, [listed])
    event = cli.ask("alert", "list")[0]["event"]
    shell(cli, [ack.replace("EVENT", event[:8])])
    assert "acknowledged" in shell(cli, [listed])


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_simulation_has_as_many_worlds_as_the_readme_shows(readme: str) -> None:
    """It showed eight when there were nine."""
    shown = re.search(r"^3 seeds in (\d+) worlds", (ROOT / readme).read_text(encoding="utf-8"), re.MULTILINE)
    assert shown is not None
    assert int(shown[1]) == len(WORLDS)
