"""A command from the shell to a simulated lock, and what can be found out about it afterwards."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest

from duly.cli.device import Effects
from duly.cli.options import duration
from duly.runtime.trail import Trail
from duly.storage import open_ledger
from tests.cli.conftest import CommandLine
from tests.guard import GUARD

OPEN = '{"open":true}'


def test_both_acknowledgements_are_shown_and_the_effect_is_on_the_disk(home: CommandLine) -> None:
    done = home.duly("send", "lock", "lock_control", OPEN)
    assert done.returncode == 0, done.stderr
    sent, server_ack, ack = done.stdout.splitlines()
    id_ = sent.rsplit(" ", 1)[1]
    assert "server_ack  code 0 accepted" in server_ack
    assert 'ack         code 0, done  {"open":true}' in ack
    assert " ms  " in server_ack
    assert home.effects("lock").count(id_) == 1
    found = Effects(home.folder / "lock.effects").read()
    assert (id_, "phone", "lock_control", {"open": True}) in found


def test_the_same_id_again_gets_the_stored_ack_and_no_second_effect(home: CommandLine) -> None:
    id_ = f"{time.time_ns() // 1_000_000}_1"
    assert home.duly("send", "lock", "lock_control", OPEN, "--id", id_).returncode == 0
    again = home.duly("send", "lock", "lock_control", OPEN, "--id", id_, "--json")
    assert again.returncode == 0
    _, said, ended = map(json.loads, again.stdout.splitlines())
    assert (said["code"], said["state"]) == (5, "done")
    assert (ended["code"], ended["data"]) == (0, {"open": True})
    other = home.duly("send", "lock", "lock_control", '{"open":false}', "--id", id_)
    assert other.returncode == 6
    assert "used before for something else" in other.stdout
    assert home.effects("lock").count(id_) == 1


def test_what_the_lock_cannot_do_fails_with_its_reason(home: CommandLine) -> None:
    done = home.duly("send", "lock", "lock_control", '{"open":"please"}')
    assert done.returncode == 1
    assert "code 2 bad parameters, failed: say what to do" in done.stdout


def test_within_an_order_key_it_need_not_wait_for_anything(home: CommandLine) -> None:
    done = home.duly("send", "lock", "lock_control", OPEN, "--order", "door", "--latest", "--json")
    *_, ack = map(json.loads, done.stdout.splitlines())
    assert ack["state"] == "done"
    assert ack["after_ms"] < 290, "no gap was waited for"


def test_exit_codes_tell_a_script_what_happened(home: CommandLine) -> None:
    assert home.duly("send", "shed", "lock_control", OPEN).returncode == 6, "it is offline"
    assert home.duly("send", "nothere", "lock_control", OPEN).returncode == 4, "nobody may"
    assert home.duly("send", "lock", "lock_control", "{open:true}").returncode == 2, "not JSON"
    nowhere = ["--url", "http://127.0.0.1:1", "--token", "duly_x"]
    assert home.duly("send", "lock", "query", *nowhere).returncode == 3
    here = ["--url", f"http://127.0.0.1:{home.port}", "--token", "duly_x"]
    assert home.duly("send", "lock", "query", *here).returncode == 4


def test_who_sends_can_be_chosen(home: CommandLine) -> None:
    home.duly("add", "app", "tablet")
    denied = home.duly("send", "lock", "query", "--as", "tablet")
    assert denied.returncode == 4
    assert "tablet may not command lock" in denied.stdout
    home.duly("grant", "tablet", "lock")
    try:
        unclear = home.duly("send", "lock", "query")
        assert (unclear.returncode, "--as: phone, tablet" in unclear.stderr) == (2, True)
        assert home.duly("send", "lock", "query", "--as", "tablet").returncode == 0
        token = home.ask("add", "app", "tablet", "--replace")["token"]
        assert home.duly("send", "lock", "query", DULY_TOKEN=token).returncode == 0
    finally:
        home.duly("remove", "tablet")


def test_outcome_trace_and_why_have_the_answers(home: CommandLine) -> None:
    sent = home.duly("send", "lock", "lock_control", OPEN)
    id_ = sent.stdout.splitlines()[0].rsplit(" ", 1)[1]
    outcome = home.ask("outcome", id_)
    assert (outcome["scope"], outcome["to"], outcome["state"]) == ("phone", "lock", "done")
    trace = home.duly("trace", id_, "--scope", "phone").stdout
    hops = [line[27:].split(",")[0] for line in trace.splitlines()[1:]]
    assert hops == [
        "made by phone",
        "accepted: stored by the hub",
        "told phone: accepted",
        "sent to lock",
        "done",
        "told phone: done",
    ]
    refused = home.duly("send", "shed", "lock_control", OPEN)
    other = refused.stdout.splitlines()[0].rsplit(" ", 1)[1]
    assert "shed is offline" in home.duly("why", other).stdout
    assert home.duly("outcome", other).returncode == 6
    assert home.duly("outcome", "never-sent").returncode == 5
    assert home.duly("why", id_).stdout == home.duly("trace", id_).stdout, "it was not refused: the same"
    (told,) = home.ask("why", id_)["messages"]
    assert [step["what"] for step in told["timeline"]] == ["made", "stored", "fresh", "sent", "done", "told"]
    assert home.ask("trace", id_)["messages"] == [told]
    assert home.duly("why", "never-sent").returncode == 5


def test_watch_shows_what_passes(home: CommandLine) -> None:
    watch = home.start("watch", "--json")
    try:
        watch.note("watching")
        home.duly("send", "lock", "query")
        assert json.loads(watch.line('"said"'))["to"] == "lock"
        assert json.loads(watch.line('"ended"'))["state"] == "done"
    finally:
        assert watch.stop(signal.SIGINT) == 130


def test_watch_goes_on_when_the_hub_comes_back(cli: CommandLine) -> None:
    hub = cli.up()
    for args in ("add app phone", "add device shed", "grant phone shed"):
        cli.duly(*args.split())
    watch = cli.start("watch")
    assert watch.process.stderr is not None
    assert "watching" in watch.process.stderr.readline()
    hub.stop(signal.SIGKILL)
    assert "waiting for it" in watch.process.stderr.readline()
    cli.up()
    assert "watching" in watch.process.stderr.readline()
    shed = cli.device("shed")
    assert 'device_status #1  {"online":true}' in watch.line("shed")
    shed.stop()
    assert '{"online":false}' in watch.line("shed")
    cli.duly("send", "shed", "query")
    assert "phone → shed" in watch.line("offline")
    assert watch.stop(signal.SIGINT) == 130


def test_what_is_queued_waits_for_its_device(cli: CommandLine) -> None:
    cli.up()
    for args in ("add app phone", "add device lamp", "grant phone lamp"):
        cli.duly(*args.split())
    queued = cli.duly(
        "send", "lamp", "dev_control", '{"toggle":true}', "--queue", "--exp", "1m", "--wait", "0s"
    )
    assert queued.returncode == 5, "asked to wait, it cannot say how it ends"
    id_ = queued.stdout.splitlines()[0].rsplit(" ", 1)[1]
    assert cli.ask("outcome", id_)["state"] == "accepted"
    lamp = cli.device("lamp", "--kind", "lamp")
    assert '{"on":true}' in lamp.line(id_)
    assert cli.effects("lamp") == [id_]


def test_a_device_and_a_hub_that_are_killed_repeat_nothing(cli: CommandLine) -> None:
    hub = cli.up()
    for args in ("add app phone", "add device lock", "grant phone lock"):
        cli.duly(*args.split())
    lock = cli.device("lock")
    id_ = f"{time.time_ns() // 1_000_000}_1"
    again = ("send", "lock", "lock_control", '{"toggle":true}', "--id", id_)
    assert cli.duly(*again).returncode == 0
    lock.stop(signal.SIGKILL)
    lock = cli.device("lock")
    assert '"state":"done"' in cli.duly(*again, "--json").stdout
    _wait_for_trail(cli, id_)  # what a hub has noted in its last quarter of a second dies with it
    hub.stop(signal.SIGKILL)
    assert cli.duly("outcome", id_).returncode == 0, "the ledger answers while no hub runs"
    trace = cli.duly("trace", id_).stdout
    assert "sent to lock, attempt 1" in trace, "so does the trail"
    assert cli.duly("send", "lock", "query").returncode == 3
    cli.up()
    lock.line("online again")
    assert '"state":"done"' in cli.duly(*again, "--json").stdout
    assert cli.effects("lock") == [id_]
    state = cli.duly("send", "lock", "query")
    assert '{"open":true}' in state.stdout


def _wait_for_trail(cli: CommandLine, id_: str) -> None:
    """Until the ledger holds how a command was sent."""

    async def sent() -> bool:
        url = f"sqlite:///{cli.folder}/duly-data/ledger.db?mode=ro"
        async with await open_ledger(url) as ledger:
            (record,) = await ledger.with_id(id_)
            return any(hop.what == "sent" for hop in await Trail(ledger).of_record(record))

    end = time.monotonic() + GUARD
    while not asyncio.run(sent()):
        assert time.monotonic() < end, "it is never stored"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("2m", 120), ("1h", 3600), ("0", 0), ("1.5 s", 1.5)]
)
def test_lengths_of_time_are_written_as_people_write_them(text: str, seconds: float) -> None:
    assert duration(text) == seconds
