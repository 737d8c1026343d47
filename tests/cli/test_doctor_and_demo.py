from __future__ import annotations

import json
import time

import pytest

from tests.cli.conftest import CommandLine


def test_a_healthy_place_is_found_healthy(home: CommandLine) -> None:
    found = {one["what"]: one for one in home.ask("doctor")["findings"]}
    assert {one["is"] for one in found.values()} <= {"ok", "warn"}
    assert found.keys() >= {
        "duly",
        "python",
        "sqlite",
        "hub",
        "clock",
        "disk",
        "ledger",
        "soundness",
        "windows",
    }
    assert "1 device online" in found["hub"]["fact"]
    assert "23.7 h to spare" in found["windows"]["fact"]


def test_an_empty_place_is_no_illness(cli: CommandLine) -> None:
    done = cli.duly("doctor")
    assert done.returncode == 0
    assert "none runs" in done.stdout
    assert list(cli.folder.iterdir()) == [], "it only looks"


def test_the_broker_inside_is_said_to_keep_what_it_acknowledges(cli: CommandLine) -> None:
    cli.start("up", "--port", "0", "--mqtt-port", "0").line("ready")
    found = {one["what"]: one for one in cli.ask("doctor")["findings"]}
    assert found["broker"]["is"] == "ok"
    assert "MQTT 3.1.1; what it has acknowledged survives kill -9" in found["broker"]["fact"]


def test_an_outside_broker_that_does_not_answer_is_an_illness(cli: CommandLine) -> None:
    hub = cli.start("up", "--port", "0", "--mqtt", "mqtt://hub:secret@127.0.0.1:1")
    hub.line("ready")
    assert hub.process.stderr is not None
    said = [hub.process.stderr.readline() for _ in range(2)]
    assert "serves at http://" in said[0]
    assert "the broker does not work: cannot reach mqtt://hub@127.0.0.1:1" in said[1]
    assert "secret" not in "".join(said)
    done = cli.duly("doctor")
    assert done.returncode == 1
    assert "✗ broker" in done.stdout
    assert "secret" not in done.stdout


@pytest.mark.parametrize("harm", ["ledger", "settings"])
def test_what_is_wrong_is_named_and_counts(cli: CommandLine, harm: str) -> None:
    cli.duly("add", "app", "phone")
    if harm == "ledger":
        (cli.folder / "duly-data" / "ledger.db").write_bytes(b"not a database" * 100)
        done = cli.duly("doctor")
        assert "is not a ledger" in done.stdout
    else:
        done = cli.duly("doctor", DULY_REMEMBER="60")
        assert "the horizon of 1 min is shorter than" in done.stdout
    assert done.returncode == 1
    assert "✗" in done.stdout


def test_the_demo_shows_that_every_effect_happened_once(cli: CommandLine) -> None:
    began = time.monotonic()
    done = cli.duly("demo", "--json", TMPDIR=str(cli.folder))
    assert time.monotonic() - began < 20
    assert done.returncode == 0, done.stdout
    shown = json.loads(done.stdout)
    assert shown["network"]["repeated"] > 0
    assert shown["network"]["cuts"] > 0
    for device in shown["devices"]:
        assert device["twice"] == device["missing"] == device["false"] == []
        assert device["effects"] > 0
    assert list(cli.folder.iterdir()) == [], "it cleans up"


def test_the_demo_speaks_in_lines(cli: CommandLine) -> None:
    done = cli.duly("demo", "--commands", "2", TMPDIR=str(cli.folder))
    assert "↵" not in done.stdout + done.stderr
    assert "repeats, delays\nand reorders" in done.stderr
