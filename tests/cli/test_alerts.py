"""Alerts on the command line, as an operator has it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine


def notifications(cli: CommandLine) -> Path:
    """The folder in which `file:` channels write."""
    return cli.folder / "duly-data" / "notifications"


def block(cli: CommandLine) -> None:
    """Keep the hub from writing `file:blocked` for now: a folder has that name."""
    (notifications(cli) / "blocked").mkdir(parents=True)


def told(cli: CommandLine, name: str = "told") -> list[dict[str, Any]]:
    path = notifications(cli) / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_from_a_profile_to_a_resolved_alert(cli: CommandLine) -> None:
    """The whole story, in one hub."""
    hub = cli.up()
    nobody = cli.duly("alert", "trigger", "smoke", "--profile", "home")
    assert (nobody.returncode, "there is no profile 'home'" in nobody.stderr) == (6, True)
    made = cli.duly("profile", "set", "home", "--send", "file:told?doubt=repeat", "--escalate", "1h=console:")
    assert made.returncode == 0, made.stderr
    assert "doubt" not in made.stdout, "labels, not addresses"

    done = cli.duly("alert", "trigger", "smoke", "--profile", "home", "--id", "event-1", "--device", "AA:BB")
    assert (done.returncode, done.stdout) == (0, "accepted: event-1\n")
    cli.told_alert("event-1")
    same = cli.duly("alert", "trigger", "smoke", "--profile", "home", "--id", "event-1", "--device", "AA:BB")
    assert (same.returncode, same.stdout) == (0, "known already, delivered: event-1\n")
    again = cli.duly("alert", "trigger", "fire", "--profile", "home", "--id", "event-1", "--device", "AA:BB")
    assert (again.returncode, "used before" in again.stderr) == (6, True)

    (one,) = cli.ask("alert", "list")
    assert (one["event"], one["status"]) == ("event-1", "open")
    assert "smoke AA:BB" in cli.duly("alert", "list").stdout
    assert "escalation 1" in cli.duly("deliveries", "show", "event").stdout, "the beginning of an id will do"
    acked = cli.ask("alert", "ack", "event-1", "--by", "ann")
    assert (acked["status"], acked["by"], acked["claimed"]) == ("acknowledged", "local", "ann")
    assert cli.duly("alert", "list", "--status", "open").stdout.count("event-1") == 0
    shown = cli.ask("alert", "show", "event-1")
    assert {d["state"] for d in shown["deliveries"]} == {"done", "cancelled"}
    assert [line["data"]["event"] for line in told(cli)] == ["event-1"]

    again = cli.duly("deliveries", "retry", "event-1", "--to", shown["deliveries"][0]["recipient"])
    assert again.returncode == 0
    assert cli.duly("alert", "resolve", "event-1").returncode == 0
    assert cli.duly("alert", "show", "nothing").returncode == 2
    assert hub.stop() == 0
    assert cli.ask("alert", "show", "event-1")["status"] == "resolved", "without a hub, from the ledger"
    assert [one["name"] for one in cli.ask("profile", "list")] == ["home"]
    assert cli.ask("prune", "--dry-run") == {"messages": 0, "alerts": 0, "deliveries": 0, "archives": []}
    assert cli.ask("prune")["messages"] == 0


def test_words_that_are_no_status_and_a_wait_that_is_too_short_say_so(cli: CommandLine) -> None:
    cli.up()
    cli.duly("profile", "set", "default", "--send", "file:told", "--escalate", "1h=console:")
    done = cli.duly("alert", "trigger", "smoke", "--wait", "0.2s")
    assert (done.returncode, "not every recipient was told yet" in done.stderr) == (5, True)
    for verb in (["alert", "list", "--status", "happy"], ["deliveries", "list", "--state", "happy"]):
        refused = cli.duly(*verb)
        assert (refused.returncode, "'happy' is not a stat" in refused.stderr) == (2, True)


def test_what_begins_like_json_and_is_none_is_refused_and_other_words_are_words(cli: CommandLine) -> None:
    cli.up()
    refused = cli.duly("alert", "trigger", "smoke", "--location", "{lat: 5")
    assert (refused.returncode, "location looks like JSON, but is not" in refused.stderr) == (2, True)
    cli.duly("profile", "set", "default", "--nobody")
    cli.ask("alert", "trigger", "smoke", "--location", "the shed", "--meta", '{"battery": 4}')
    (one,) = cli.ask("alert", "list")
    assert (one["location"], one["device_meta"]) == ("the shed", {"battery": 4})


def test_a_channel_is_tried_and_json_stays_json(cli: CommandLine) -> None:
    done = cli.duly("channel", "test", "console:", "--json")
    assert (done.returncode, json.loads(done.stdout)["fate"]) == (0, "arrived")
    assert "Test from duly" in done.stderr


def test_an_address_inside_this_network_is_refused_with_the_option_that_allows_it(cli: CommandLine) -> None:
    """The option is the hub's own: 'profile set' has none that would help."""
    cli.up()
    private = "http://127.0.0.1:9/x"
    refused = cli.duly("profile", "set", "home", "--send", private)
    assert (refused.returncode, "started with 'duly up --allow-private-webhooks'" in refused.stderr) == (
        2,
        True,
    )
    tried = cli.duly("channel", "test", private)
    assert (tried.returncode, "'duly channel test' only with the same option" in tried.stderr) == (2, True)
    assert (
        "inside a private network"
        not in cli.duly("channel", "test", private, "--allow-private-webhooks").stderr
    )


