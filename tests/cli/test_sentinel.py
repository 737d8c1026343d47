"""`duly sentinel` as its users have it: lines in, news out, and one file that survives everything."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duly.cli import sentinel
from duly.cli.common import CommandFailed, Exit
from duly.clients.sentinel import Sentinel
from tests.cli.conftest import CommandLine
from tests.guard import GUARD
from tests.small_disk import small_disk


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A hub with one sentinel, and a profile that writes down who was told what."""
    it = CommandLine(tmp_path_factory.mktemp("tower"))
    try:
        it.up()
        assert it.duly("add", "sentinel", "watch").returncode == 0
        assert it.duly("profile", "set", "home", "--send", "file:told").returncode == 0
        yield it
    finally:
        it.end()


def say(cli: CommandLine, lines: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "duly", "sentinel", "--profile", "home", *args],
        input=lines, cwd=cli.folder, env=cli.env, capture_output=True, text=True, check=False, timeout=GUARD,
    )  # fmt: skip


def news(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def listed(cli: CommandLine) -> dict[str, dict[str, Any]]:
    return {one["device"]: one for one in cli.ask("alert", "list")}


def told(cli: CommandLine, event: str) -> list[str]:
    """The devices that people were told of, once they were told of this event."""
    cli.told_alert(event)
    path = cli.folder / "duly-data" / "notifications" / "told"
    return [json.loads(line)["data"]["device"] for line in path.read_text().splitlines()]


def test_signals_by_the_line_become_one_event_and_one_notice(tower: CommandLine) -> None:
    lines = "disconnect aa:01\nreconnect aa:01\ndisconnect aa:01\n\n# nothing\n"
    seen = news(say(tower, lines, "--countdown", "2s", "--json"))  # all three are judged meanwhile
    about = [(one["what"], one.get("detail", "")) for one in seen if one.get("device") == "aa:01"]
    assert about == [("countdown", ""), ("held", "debounced"), ("queued", ""), ("sent", "")]
    alert = listed(tower)["aa:01"]
    assert alert["reason"] == "disconnect"
    assert told(tower, alert["event"]).count("aa:01") == 1


def test_a_cancel_in_time_and_a_cancel_too_late(tower: CommandLine) -> None:
    seen = news(say(tower, "trigger fall aa:02\ncancel aa:02\n", "--countdown", "1m", "--json"))
    assert [one["what"] for one in seen if one.get("device") == "aa:02"] == ["countdown", "cancelled"]
    assert tower.duly("sentinel", "trigger", "fall", "aa:03", "--profile", "home").returncode == 0
    seen = news(say(tower, "cancel aa:03\n", "--json"))
    assert {"correcting", "corrected"} <= {one["what"] for one in seen}
    assert "aa:02" not in listed(tower)
    assert listed(tower)["aa:03"]["status"] == "cancelled"


def test_everything_a_line_can_say_arrives(tower: CommandLine) -> None:
    more = '{"severity":"critical","location":{"lat":31.2},"meta":{"rssi":-70},"countdown":0}'
    done = say(tower, f"trigger fall aa:04 {more}\n")
    assert done.returncode == 0
    assert "aa:04 fall: sent: the tower has it" in done.stdout
    one = listed(tower)["aa:04"]
    assert (one["severity"], one["location"], one["device_meta"]) == (
        "critical",
        {"lat": 31.2},
        {"rssi": -70},
    )


def test_lines_that_make_no_sense_cost_nothing_else(tower: CommandLine) -> None:
    lines = 'explode\ntrigger fall\ntrigger fall x {\ntrigger fall x {"colour":1}\ndisconnect aa:05\n'
    done = say(tower, lines, "--countdown", "0s")
    assert done.returncode == 0
    assert done.stderr.count("write: disconnect DEVICE") == 2
    assert "not a JSON object" in done.stderr
    assert "colour: not known" in done.stderr
    assert "aa:05" in listed(tower)


def test_a_promise_is_taken_back_by_the_first_line(tower: CommandLine) -> None:
    seen = news(say(tower, "stand-down\n", "--heartbeat", "60s", "--json"))
    assert "stood down" in [one["what"] for one in seen]


async def test_a_promise_that_cannot_be_taken_back_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sentinel, "STAND_DOWN_SECONDS", 0.05)
    monkeypatch.setattr("sys.stdin", ["stand-down\n"])
    async with Sentinel("http://127.0.0.1:9", "duly_x") as watcher:
        with pytest.raises(
            CommandFailed, match="it expects heartbeats until a stand-down reaches it"
        ) as refused:
            await sentinel._work(watcher, json=False)
    assert refused.value.code is Exit.UNREACHABLE
    assert "stand-down" in capsys.readouterr().err


