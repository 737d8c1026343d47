"""`duly top` shows the metrics of a hub: once, as JSON, or live."""

from __future__ import annotations

import re
import signal

from duly.cli import top
from tests.cli.conftest import CommandLine


def test_once_shows_rates_totals_and_health(home: CommandLine) -> None:
    assert home.duly("send", "lock", "query").returncode == 0
    done = home.duly("top", "--once")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^duly hub-[0-9a-f]{8}  up ", done.stdout)
    assert "works · SQLite · no MQTT · 1 hub\n" in done.stdout
    assert re.search(r"^query +\d+ +\d+", done.stdout, re.MULTILINE)
    assert re.search(r"connections   app \d+ · device 1", done.stdout)


def test_as_json_it_is_what_the_hub_answers(home: CommandLine) -> None:
    shown = home.ask("top")
    assert shown["snapshot"]["hub"].startswith("hub-")
    assert any(metric["name"] == "duly_pending" for metric in shown["snapshot"]["metrics"])


def test_a_monitor_may_look(home: CommandLine) -> None:
    token = home.duly("add", "monitor", "grafana").stdout.strip()
    url = f"http://127.0.0.1:{home.port}"
    done = home.duly("top", "--once", "--url", url, "--token", token)
    assert done.returncode == 0, done.stderr
    assert "per second" in done.stdout
    refused = home.duly("list", "--url", url, "--token", token)
    assert refused.returncode == 4
    assert "reads /metrics and /v1/metrics" in refused.stderr


def test_live_it_goes_on_until_it_is_stopped(home: CommandLine) -> None:
    live = home.start("top", "--every", "100ms")
    assert "up" in live.line("duly hub-")
    assert live.stop(signal.SIGINT) == 130


def test_it_does_not_ask_without_pause(home: CommandLine) -> None:
    done = home.duly("top", "--every", "0s")
    assert done.returncode == 2
    assert "at least 0.1s" in done.stderr


def test_without_a_hub_it_says_how_to_start_one(cli: CommandLine) -> None:
    done = cli.duly("top", "--once")
    assert done.returncode == 3
    assert "duly up" in done.stderr


def test_bars_are_as_high_as_the_rates() -> None:
    assert top._sparks([0, 5, 10]).startswith("▁▅█")
    assert top._sparks([]) == "(nothing yet)"
    assert top._sparks([0, 0]).startswith("▁▁")


def test_a_hub_without_messages_says_what_to_do() -> None:
    assert "duly send" in "".join(top._totals([]))
