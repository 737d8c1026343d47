"""`duly check`, `backup`, `restore`, `export`, `import` and `copy`, as their users have them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from duly.cli.common import Exit
from duly.cli.group import app
from duly.storage import file_url, open_ledger
from duly.storage.sqlite.file import connect
from duly.testing import ManualClock
from tests.cli.conftest import CommandLine
from tests.storage.whole_ledger import fill_up

OPEN = '{"open":true}'
Duly = Callable[..., Result]


@pytest.fixture
def duly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Duly:
    """Runs a verb in a folder with a ledger in `duly-data`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    data = tmp_path / "duly-data"
    data.mkdir()

    async def make() -> None:
        async with await open_ledger(file_url(data / "ledger.db"), clock=ManualClock()) as ledger:
            await fill_up(ledger, data)

    asyncio.run(make())
    return lambda *args: CliRunner().invoke(app, args)


def test_a_restore_that_fails_creates_no_folder(duly: Duly) -> None:
    Path("backup.db").write_bytes(b"SQLite format 3\0, and then nothing that fits")
    assert duly("restore", "backup.db", "--data", "new").exit_code == 1
    assert not Path("new").exists()


@pytest.mark.parametrize("target", ["new", "not/there/yet"])
def test_a_copy_that_fails_leaves_no_folder(duly: Duly, target: str) -> None:
    before = sorted(Path().rglob("*"))
    assert duly("copy", "missing", target).exit_code != 0
    assert sorted(Path().rglob("*")) == before


def test_an_import_that_fails_leaves_no_folder(duly: Duly) -> None:
    assert duly("export", "whole.jsonl").exit_code == 0
    lines = Path("whole.jsonl").read_text().splitlines(keepends=True)
    Path("cut.jsonl").write_text("".join(lines[:-1]))
    assert duly("import", "cut.jsonl", "--data", "new").exit_code != 0
    assert not Path("new").exists()


def test_a_broken_invariant_is_shown_with_what_to_do_and_the_exit_code_is_1(duly: Duly) -> None:
    assert "26 of 26 invariants hold" in duly("check").stdout
    db = connect(Path("duly-data/ledger.db"))
    db.execute("UPDATE cursors SET n = 9")
    db.close()
    found = duly("check")
    assert found.exit_code == 1
    assert "✗ cursor-reached: no reader has come further than its stream; broken in 1 row:" in found.stdout
    assert "'ann' is at 9 of 'conv', which ends at 3" in found.stdout
    assert "what to do: restore a backup" in found.stdout
    told = json.loads(duly("check", "--json").stdout)
    assert [one["name"] for one in told["invariants"] if one["holds"] is False] == ["cursor-reached"]
    assert "cursor-reached" in duly("check", "--list").stdout


@pytest.mark.parametrize("verb", ["check", "backup b.db", "export e.jsonl", "copy duly-data c.db"])
def test_a_ledger_that_lost_its_log_is_neither_checked_nor_kept(duly: Duly, verb: str) -> None:
    """What is left of it was called sound, and kept as if it were whole."""
    lock = Path("duly-data/ledger.db.lock")
    note = json.loads(lock.read_bytes())
    lock.write_bytes(json.dumps(note | {"salt": "0011223344556677", "frames": 9}).encode())
    found = duly(*verb.split())
    assert "is gone, and" in str(found.exception), found.output
    assert not list(Path().glob("*.*"))


def test_a_folder_without_a_ledger_says_so(duly: Duly) -> None:
    assert "there is no ledger in nowhere" in str(duly("check", "--data", "nowhere").exception)


def test_a_backup_is_restored_into_another_folder(duly: Duly) -> None:
    made = duly("backup", "b.db")
    assert "b.db holds the ledger of" in made.stdout
    assert "which it does not include" in made.stderr
    assert json.loads(duly("backup", "k.db", "--with-key", "--json").stdout)["key_included"] is True
    done = duly("restore", "k.db", "--data", "new", "--skew", "0s")
    assert "1 open message may have ended since" in done.stdout
    assert "until then the hub refuses new messages" not in done.stderr
    late = duly("restore", "k.db", "--data", "late")
    assert "in 5 min: until then the hub refuses new messages" in late.stderr
    floor = duly("floor", "--data", "new")
    assert "this ledger was restored" in floor.stderr
    assert "has forgotten nothing since it was restored" in floor.stdout
    assert "26 of 26 invariants hold" in duly("check", "--data", "new").stdout
    assert "already" in str(duly("restore", "b.db").exception)
    assert "is not a time" in str(duly("restore", "b.db", "--data", "x", "--lost-at", "noon").exception)