def test_one_signal_says_how_it_ended(tower: CommandLine) -> None:
    first = tower.ask("sentinel", "--profile", "home", "trigger", "smoke", "aa:06")
    assert (first["state"], len(first["event"])) == ("done", 32)
    again = tower.duly("sentinel", "trigger", "smoke", "aa:06", "--profile", "home")
    assert (again.returncode, again.stdout) == (6, "held back: debounced\n")
    wrong = tower.duly("sentinel", "trigger", "smoke", "aa:06", '{"severity":"terrible"}')
    assert wrong.returncode == 2
    assert "info, warning, critical" in wrong.stderr


def test_a_critical_signal_says_whether_a_person_was_told(tower: CommandLine) -> None:
    verb, critical = ("sentinel", "trigger", "fall"), '{"severity":"critical"}'
    assert tower.duly("profile", "set", "empty", "--nobody").returncode == 0
    well = tower.duly(*verb, "aa:20", critical, "--profile", "home", "--json")
    assert (well.returncode, json.loads(well.stdout)["told"]) == (0, True)
    silent = tower.duly(*verb, "aa:21", critical, "--profile", "empty", "--json")
    said = json.loads(silent.stdout)
    assert (silent.returncode, said["state"], said["told"], said["exit"]) == (1, "done", False, 1)
    aloud = tower.duly(*verb, "aa:22", critical, "--profile", "empty")
    assert aloud.returncode == 1
    assert "the tower has it" in aloud.stdout
    assert "NO RECIPIENT WAS TOLD" in aloud.stderr
    token = tower.duly("add", "sentinel", "afar").stdout.strip()
    away = ("--url", f"http://127.0.0.1:{tower.port}", "--token", token, "--store", "afar.db")
    afar = tower.duly(*verb, "aa:23", critical, "--profile", "home", "--json", *away)
    assert (afar.returncode, json.loads(afar.stdout)["told"]) == (0, True)
    assert tower.duly("remove", "afar").returncode == 0


def test_one_signal_is_not_answered_with_the_refusal_of_an_older_one(cli: CommandLine) -> None:
    """It waits in the same file and goes out first: its profile is still missing."""
    cli.up()
    assert cli.duly("add", "sentinel", "watch").returncode == 0
    assert cli.duly("profile", "set", "home", "--send", "file:told").returncode == 0
    assert cli.duly("sentinel", "trigger", "fall", "bb:01", "--profile", "missing").returncode == 6
    done = cli.duly("sentinel", "trigger", "fall", "bb:02", "--profile", "home", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "done")
    assert set(listed(cli)) == {"bb:02"}


