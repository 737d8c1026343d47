"""Whoever asks for JSON gets JSON: from every verb, also when it fails, with an exit code of the list."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from duly.cli import app, main

NOBODY = "mqtt://a:b@127.0.0.1:1"

FAILURES = {
    "up": ("--port 99999", 2, "malformed"),
    "demo": ("--commands 0", 2, "usage"),
    "sim": ("--world nowhere", 2, "usage"),
    "conform": ("gadget ws://127.0.0.1:0", 2, "usage"),
    "prune": ("", 3, "unreachable"),
    "floor": ("", 3, "unreachable"),
    "dashboard link": ("--name a/b", 3, "unreachable"),
    "dashboard password": ("a/b", 2, "malformed"),
    "dashboard users": ("", 3, "unreachable"),
    "dashboard remove": ("nobody", 3, "unreachable"),
    "dashboard logout": ("--data /proc/nowhere", 3, "unreachable"),
    "check": ("", 3, "unreachable"),
    "backup": ("x.db", 3, "ledger_unavailable"),
    "restore": ("nowhere.db", 3, "ledger_unavailable"),
    "export": ("", 2, "usage"),
    "import": ("nowhere.jsonl", 1, "failed"),
    "copy": ("nowhere.db other.db", 3, "ledger_unavailable"),
    "audit list": ("", 3, "unreachable"),
    "audit verify": ("", 3, "unreachable"),
    "add": ("app x --data /proc/nowhere", 1, "failed"),
    "remove": ("nobody", 3, "unreachable"),
    "grant": ("nobody nothing", 3, "unreachable"),
    "revoke": ("nobody nothing", 3, "unreachable"),
    "list": ("", 3, "unreachable"),
    "send": ("lock lock_control", 3, "unreachable"),
    "device": ("lock", 3, "unreachable"),
    "ha": (f"--lock lock --mqtt {NOBODY}", 3, "unreachable"),
    "node": (f"b --url {NOBODY} --run nonsense", 2, "usage"),
    "call": (f"b x nonsense --url {NOBODY}", 2, "usage"),
    "status": ("--url nonsense", 2, "malformed"),
    "chat": ("--as ann", 3, "unreachable"),
    "outcome": ("1_1", 3, "unreachable"),
    "top": ("", 3, "unreachable"),
    "trace": ("1_1", 3, "unreachable"),
    "why": ("", 3, "unreachable"),
    "watch": ("", 3, "unreachable"),
    "doctor": ("--url nonsense", 2, "usage"),
    "task send": (f"b x nonsense --url {NOBODY} --data a.db", 2, "usage"),
    "task retry": ("nothing --url nonsense --data a.db", 2, "malformed"),
    "task list": ("--data nowhere.db", 3, "ledger_unavailable"),
    "task show": ("nothing --data nowhere.db", 3, "ledger_unavailable"),
    "task cancel": ("nothing --data nowhere.db", 3, "ledger_unavailable"),
    "acl mosquitto": ("--users a/b", 2, "malformed"),
    "acl emqx": ("--users a/b", 2, "malformed"),
    "acl rabbitmq": ("", 2, "malformed"),
    "acl nats": ("", 2, "malformed"),
    "acl test": (NOBODY, 2, "malformed"),
    "keys new": ("a/b", 2, "malformed"),
    "keys trust": ("b nonsense", 2, "malformed"),
    "keys forget": ("nobody", 6, "refused"),
    "keys list": ("", 2, "malformed"),
    "sentinel trigger": ("fall belt", 3, "unreachable"),
    "sentinel": ("--debounce nonsense", 2, "usage"),
    "alert trigger": ("smoke", 3, "unreachable"),
    "alert list": ("", 3, "unreachable"),
    "alert show": ("nothing", 3, "unreachable"),
    "alert ack": ("nothing", 3, "unreachable"),
    "alert resolve": ("nothing", 3, "unreachable"),
    "alert silence": ("--for nonsense", 2, "usage"),
    "deliveries list": ("", 3, "unreachable"),
    "deliveries show": ("nothing", 3, "unreachable"),
    "deliveries retry": ("nothing", 3, "unreachable"),
    "deliveries edit": ("nothing ann --send nonsense", 3, "unreachable"),
    "profile set": ("home --send nonsense", 2, "malformed"),
    "profile list": ("", 3, "unreachable"),
    "profile show": ("home", 3, "unreachable"),
    "profile remove": ("home", 3, "unreachable"),
    "channel test": ("nonsense", 2, "malformed"),
    "once list": ("", 3, "unreachable"),
    "once settle": ("pay nothing --ledger nonsense --done 1", 2, "malformed"),
    "once forget": ("pay nothing --ledger sqlite:///none/app.db", 3, "ledger_unavailable"),
}
"""A way in which each verb fails in an empty folder without a hub; its exit code, and the word for it."""


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, verb in getattr(command, "commands", {}).items():
        yield from verbs(verb, (*path, name))
    if not getattr(command, "commands", None) or getattr(command, "invoke_without_command", False):
        yield " ".join(path), command


VERBS = dict(verbs(get_command(app)))


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DULY_DATA", "DULY_URL", "DULY_TOKEN", "DULY_MQTT"):
        monkeypatch.delenv(name, raising=False)


def duly(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["duly", *line.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_fails_says_so_in_json(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, exit_, word = FAILURES[verb]
    code, out = duly(f"{verb} {args} --json", monkeypatch, capsys)
    said = json.loads(out.splitlines()[-1])
    assert (code, said["exit"], said["error"]) == (exit_, exit_, word)
    assert said["detail"]


@pytest.mark.parametrize("verb", VERBS)
def test_words_that_a_verb_does_not_know_are_a_usage_error_in_json(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = duly(f"{verb} --json --no-such-option", monkeypatch, capsys)
    assert code == 2
    assert json.loads(out)["error"] == "usage"


def test_a_verb_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = duly("frobnicate --json", monkeypatch, capsys)
    assert (code, json.loads(out)["exit"]) == (2, 2)
