"""Figures and timelines of several hubs on one ledger: one story, one sum."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.end_to_end.many import LocalCluster, until
from tests.end_to_end.raw import curl
from tests.servers import Postgres, postgres


@pytest.fixture
async def cluster(tmp_path: Path, postgres_server: Postgres) -> AsyncIterator[LocalCluster]:
    it = LocalCluster(tmp_path, postgres_server)
    await it.start(2)
    yield it
    await it.stop()


async def test_a_timeline_names_the_hub_of_each_hop_and_a_sum_counts_each_message_once(
    cluster: LocalCluster,
) -> None:
    here, there = cluster.hubs
    async with cluster.join(1, "lock") as lock, cluster.join(0, "phone") as phone:
        await cluster.known("lock")
        seq_id = await phone.command("lock")
        assert (await phone.hear_of(seq_id))["code"] == 0
        await lock.ack(await lock.hear())
        await phone.first(lambda frame: frame["type"] == "ack" and frame["seq_id"] == seq_id)
        for hub in cluster.hubs:
            await hub.figures.trail.flush()
    for hub in cluster.hubs:
        answer = await curl(f"{hub.url}/v1/messages/phone/{seq_id}", cluster.tokens["root"])
        hops = [(hop["hub"], hop["what"]) for hop in answer.json["hops"]]
        assert (here.name, "fresh") in hops
        assert (there.name, "sent") in hops
        assert (there.name, "done") in hops
    for hub in cluster.hubs:
        await hub.measure(stored=True)
    totals = (await curl(f"{here.url}/v1/figures", cluster.tokens["root"])).json["cluster"]
    counted = {
        one["labels"]["outcome"]: one["value"] for one in totals if one["name"] == "duly_messages_total"
    }
    assert counted == {"accepted": 1, "done": 1}


async def test_an_outage_of_the_database_is_two_lines_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with postgres() as own:
        cluster = LocalCluster(tmp_path, own)
        await cluster.start(1)
        try:
            await asyncio.to_thread(own.stop)
            await until(lambda: "the ledger" in cluster.hubs[0].figures.outages.current, 60)
            await asyncio.to_thread(own.start)
            await until(lambda: "the ledger" not in cluster.hubs[0].figures.outages.current, 60)
        finally:
            await cluster.stop()
    said = [
        record.getMessage().split(":")[0].split(",")[0]
        for record in caplog.records
        if record.name == "duly.outage" and record.__dict__.get("part") == "the ledger"
    ]
    assert said == ["the ledger does not work", "the ledger works again"]
