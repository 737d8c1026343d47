"""`duly trace` of a line of chat, and of ids that nobody knows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping

import pytest

from tests.cli.conftest import CommandLine
from tests.guard import GUARD


def post(cli: CommandLine, token: str, frame: Mapping[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{cli.port}/v1/messages",
        data=json.dumps(frame).encode(),
        headers={"Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=GUARD) as answer:
        said: dict[str, object] = json.loads(answer.read())
    return said


def test_a_line_is_followed_to_its_recipients_with_and_without_the_hub(cli: CommandLine) -> None:
    hub = cli.up()
    ann = cli.duly("add", "user", "ann").stdout.strip()
    cli.duly("add", "user", "bob")
    id_ = f"{time.time_ns() // 1_000_000}_1"
    line = {"type": "one_chat", "seq_id": id_, "to": "bob", "data": {"text": "hi"}}
    assert post(cli, ann, line)["code"] == 0
    shown = cli.duly("trace", id_)
    assert shown.returncode == 0
    assert "line 1 of ann+bob: 0 of 1 have it, 0 of 1 have read it" in shown.stdout
    assert "waits for bob" in shown.stdout
    assert ", line 1\n" in shown.stdout
    assert "  1\n" not in shown.stdout, "a number alone says nothing"
    (record,) = cli.ask("trace", id_)["messages"]
    assert record["line"]["recipients"][0]["state"] == "waiting"
    (cli.folder / "nothing").write_text("")
    with (cli.folder / "nothing").open() as nothing:
        chat = [sys.executable, "-m", "duly", "chat", "--as", "bob", "--to", "ann"]
        said = subprocess.run(
            chat, cwd=cli.folder, env=cli.env, stdin=nothing, capture_output=True, text=True, timeout=GUARD,
            check=True,
        )  # fmt: skip
    assert said.stdout.count("ann: hi") == 1, "what is shown of the past is not told again"
    assert "read by bob, up to 1" in cli.duly("trace", id_).stdout
    assert hub.stop() == 0
    assert "read by bob, up to 1" in cli.duly("trace", id_).stdout, "from the ledger"


@pytest.mark.parametrize("verb", ["trace", "why", "outcome"])
def test_an_unknown_id(home: CommandLine, verb: str) -> None:
    done = home.duly(verb, "1700000000000_99")
    assert done.returncode == 5
    assert "1700000000000_99" in done.stderr
    assert done.stdout == ""
    asked = home.duly(verb, "1700000000000_99", "--json")
    assert asked.returncode == 5
    assert json.loads(asked.stdout.splitlines()[-1])["exit"] == 5