def test_a_tower_that_is_away_or_does_not_know_us_leaves_the_event_in_the_file(cli: CommandLine) -> None:
    away = ("--url", "http://127.0.0.1:9", "--token", "duly_x", "--store", "queue.db", "--wait", "0.2s")
    done = cli.duly("sentinel", "trigger", "fall", "aa:07", *away)
    assert done.returncode == 3
    assert "stored in queue.db" in done.stderr
    cli.up()
    token = cli.duly("add", "sentinel", "watch").stdout.strip()
    here = ("--url", f"http://127.0.0.1:{cli.port}", "--store", "queue.db")
    done = cli.duly("sentinel", "trigger", "fall", "aa:08", *here, "--token", "duly_x")
    assert done.returncode == 4
    assert "not known" in done.stderr
    done = cli.duly("sentinel", "trigger", "fall", "aa:10", *here, "--token", token)
    assert (done.returncode, "no profile" in done.stderr) == (6, True)
    assert cli.duly("profile", "set", "default", "--send", "file:told").returncode == 0
    for transport in ((), ("--http",)):
        assert say(cli, "", *here, "--token", token, *transport).returncode == 0
    assert set(listed(cli)) == {"aa:07", "aa:08", "aa:10"}


def test_kill_9_in_the_countdown_and_it_goes_on(tower: CommandLine) -> None:
    args = [sys.executable, "-m", "duly", "sentinel", "--countdown", "2s", "--json", "--profile", "home"]
    reader, writer = subprocess.PIPE, subprocess.PIPE
    with subprocess.Popen(
        args, stdin=reader, stdout=writer, cwd=tower.folder, env=tower.env, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("disconnect aa:09\n")
        process.stdin.flush()
        while (line := json.loads(process.stdout.readline()))["what"] != "countdown":
            pass
        process.kill()
    seen = news(say(tower, "", "--json"))
    words = [one["what"] for one in seen if one.get("event") == line["event"]]
    assert words in (["countdown", "queued", "sent"], ["stored", "queued", "sent"])
    assert told(tower, line["event"]).count("aa:09") == 1


def test_limits_are_flags_or_settings_and_checked_before_anything_starts(tower: CommandLine) -> None:
    done = say(tower, "", "--per-hour", "0")
    assert done.returncode == 2
    assert "at least 1 signal" in done.stderr
    done = tower.duly("sentinel", "trigger", "x", "y", DULY_SENTINEL_COOLDOWN="never")
    assert done.returncode == 2
    assert "cooldown" in done.stderr


def test_two_at_once_on_one_file_do_not_get_into_each_others_way(tower: CommandLine) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "duly", "sentinel", "--json", "--store", "shared.db"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tower.folder, env=tower.env, text=True,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        assert json.loads(first.stdout.readline())["what"] == "online"
        second = tower.duly("sentinel", "trigger", "x", "y", "--store", "shared.db")
        assert second.returncode == 1
        assert "shared.db" in second.stderr
        first.terminate()


def test_a_critical_event_of_a_running_sentinel_goes_out_from_a_full_disk(
    tower: CommandLine, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        where = ("--profile", "home", "--store", disk / "s.db", "--json")
        running = subprocess.Popen(
            [sys.executable, "-m", "duly", "sentinel", *where],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tower.folder, env=tower.env, text=True,
        )  # fmt: skip
        try:
            assert running.stdin is not None
            assert running.stdout is not None
            lines = (json.loads(line) for line in running.stdout)
            assert next(one for one in lines if one["what"] == "online")
            running.stdin.write('trigger fall full:01 {"countdown":0}\n')
            running.stdin.flush()
            assert next(one for one in lines if one["what"] == "sent")["device"] == "full:01"
            with contextlib.suppress(OSError), (disk / "rest").open("wb") as rest:
                while True:
                    os.write(rest.fileno(), bytes(4096))
            meta = json.dumps({"text": "x" * 20_000})
            running.stdin.write(
                f'trigger smoke full:02 {{"countdown":0,"severity":"critical","meta":{meta}}}\n'
            )
            running.stdin.flush()
            said = next(one for one in lines if one["what"] in ("unstored", "stored"))
            assert (said["what"], said["device"]) == ("unstored", "full:02")
            assert next(one for one in lines if one["what"] == "sent")["device"] == "full:02"
            assert listed(tower)["full:02"]["reason"] == "smoke"
        finally:
            running.kill()
            running.communicate()
