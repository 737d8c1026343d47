"""A hub that is restored from a backup: what was accepted after the backup never runs a second time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from duly.server.ledger_backups import back_up, restore
from duly.settings import Settings
from tests.end_to_end.conftest import HubUnderTest

FILES = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock")


@pytest.fixture
def data(tmp_path: Path, local: HubUnderTest) -> Path:
    """The data folder of the hub."""
    return Path(local.hub.settings.data)


async def lose(local: HubUnderTest, data: Path) -> None:
    """The hub ends, and the disk with its ledger is gone."""
    await local.hub.stop()
    for name in FILES:
        (data / name).unlink(missing_ok=True)


async def test_what_was_accepted_after_the_backup_is_stale_and_new_ids_run(
    local: HubUnderTest, data: Path, tmp_path: Path
) -> None:
    settings, file = Settings(data=str(data)), tmp_path / "backup.db"
    async with local.join("lock") as lock, local.join("phone") as phone:
        before = await phone.command("lock", data=1)
        await lock.ack(await lock.hear(), data="first")
        assert (await phone.hear_of(before))["code"] == 0
        assert (await phone.hear_of(before))["data"] == "first"
        await back_up(settings, file)
        after = await phone.command("lock", data=2)
        await lock.ack(await lock.hear(), data="second")
        assert (await phone.hear_of(after))["code"] == 0
        assert (await phone.hear_of(after))["data"] == "second"
    await lose(local, data)
    done = await restore(settings, file, skew=0)
    assert done.stale_before // 1_000 <= time.time_ns() // 1_000_000
    await local.start()
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.command("lock", seq_id=after, data=2)
        refused = await phone.hear_of(after)
        assert (refused["type"], refused["code"], refused["error"]) == ("server_ack", 2, "stale")
        await phone.command("lock", seq_id=before, data=1)
        assert (await phone.hear_of(before))["state"] == "done", "what the backup holds is answered"
        assert (await phone.hear_of(before))["data"] == "first"
        assert await lock.hears_nothing()
        fresh = await phone.command("lock", data=3)
        command = await lock.hear()
        assert (command["seq_id"], command["data"]) == (fresh, 3)
        await lock.ack(command, data="third")
        assert (await phone.hear_of(fresh))["code"] == 0
        assert (await phone.hear_of(fresh))["data"] == "third"


async def test_what_was_open_in_the_backup_is_unknown_and_not_sent_again(
    local: HubUnderTest, data: Path, tmp_path: Path
) -> None:
    settings, file = Settings(data=str(data)), tmp_path / "backup.db"
    async with local.join("phone") as phone:
        exp = int(time.time() * 1_000) + 600_000
        seq_id = await phone.command("lock", data=1, queue=True, exp=exp)
        assert (await phone.hear_of(seq_id))["code"] == 0
        await back_up(settings, file)
        async with local.join("lock") as lock:
            await lock.ack(await lock.hear(), data="done after the backup")
            assert (await phone.hear_of(seq_id))["state"] == "done"
    await lose(local, data)
    done = await restore(settings, file, skew=0)
    assert (done.unknown, done.open) == (1, 0)
    await local.start()
    async with local.join("lock") as lock, local.join("phone") as phone:
        await phone.command("lock", seq_id=seq_id, data=1, queue=True, exp=exp)
        assert (await phone.hear_of(seq_id))["state"] == "unknown"
        assert await lock.hears_nothing()


async def test_a_backup_is_consistent_while_commands_run(
    local: HubUnderTest, data: Path, tmp_path: Path
) -> None:
    settings = Settings(data=str(data))
    async with local.join("lock") as lock, local.join("phone") as phone:

        async def press() -> None:
            while True:
                await phone.command("lock", data=1)
                await lock.ack(await lock.hear())
                await phone.hear()
                await phone.hear()

        pressing = asyncio.create_task(press())
        for n in range(3):
            await back_up(settings, tmp_path / f"{n}.db")
        pressing.cancel()