def test_silences_come_and_go(cli: CommandLine) -> None:
    cli.up()
    cli.duly("profile", "set", "default", "--send", "file:told")
    assert cli.duly("alert", "silence").returncode == 2, "of what?"
    assert cli.duly("alert", "silence", "--device", "lock-*", "--for", "1h").stdout.startswith(
        "silence 1, until"
    )
    done = cli.ask("alert", "trigger", "smoke", "--device", "lock-7", "--wait", "20s")
    assert "silenced" in done["ack"]["detail"]
    assert "device=lock-*" in cli.duly("alert", "silence", "--list").stdout
    assert cli.duly("alert", "silence", "--end", "1").returncode == 0
    assert cli.duly("alert", "silence", "--end", "1").returncode == 6
    assert (
        cli.ask("alert", "trigger", "smoke", "--device", "lock-7", "--wait", "20s")["ack"]["state"] == "done"
    )
    assert len(told(cli)) == 1


def test_what_was_changed_while_no_hub_ran_is_done_when_it_runs_again(cli: CommandLine) -> None:
    cli.duly("profile", "set", "default", "--send", "file:blocked")
    block(cli)
    hub = cli.up()
    cli.duly("alert", "trigger", "smoke", "--id", "event-1")
    hub.stop(signal.SIGKILL)
    (dead,) = cli.ask("deliveries", "list")
    edited = cli.duly("deliveries", "edit", "event-1", dead["recipient"], "--send", "file:told")
    assert edited.returncode == 0, edited.stderr
    hub = cli.up()
    for _ in range(100):
        if told(cli):
            break
        cli.ask("alert", "list")
    assert len(told(cli)) == 1


def test_a_webhooks_secret_is_printed_once(cli: CommandLine) -> None:
    first = cli.duly("profile", "set", "home", "--send", "https://hooks.example.com/t0ken")
    assert first.stdout.splitlines()[-1].startswith("whsec_")
    assert "t0ken" not in first.stdout + first.stderr
    again = cli.duly("profile", "set", "home", "--send", "https://hooks.example.com/t0ken")
    assert "whsec_" not in again.stdout
    assert "whsec_" not in cli.duly("profile", "show", "home").stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["profile", "set", "home", "--send", "nonsense"], 2),
        (["profile", "set", "home", "--quiet", "night"], 2),
        (["profile", "set", "home", "--zone", "Mars/Olympus"], 2),
        (["profile", "set", "home", "--escalate", "https://x"], 2),
        (["profile", "set", "no/slash"], 2),
        (["profile", "show", "home"], 3),
        (["profile", "remove", "home"], 3),
        (["alert", "trigger", "smoke"], 3),
        (["alert", "trigger", "smoke", "--severity", "awful"], 2),
        (["channel", "test", "nonsense"], 2),
        (["channel", "test", "http://127.0.0.1:9/x"], 2),
        (["channel", "test", "http://127.0.0.1:9/x", "--allow-private-webhooks"], 1),
    ],
)
def test_what_cannot_be_done_says_why(cli: CommandLine, args: list[str], code: int) -> None:
    done = cli.duly(*args)
    assert done.returncode == code, done.stderr
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_channel_can_be_tried(cli: CommandLine) -> None:
    early = cli.duly("channel", "test", "file:told")
    assert (early.returncode, "there is no data folder" in early.stderr) == (1, True)
    (cli.folder / "duly-data").mkdir()
    done = cli.duly("channel", "test", "file:told")
    assert (done.returncode, "arrived" in done.stdout) == (0, True)
    assert cli.ask("channel", "test", "file:told")["fate"] == "arrived"
    assert len(told(cli)) == 2
    assert (notifications(cli) / "told").stat().st_mode & 0o077 == 0, "for its owner alone"


