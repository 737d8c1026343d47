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

from tests.cli.conftest import Place


def told(place: Place, name: str = "told") -> list[dict[str, Any]]:
    path = place.folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_from_a_profile_to_a_resolved_alert(place: Place) -> None:
    """The whole story, in one hub."""
    hub = place.up()
    nobody = place.duly("alert", "trigger", "smoke", "--profile", "home")
    assert (nobody.returncode, "there is no profile 'home'" in nobody.stderr) == (6, True)
    made = place.duly(
        "profile", "set", "home", "--send", f"file:{place.folder}/told", "--escalate", "1h=console:"
    )
    assert made.returncode == 0, made.stderr
    assert str(place.folder) not in made.stdout, "labels, not addresses"

    done = place.duly(
        "alert", "trigger", "smoke", "--profile", "home", "--id", "event-1", "--device", "AA:BB"
    )
    assert (done.returncode, done.stdout) == (0, "accepted: event-1\n")
    same = place.duly(
        "alert", "trigger", "smoke", "--profile", "home", "--id", "event-1", "--device", "AA:BB"
    )
    assert (same.returncode, same.stdout) == (0, "known already, delivered: event-1\n")
    again = place.duly(
        "alert", "trigger", "fire", "--profile", "home", "--id", "event-1", "--device", "AA:BB"
    )
    assert (again.returncode, "used before" in again.stderr) == (6, True)

    (one,) = place.ask("alert", "list")
    assert (one["event"], one["status"]) == ("event-1", "open")
    assert "smoke AA:BB" in place.duly("alert", "list").stdout
    assert "escalation 1" in place.duly("deliveries", "show", "event").stdout, (
        "the beginning of an id will do"
    )
    acked = place.ask("alert", "ack", "event-1", "--by", "ann")
    assert (acked["status"], acked["by"], acked["claimed"]) == ("acknowledged", "local", "ann")
    assert place.duly("alert", "list", "--status", "open").stdout.count("event-1") == 0
    shown = place.ask("alert", "show", "event-1")
    assert {d["state"] for d in shown["deliveries"]} == {"done", "cancelled"}
    assert [line["data"]["event"] for line in told(place)] == ["event-1"]

    again = place.duly("deliveries", "retry", "event-1", "--to", shown["deliveries"][0]["recipient"])
    assert again.returncode == 0
    assert place.duly("alert", "resolve", "event-1").returncode == 0
    assert place.duly("alert", "show", "nothing").returncode == 2
    assert hub.stop() == 0
    assert place.ask("alert", "show", "event-1")["status"] == "resolved", "without a hub, from the ledger"
    assert [one["name"] for one in place.ask("profile", "list")] == ["home"]
    assert place.ask("prune", "--dry-run") == {"messages": 0, "alerts": 0, "deliveries": 0, "archives": []}
    assert place.ask("prune")["messages"] == 0


def test_words_that_are_no_status_and_a_wait_that_is_too_short_say_so(place: Place) -> None:
    place.up()
    place.duly(
        "profile", "set", "default", "--send", f"file:{place.folder}/told", "--escalate", "1h=console:"
    )
    done = place.duly("alert", "trigger", "smoke", "--wait", "0.2s")
    assert (done.returncode, "not every recipient was told yet" in done.stderr) == (5, True)
    for verb in (["alert", "list", "--status", "happy"], ["deliveries", "list", "--state", "happy"]):
        refused = place.duly(*verb)
        assert (refused.returncode, "'happy' is not a stat" in refused.stderr) == (2, True)


def test_what_begins_like_json_and_is_none_is_refused_and_other_words_are_words(place: Place) -> None:
    place.up()
    refused = place.duly("alert", "trigger", "smoke", "--location", "{lat: 5")
    assert (refused.returncode, "location is not JSON" in refused.stderr) == (2, True)
    place.duly("profile", "set", "default", "--nobody")
    place.ask("alert", "trigger", "smoke", "--location", "the shed", "--meta", '{"battery": 4}')
    (one,) = place.ask("alert", "list")
    assert (one["location"], one["device_meta"]) == ("the shed", {"battery": 4})