def test_an_export_is_imported_and_a_ledger_copied(duly: Duly) -> None:
    assert duly("export", "out.jsonl").exit_code == 0
    assert Path("out.jsonl").stat().st_mode & 0o777 == 0o600
    assert "already" in str(duly("export", "out.jsonl").exception)
    assert "imported into" in duly("import", "out.jsonl", "--data", "new").stdout
    assert "copied:" in duly("copy", "duly-data", "copy.db").stdout
    assert "the same ledger" in str(duly("copy", "duly-data", "duly-data/ledger.db").exception)
    told = [json.loads(duly("check", "--data", where, "--json").stdout) for where in ("new", "copy.db")]
    assert told[0]["tables"] == told[1]["tables"]


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(
    duly: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    refused = duly("export", "out.jsonl")
    assert "out.jsonl cannot be written (No space left on device)" in str(refused.exception)
    assert list(Path().glob("*out.jsonl*")) == []


def test_a_folder_is_no_backup(duly: Duly) -> None:
    assert "there is no ledger at duly-data" in str(duly("restore", "duly-data", "--data", "new").exception)


def test_a_ledger_is_copied_into_a_new_data_folder_and_its_secrets_are_checked(duly: Duly) -> None:
    """The way back from PostgreSQL: the target was a file of that name, and the key could not be named."""
    Path("duly-data/secret.key").rename("kept.key")
    done = duly("copy", "duly-data/ledger.db", "new-data", "--secret-key", "kept.key")
    assert "26 of 26 invariants hold" in done.stdout, done.output
    assert Path("new-data").stat().st_mode & 0o777 == 0o700
    Path("kept.key").rename("new-data/secret.key")
    assert "26 of 26 invariants hold" in duly("check", "--data", "new-data").stdout


def test_a_verb_that_misses_the_secret_key_says_what_every_verb_understands(
    duly: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'duly add' named an option that it does not have."""
    Path("duly-data/secret.key").rename("kept.key")
    refused = str(duly("add", "device", "shed", "--ledger", "sqlite:///duly-data/ledger.db").exception)
    assert "DULY_SECRET_KEY=FILE" in refused
    monkeypatch.setenv("DULY_SECRET_KEY", "kept.key")
    done = duly("add", "device", "shed", "--ledger", "sqlite:///duly-data/ledger.db")
    assert done.exit_code == 0, done.output
    assert "26 of 26 invariants hold" in duly("copy", "duly-data/ledger.db", "other.db").stdout


@pytest.mark.proof
def test_a_killed_hub_is_restored_and_the_device_does_nothing_twice(cli: CommandLine) -> None:
    """Real processes: a backup, one more command, kill -9, a new disk, a device that has lost its memory."""
    hub = cli.up()
    for words in (("add", "app", "phone"), ("add", "device", "lock"), ("grant", "phone", "lock")):
        assert cli.duly(*words).returncode == 0
    device = cli.device("lock", "--store", "first.db")
    made = [f"{time.time_ns() // 1_000_000 + n}_{n}" for n in range(2)]
    assert cli.duly("send", "lock", "lock_control", OPEN, "--id", made[0]).returncode == 0
    assert cli.duly("backup", "b.db", "--with-key").returncode == 0
    assert cli.duly("send", "lock", "lock_control", OPEN, "--id", made[1]).returncode == 0
    hub.stop(signal.SIGKILL)
    device.stop()
    shutil.rmtree(cli.folder / "duly-data")
    done = cli.duly("restore", "b.db", "--skew", "0s")
    assert done.returncode == 0, done.stderr
    cli.up()
    cli.device("lock", "--store", "second.db")
    again = [cli.duly("send", "lock", "lock_control", OPEN, "--id", each).returncode for each in made]
    assert again == [Exit.OK, Exit.REFUSED], "the first has its answer, the second is stale"
    assert cli.effects("lock") == made
    assert cli.duly("send", "lock", "lock_control", OPEN).returncode == 0
    assert len(cli.effects("lock")) == 3
