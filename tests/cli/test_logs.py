"""What a hub logs: JSON lines that name messages, and no secret in any of them."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.cli.conftest import CommandLine
from tests.guard import GUARD


def logged(
    cli: CommandLine,
    *args: str,
    verbs: tuple[tuple[str, ...], ...] = (),
    during: Callable[[str], None] = lambda _: None,
) -> tuple[str, list[str]]:
    """What a hub writes to stderr while verbs are used, and what those printed."""
    with (cli.folder / "log").open("w+", encoding="utf-8") as log:
        hub = subprocess.Popen(
            [sys.executable, "-m", "duly", "up", "--no-mqtt", "--port", "0", *args],
            cwd=cli.folder, env=cli.env, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        try:
            assert hub.stdout is not None
            ready, url = hub.stdout.readline().split()
            assert ready == "ready"
            during(url)
            printed = [cli.duly(*verb).stdout for verb in verbs]
        finally:
            hub.send_signal(signal.SIGTERM)
            hub.communicate(timeout=GUARD)
        log.seek(0)
        return log.read(), printed


def test_json_lines_name_the_message_its_sender_and_the_hub(cli: CommandLine) -> None:
    text, printed = logged(
        cli, "--log", "json", "--log-level", "debug",
        verbs=(
            ("add", "app", "phone"), ("add", "device", "lock"), ("grant", "phone", "lock"),
            ("send", "lock", "query", "--json"), ("send", "lock", "query", "--queue", "--exp", "1s"),
        ),
    )  # fmt: skip
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message", "hub"} <= line.keys() for line in lines)
    names = {line["hub"] for line in lines}
    assert len(names) == 1
    assert re.fullmatch(r"hub-[0-9a-f]{8}", names.pop())
    assert any("serves at http://" in line["message"] for line in lines)
    hops = [line for line in lines if line["logger"] == "duly.messages"]
    assert {"offline", "fresh"} <= {line["message"] for line in hops}
    assert all(line["scope"] == "phone" and line["id"] for line in hops)
    for said in printed:
        for token in re.findall(r"duly_[A-Za-z0-9_-]{20,}", said):
            assert token not in text


def test_lines_for_people_are_the_default_and_say_what_was_refused(cli: CommandLine) -> None:
    text, _ = logged(
        cli,
        verbs=(
            ("add", "app", "phone"),
            ("add", "device", "lock"),
            ("send", "lock", "query", "--as", "phone"),
        ),
    )
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    duly\.server: hub hub-", text)
    assert "INFO    duly.refused: refused: phone may not command lock" in text
    assert "DEBUG" not in text


def test_wrong_tokens_and_passwords_are_never_written(cli: CommandLine) -> None:
    secrets = [
        "duly_wrongwrongwrongwrongwrongwrong",
        "correct horse battery",
        "duly_ann:nobodysnobodysnobodys",
    ]

    def knock(url: str) -> None:
        for path, body in (
            ("/v1/people", {"name": "ann", "password": secrets[1]}),
            ("/v1/login", {"name": "ann", "password": secrets[1] + " staple"}),
            ("/v1/messages", {"type": "query", "seq_id": "1_1", "to": "lock", "token": secrets[0]}),
        ):
            for token in (secrets[0], secrets[2]):
                request = urllib.request.Request(
                    url + path,
                    data=json.dumps(body).encode(),
                    headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                )
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(request, timeout=GUARD).read()

    text, _ = logged(cli, "--log", "json", "--log-level", "debug", during=knock)
    assert "serves at" in text
    for secret in secrets:
        assert secret not in text
