"""Backups: whole or not there, private, one file; what a restored ledger holds."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Message, VerdictKind
from duly.core.trusted_time import Floor
from duly.core.units import DAY, FOREVER, HOUR, MINUTE, MS, YEAR
from duly.errors import LedgerDamaged, LedgerError, LedgerUnavailable, SecretKeyMissing
from duly.server import ledger_backups
from duly.server.ledger_backups import back_up, restore
from duly.server.ledger_check import check_invariants
from duly.settings import Settings
from duly.storage import file_url, open_ledger
from duly.storage.secret_box import FILE, make_key
from duly.testing import ManualClock
from tests import servers
from tests.small_disk import small_disk
from tests.storage.whole_ledger import NOW, command, fill_up


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A data folder with a ledger in it."""
    data = tmp_path / "data"
    data.mkdir()
    async with await open_ledger(file_url(data / "ledger.db"), clock=ManualClock()) as ledger:
        await fill_up(ledger, data)
    return data


def settings(folder: Path, ledger: str = "") -> Settings:
    return Settings(data=str(folder), ledger=ledger)


async def test_a_backup_is_one_private_file_that_says_which_key_it_needs(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "b.db"
    about = await back_up(settings(folder), file)
    assert (await check_invariants(settings(folder), url=file_url(file))).ok
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if "b.db" in path.name] == ["b.db"]
    assert (bool(about.key), about.key_included, about.tables["messages"].rows) == (True, False, 3)