def test_a_channel_is_tried_and_json_stays_json(place: Place) -> None:
    done = place.duly("channel", "test", "console:", "--json")
    assert (done.returncode, json.loads(done.stdout)["fate"]) == (0, "arrived")
    assert "Test from duly" in done.stderr


def test_an_address_inside_this_network_is_refused_with_the_option_that_allows_it(place: Place) -> None:
    """The option is the hub's own: 'profile set' has none that would help."""
    place.up()
    private = "http://127.0.0.1:9/x"
    refused = place.duly("profile", "set", "home", "--send", private)
    assert (refused.returncode, "started with 'duly up --allow-private-webhooks'" in refused.stderr) == (
        2,
        True,
    )
    tried = place.duly("channel", "test", private)
    assert (tried.returncode, "'duly channel test' only with the same option" in tried.stderr) == (2, True)
    assert (
        "inside a private network"
        not in place.duly("channel", "test", private, "--allow-private-webhooks").stderr
    )


def test_silences_come_and_go(place: Place) -> None:
    place.up()
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/told")
    assert place.duly("alert", "silence").returncode == 2, "of what?"
    assert place.duly("alert", "silence", "--device", "lock-*", "--for", "1h").stdout.startswith(
        "silence 1, until"
    )
    done = place.ask("alert", "trigger", "smoke", "--device", "lock-7", "--wait", "5s")
    assert "silenced" in done["ack"]["detail"]
    assert "device=lock-*" in place.duly("alert", "silence", "--list").stdout
    assert place.duly("alert", "silence", "--end", "1").returncode == 0
    assert place.duly("alert", "silence", "--end", "1").returncode == 6
    assert (
        place.ask("alert", "trigger", "smoke", "--device", "lock-7", "--wait", "5s")["ack"]["state"] == "done"
    )
    assert len(told(place)) == 1


def test_what_was_changed_while_no_hub_ran_is_done_when_it_runs_again(place: Place) -> None:
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/missing/told")
    hub = place.up()
    place.duly("alert", "trigger", "smoke", "--id", "event-1")
    hub.stop(signal.SIGKILL)
    (dead,) = place.ask("deliveries", "list")
    edited = place.duly(
        "deliveries", "edit", "event-1", dead["recipient"], "--send", f"file:{place.folder}/told"
    )
    assert edited.returncode == 0, edited.stderr
    hub = place.up()
    for _ in range(100):
        if told(place):
            break
        place.ask("alert", "list")
    assert len(told(place)) == 1


def test_a_webhooks_secret_is_printed_once(place: Place) -> None:
    first = place.duly("profile", "set", "home", "--send", "https://hooks.example.com/t0ken")
    assert first.stdout.splitlines()[-1].startswith("whsec_")
    assert "t0ken" not in first.stdout + first.stderr
    again = place.duly("profile", "set", "home", "--send", "https://hooks.example.com/t0ken")
    assert "whsec_" not in again.stdout
    assert "whsec_" not in place.duly("profile", "show", "home").stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["profile", "set", "home", "--send", "nonsense"], 2),
        (["profile", "set", "home", "--quiet", "night"], 2),
        (["profile", "set", "home", "--zone", "Mars/Olympus"], 2),
        (["profile", "set", "home", "--escalate", "https://x"], 2),
        (["profile", "set", "no/slash"], 2),
        (["profile", "show", "home"], 3),
        (["profile", "remove", "home"], 6),
        (["alert", "trigger", "smoke"], 3),
        (["alert", "trigger", "smoke", "--severity", "awful"], 2),
        (["channel", "test", "nonsense"], 2),
        (["channel", "test", "http://127.0.0.1:9/x"], 2),
        (["channel", "test", "http://127.0.0.1:9/x", "--allow-private-webhooks"], 1),
    ],
)
def test_what_cannot_be_done_says_why(place: Place, args: list[str], code: int) -> None:
    done = place.duly(*args)
    assert done.returncode == code, done.stderr
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_channel_can_be_tried(place: Place) -> None:
    done = place.duly("channel", "test", f"file:{place.folder}/told")
    assert (done.returncode, "arrived" in done.stdout) == (0, True)
    assert place.ask("channel", "test", f"file:{place.folder}/told")["fate"] == "arrived"
    assert len(told(place)) == 2
    assert Path(place.folder / "told").stat().st_mode & 0o077 == 0, "for its owner alone"