# ── nothing critical is silent ───────────────────────────────────────────────────────────────────


def test_a_critical_alert_that_reaches_no_recipient_ends_with_an_error(cli: CommandLine) -> None:
    cli.up()
    critical = ("alert", "trigger", "fall", "--severity", "critical")
    assert cli.duly(*critical).returncode == 6, "there is no profile"
    refused = cli.duly("profile", "set", "default")
    assert (refused.returncode, "--nobody" in refused.stderr) == (2, True)
    assert cli.duly("profile", "set", "default", "--nobody").returncode == 0
    done = cli.duly(*critical)
    assert (done.returncode, "NO RECIPIENT WAS TOLD" in done.stderr) == (1, True)
    done = cli.duly(*critical, "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["code"], said["told"], said["error"], said["exit"]) == (
        1,
        0,
        False,
        "failed",
        1,
    )
    assert said["detail"].startswith(
        "NO RECIPIENT WAS TOLD of this critical alert: profile 'default' names no recipient"
    )
    cli.duly("profile", "set", "default", "--send", "file:blocked")
    block(cli)
    done = cli.duly(*critical, "--wait", "1s", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["told"], said["error"], said["exit"]) == (5, None, "unknown", 5), (
        "it is tried again and again"
    )
    cli.duly("profile", "set", "default", "--send", "file:told")
    assert cli.duly("alert", "silence", "--reason", "fall").returncode == 0
    assert cli.duly(*critical).returncode == 0, "a silence does not cover what is critical"
    assert len(told(cli)) == 1
    assert cli.duly("alert", "silence", "--reason", "fall", "--critical").returncode == 0
    assert cli.duly(*critical).returncode == 1
    dead = cli.ask("deliveries", "list", "--state", "dead")
    assert [one["recipient"] for one in dead] == ["none", "none"]


def test_a_critical_alert_of_which_the_default_profile_is_told_was_told(cli: CommandLine) -> None:
    """Its own profile names nobody, so it has ended before anyone is told; that is not yet a failure."""
    cli.up()
    cli.duly("profile", "set", "home", "--nobody")
    cli.duly("profile", "set", "default", "--send", "file:told")
    critical = ("alert", "trigger", "fall", "--severity", "critical", "--profile", "home")
    done = cli.duly(*critical)
    assert (done.returncode, done.stderr) == (0, "")
    done = cli.duly(*critical, "--json")
    assert (done.returncode, json.loads(done.stdout)["told"]) == (0, True)
    assert len(told(cli)) == 2


def test_json_says_whether_everyone_was_told_of_an_alert_that_is_waited_for(cli: CommandLine) -> None:
    cli.up()
    trigger = ("alert", "trigger", "smoke", "--wait", "20s", "--json")
    cli.duly("profile", "set", "default", "--send", "file:told")
    said = json.loads(cli.duly(*trigger).stdout)
    assert (said["code"], said["told"], "error" in said) == (0, True, False)
    cli.duly("profile", "set", "default", "--send", "http://192.0.2.1/private")
    assert "told" not in json.loads(cli.duly("alert", "trigger", "smoke", "--json").stdout), "no wait"


def test_watch_shows_a_fresh_alert(cli: CommandLine) -> None:
    cli.up()
    cli.duly("profile", "set", "default", "--send", "file:told")
    watching = cli.start("watch")
    watching.note("watching")
    cli.duly("alert", "trigger", "fall")
    assert "alert_event accepted" in watching.line("accepted")
    assert "told: arrived" in watching.line("told")
    assert watching.process.poll() is None


def test_list_shows_the_presence_of_sentinels(cli: CommandLine) -> None:
    cli.up()
    cli.duly("profile", "set", "default", "--send", "file:told", "--grace", "0s")
    cli.duly("add", "sentinel", "gate")
    assert ["gate", "sentinel", "no", "never"] in [
        line.split() for line in cli.duly("list").stdout.splitlines()
    ]
    sentinel = subprocess.Popen(
        [sys.executable, "-m", "duly", "sentinel", "--as", "gate", "--heartbeat", "1s"],
        cwd=cli.folder, env=cli.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert sentinel.stdout is not None
        assert "online as gate" in sentinel.stdout.readline()
        assert "gate" in cli.ask("list")["online"]
    finally:
        sentinel.kill()
        sentinel.communicate()
    while not told(cli):
        time.sleep(0.05)
    assert cli.ask("list")["silent"] == ["gate"]
    assert "SILENT" in cli.duly("list").stdout