async def test_an_existing_file_is_never_replaced(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.db"
    file.write_text("mine")
    with pytest.raises(LedgerError, match="name another one"):
        await back_up(settings(folder), file)
    assert file.read_text() == "mine"


async def test_the_log_of_a_removed_ledger_is_not_applied_to_a_restored_one(
    folder: Path, tmp_path: Path
) -> None:
    """A killed hub leaves its log. Its owner removes the ledger, and then the lock file that is named."""
    file, new = tmp_path / "b.db", tmp_path / "new"
    await back_up(settings(folder), file)
    new.mkdir()
    async with await open_ledger(file_url(new / "ledger.db"), clock=ManualClock()) as lost:
        await lost.write(w.AppendEntry("lost", b"1", 1))
        left = {name: (new / name).read_bytes() for name in ("ledger.db-wal", "ledger.db.lock")}
    for path in new.iterdir():
        path.unlink()
    for name, content in left.items():
        (new / name).write_bytes(content)
    with pytest.raises(LedgerError, match=r"ledger\.db\.lock and ledger\.db-wal of it are left"):
        await restore(settings(new), file)
    (new / "ledger.db.lock").unlink()
    with pytest.raises(LedgerError, match=r"ledger\.db-wal of it is left; remove it first"):
        await restore(settings(new), file)
    (new / "ledger.db-wal").unlink()
    await restore(settings(new), file, skew=0)
    async with await open_ledger(file_url(new / "ledger.db")) as ledger:
        assert await ledger.entries("lost", 0, 1) == []


async def test_a_full_disk_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    async with await open_ledger(file_url(folder / "ledger.db"), clock=ManualClock()) as ledger:
        for n in range(80):
            await ledger.write(w.AppendEntry("large", secrets.token_bytes(100_000), n))
    with small_disk(tmp_path / "small") as disk:
        with pytest.raises(LedgerUnavailable):
            await back_up(settings(folder), disk / "b.db")
        assert list(disk.iterdir()) == []


async def test_a_restore_to_a_full_disk_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    async with await open_ledger(file_url(folder / "ledger.db"), clock=ManualClock()) as ledger:
        for n in range(80):
            await ledger.write(w.AppendEntry("large", secrets.token_bytes(100_000), n))
    await back_up(settings(folder), tmp_path / "b.db")
    with small_disk(tmp_path / "small") as disk:
        with pytest.raises(LedgerUnavailable):
            await restore(settings(disk / "not" / "there"), tmp_path / "b.db")
        assert list(disk.iterdir()) == []


async def test_a_restored_ledger_has_everything_but_what_may_run_twice(folder: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "b.db", tmp_path / "new"
    await back_up(settings(folder), file)
    done = await restore(settings(new), file, skew=0)
    assert (done.unknown, done.open) == (1, 1)
    assert "copy the secret key" in done.key
    async with await open_ledger(file_url(new / "ledger.db")) as ledger:
        done_before = await ledger.find(command(1).key)
        assert done_before is not None
        assert done_before.state is State.DONE
        unknown = await ledger.find(command(2).key)
        assert unknown is not None
        assert unknown.state is State.UNKNOWN
        assert unknown.answer is not None
        assert "restored" in unknown.answer.reason
        (alert,) = await ledger.open_deliveries("alert")
        assert alert.state is State.ACCEPTED, "an alert goes on"
        assert await ledger.open_deliveries("device") == []
        assert [entry.body for entry in await ledger.entries("conv")] == [b"hello", b"\xff\x00 bytes", b"bye"]
        assert await ledger.bucket("backup") == {}
        assert b'"action":"restore"' in (await ledger.entries("audit"))[-1].body


async def test_a_key_that_is_included_is_put_in_its_place(folder: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "b.db", tmp_path / "new"
    about = await back_up(settings(folder), file, with_key=True)
    assert about.key_included
    done = await restore(settings(new), file)
    assert done.key == ""
    assert (new / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert (new / FILE).stat().st_mode & 0o777 == 0o600
    report = await check_invariants(settings(new))
    assert all(finding.holds for finding in report.invariants)


async def test_the_key_is_in_place_before_the_ledger_has_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that dies between the two could not be repeated: there was a ledger already."""
    file, new = tmp_path / "b.db", tmp_path / "new"
    await back_up(settings(folder), file, with_key=True)
    with monkeypatch.context() as patch:
        patch.setattr(ledger_backups, "write_private", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            await restore(settings(new), file)
    assert not (new / "ledger.db").exists()
    with monkeypatch.context() as patch:
        patch.setattr(ledger_backups, "restore_rows", Mock(side_effect=LedgerUnavailable("the disk is full")))
        with pytest.raises(LedgerUnavailable):
            await restore(settings(new), file)
    assert not new.exists()
    assert (await restore(settings(new), file)).key == ""
    assert (new / FILE).read_bytes() == (folder / FILE).read_bytes()


async def test_another_key_at_the_place_is_refused(folder: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "b.db", tmp_path / "new"
    await back_up(settings(folder), file)
    new.mkdir()
    make_key(new / FILE)
    with pytest.raises(SecretKeyMissing, match="Nothing was changed"):
        await restore(settings(new), file)
    assert [path.name for path in new.iterdir()] == [FILE]


async def test_a_folder_with_a_ledger_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.db"
    await back_up(settings(folder), file)
    with pytest.raises(LedgerError, match="already"):
        await restore(settings(folder), file)


async def test_a_ledger_is_no_backup(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="duly backup"):
        await restore(settings(tmp_path / "new"), folder / "ledger.db")
    assert not (tmp_path / "new").exists()


async def test_a_damaged_backup_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.db"
    await back_up(settings(folder), file)
    raw = bytearray(file.read_bytes())
    raw[20_000] ^= 1
    file.write_bytes(raw)
    with pytest.raises(LedgerDamaged):
        await restore(settings(tmp_path / "new"), file)
    assert not (tmp_path / "new" / "ledger.db").exists()


@pytest.mark.parametrize("cut", [1, 8, 60, 4_095])
async def test_a_backup_whose_end_is_missing_is_refused(folder: Path, tmp_path: Path, cut: int) -> None:
    """SQLite reads a page that is cut as if zeros followed, and no checksum is verified then."""
    file = tmp_path / "b.db"
    await back_up(settings(folder), file)
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(LedgerDamaged, match="shorter than it was"):
        await restore(settings(tmp_path / "new"), file)
    assert not (tmp_path / "new").exists()
    with pytest.raises(LedgerDamaged, match="shorter than it was"):
        await check_invariants(settings(folder), url=file_url(file))


async def test_a_backup_from_after_the_loss_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.db"
    await back_up(settings(folder), file)
    with pytest.raises(LedgerError, match="--lost-at"):
        await restore(settings(tmp_path / "new"), file, lost_at=5, skew=0)


async def test_postgres_is_backed_up_to_a_file_and_restored_into_postgres(
    postgres_server: servers.Postgres, tmp_path: Path
) -> None:
    old, new = (postgres_server.create_database() for _ in range(2))
    async with await open_ledger(old, clock=ManualClock()) as ledger:
        await fill_up(ledger, tmp_path)
    file = tmp_path / "b.db"
    await back_up(settings(tmp_path, ledger=old), file, with_key=True)
    done = await restore(settings(tmp_path / "elsewhere", ledger=new), file, skew=0)
    assert (done.unknown, done.open, done.key) == (1, 1, "")
    assert (tmp_path / "elsewhere" / FILE).exists()
    async with await open_ledger(new) as ledger:
        lost = Message("app-1", f"{done.stale_before // 1_000 - 10}_7", "k", "lock-1")
        assert (await ledger.admit(lost)).kind is VerdictKind.STALE
        fresh = replace(lost, id=f"{done.stale_before // 1_000 + 10}_7")
        assert (await ledger.admit(fresh)).kind is VerdictKind.FRESH
    with pytest.raises(LedgerError, match="not empty"):
        await restore(settings(tmp_path, ledger=new), file)


@pytest.mark.parametrize(
    ("made", "until", "stale"),
    [
        (NOW - 1, NOW + DAY, True),
        (NOW, NOW + YEAR, True),
        (NOW + 1, NOW + DAY, False),
        (NOW - 1, NOW + 10 * YEAR, False),
        (0, NOW + DAY, True),
        (0, NOW + DAY + 1, False),
        (0, FOREVER, False),
    ],
    ids=["before", "at", "after", "an alert", "ageless, soon over", "ageless, later", "for ever"],
)
def test_a_restored_floor_covers_what_may_have_been_accepted(made: int, until: int, stale: bool) -> None:
    floor = Floor(trusted=NOW).restore(NOW, NOW + 5)
    assert (floor.refusal(until, made, NOW) is not None) is stale
    assert Floor().refusal(until, made, NOW) is None
    assert floor.mend(NOW + 10, everything=True).refusal(until, made, NOW) is None


@pytest.mark.parametrize(
    ("made", "now", "advice", "wait"),
    [
        (NOW - MINUTE, NOW - 5 * MINUTE, "nothing new is accepted in the next 5 min; send it", 5 * MINUTE),
        (NOW - MINUTE, NOW + MINUTE, "if it is still wanted, use a new id", 0),
        (0, NOW - 5 * MINUTE, "use one that does, such as a UUIDv7", 0),
    ],
    ids=["too early for any id", "later", "ageless"],
)
def test_the_refusal_after_a_restore_says_what_to_do_and_when(
    made: int, now: int, advice: str, wait: int
) -> None:
    """A new id alone does not help as long as clocks that are ahead may have made it before the loss."""
    floor = Floor(trusted=NOW).restore(NOW, NOW)
    refusal = floor.refusal(NOW + HOUR, made, now)
    assert refusal is not None
    assert advice in refusal.reason
    assert refusal.wait == (wait + MS if wait else 0)
    after = now + refusal.wait
    if made:
        assert floor.refusal(after + HOUR, max(after, NOW + 1), after) is None, "then a new id is accepted"


async def test_a_copy_of_the_folder_needs_no_lock_to_be_checked(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "ledger.db", tmp_path / "alone.db")
    assert (await check_invariants(settings(folder), url=file_url(tmp_path / "alone.db"))).ok


async def test_a_ledger_without_items_is_restored_into_postgres(
    postgres_server: servers.Postgres, tmp_path: Path
) -> None:
    """Its backup has no other item than what says what it is a backup of."""
    url, new = file_url(tmp_path / "ledger.db"), postgres_server.create_database()
    async with await open_ledger(url, clock=ManualClock()) as ledger:
        await ledger.write(w.AppendEntry("stream", b"1", 1))
    await back_up(settings(tmp_path, url), tmp_path / "b.db")
    await restore(settings(tmp_path, new), tmp_path / "b.db", skew=0)
    async with await open_ledger(new) as restored:
        assert len(await restored.entries("stream", 0, 2)) == 1
