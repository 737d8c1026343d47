"""Backlogs, quotas and permissions where several hubs share a ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.identity.accounts import Principal, Role
from tests.end_to_end.many import LocalCluster, until, with_or_without_hints
from tests.end_to_end.raw import Peer
from tests.end_to_end.test_many import ends
from tests.guard import GUARD
from tests.servers import Postgres


@pytest.fixture(params=["hints", "no hints"])
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: Postgres
) -> AsyncIterator[LocalCluster]:
    async with with_or_without_hints(request, 2, tmp_path, postgres_server, max_queued=1_000) as hubs:
        yield hubs


async def queue(app: Peer, count: int, size: int = 10) -> list[str]:
    exp = int((time.time() + 600) * 1000)
    ids = [await app.command("lock", queue=True, exp=exp, data="x" * size) for _ in range(count)]
    for seq_id in ids:
        assert (await app.hear_of(seq_id))["code"] == 0
    return ids


@pytest.mark.parametrize(("count", "size"), [(600, 10), (30, 200_000)])
async def test_a_backlog_from_another_hub_is_delivered_in_order(
    cluster: LocalCluster, count: int, size: int
) -> None:
    async with cluster.join(0, "phone") as phone:
        ids = await queue(phone, count, size)
        async with cluster.join(1, "lock") as lock:
            assert [(await lock.obey())["seq_id"] for _ in ids] == ids
        assert (await ends(phone, ids[-1]))["state"] == "done"


async def test_a_grant_revoked_at_another_hub_cancels_and_the_sender_is_told(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone:
        ids = await queue(phone, 3)
        await cluster.hubs[1].admin.run(
            Principal("root", Role.ADMIN), "revoke", {"app": "phone", "device": "lock"}
        )
        for seq_id in ids:
            end = await ends(phone, seq_id)
            assert end["state"] == "cancelled"
            assert "no longer" in end["detail"]
        async with cluster.join(1, "lock") as lock:
            assert await lock.hears_nothing()


async def test_a_removed_app_commands_nothing_any_more(cluster: LocalCluster) -> None:
    async with cluster.join(0, "phone") as phone:
        (seq_id,) = await queue(phone, 1)
    await cluster.hubs[1].admin.run(Principal("root", Role.ADMIN), "remove", {"name": "phone"})
    async with cluster.join(0, "lock") as lock:
        assert await lock.hears_nothing()
        async with asyncio.timeout(GUARD):  # its hub is told of it by a hint, or asks a little later
            while (
                record := await cluster.hubs[0].ledger.outcome("phone", seq_id)
            ) and not record.state.terminal:
                await asyncio.sleep(0.01)
        assert record is not None
        assert record.state.word == "cancelled"
        assert await lock.hears_nothing()


async def test_what_waits_for_a_device_remote_counts_until_it_has_ended(cluster: LocalCluster) -> None:
    exp = int((time.time() + 600) * 1000)
    async with cluster.join(0, "phone") as phone:
        ids = await queue(phone, 1_000)
        over = await phone.command("lock", queue=True, exp=exp)
        assert (await phone.hear_of(over))["error"] == "rate_limited"
        async with cluster.join(1, "lock") as lock:
            for _ in ids:
                await lock.obey()
            for seq_id in ids:
                await ends(phone, seq_id)
        await until(lambda: not cluster.hubs[0].gateway._inbox.backlog)
        again = await phone.command("lock", seq_id=over, queue=True, exp=exp)
        assert (await phone.hear_of(again))["code"] == 0