# ── nothing critical is silent ───────────────────────────────────────────────────────────────────


def test_a_critical_alert_that_nobody_is_told_of_ends_with_an_error(place: Place) -> None:
    place.up()
    critical = ("alert", "trigger", "fall", "--severity", "critical")
    assert place.duly(*critical).returncode == 6, "there is no profile"
    refused = place.duly("profile", "set", "default")
    assert (refused.returncode, "--nobody" in refused.stderr) == (2, True)
    assert place.duly("profile", "set", "default", "--nobody").returncode == 0
    done = place.duly(*critical)
    assert (done.returncode, "NO RECIPIENT WAS TOLD" in done.stderr) == (1, True)
    done = place.duly(*critical, "--json")
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
    place.duly("profile", "set", "default", "--send", "file:/nowhere/at/all")
    done = place.duly(*critical, "--wait", "1s", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["told"], said["error"], said["exit"]) == (5, None, "unknown", 5), (
        "it is tried again and again"
    )
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/told")
    assert place.duly("alert", "silence", "--reason", "fall").returncode == 0
    assert place.duly(*critical).returncode == 0, "a silence does not cover what is critical"
    assert len(told(place)) == 1
    assert place.duly("alert", "silence", "--reason", "fall", "--critical").returncode == 0
    assert place.duly(*critical).returncode == 1
    dead = place.ask("deliveries", "list", "--state", "dead")
    assert [one["recipient"] for one in dead] == ["none", "none"]


def test_a_critical_alert_of_which_the_default_profile_is_told_was_told(place: Place) -> None:
    """Its own profile names nobody, so it has ended before anyone is told; that is not yet a failure."""
    place.up()
    place.duly("profile", "set", "home", "--nobody")
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/told")
    critical = ("alert", "trigger", "fall", "--severity", "critical", "--profile", "home")
    done = place.duly(*critical)
    assert (done.returncode, done.stderr) == (0, "")
    done = place.duly(*critical, "--json")
    assert (done.returncode, json.loads(done.stdout)["told"]) == (0, True)
    assert len(told(place)) == 2


def test_json_says_whether_everyone_was_told_of_an_alert_that_is_waited_for(place: Place) -> None:
    place.up()
    trigger = ("alert", "trigger", "smoke", "--wait", "5s", "--json")
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/told")
    said = json.loads(place.duly(*trigger).stdout)
    assert (said["code"], said["told"], "error" in said) == (0, True, False)
    place.duly("profile", "set", "default", "--send", "http://192.0.2.1/private")
    assert "told" not in json.loads(place.duly("alert", "trigger", "smoke", "--json").stdout), "no wait"


def test_watch_shows_a_fresh_alert(place: Place) -> None:
    place.up()
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/told")
    watching = place.start("watch")
    for n in range(50):  # until it watches
        place.duly("alert", "trigger", "fall", "--id", f"event-{n}")
        if not watching._lines.empty():
            break
    assert "alert_event accepted" in watching.line("accepted")
    assert "told: arrived" in watching.line("told")
    assert watching.process.poll() is None


def test_list_shows_the_presence_of_sentinels(place: Place) -> None:
    place.up()
    place.duly("profile", "set", "default", "--send", f"file:{place.folder}/told", "--grace", "0s")
    place.duly("add", "sentinel", "gate")
    assert ["gate", "sentinel", "no", "never"] in [
        line.split() for line in place.duly("list").stdout.splitlines()
    ]
    sentinel = subprocess.Popen(
        [sys.executable, "-m", "duly", "sentinel", "--as", "gate", "--heartbeat", "1s"],
        cwd=place.folder, env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert sentinel.stdout is not None
        assert "online as gate" in sentinel.stdout.readline()
        assert "gate" in place.ask("list")["online"]
    finally:
        sentinel.kill()
        sentinel.communicate()
    while not told(place):
        time.sleep(0.05)
    assert place.ask("list")["silent"] == ["gate"]
    assert "SILENT" in place.duly("list").stdout
