"""Devices without a memory, and commands that may take long, from the shell."""

from __future__ import annotations

import json

from tests.cli.conftest import CommandLine


def test_a_device_can_be_added_that_is_sent_everything_once(cli: CommandLine) -> None:
    cli.up()
    assert cli.duly("add", "device", "motor", "--no-resend").returncode == 0
    refused = cli.duly("add", "app", "phone", "--no-resend")
    assert refused.returncode == 2
    assert "only a device" in refused.stderr


def test_a_command_of_any_type_may_say_how_long_it_may_take(home: CommandLine) -> None:
    done = home.duly("send", "lock", "set_temperature", "21", "--timeout", "30s", "--json")
    assert done.returncode == 0, done.stderr
    sent, *_, ended = map(json.loads, done.stdout.splitlines())
    assert sent["timeout"] == 30_000
    assert ended["what"] == "ack"
