"""Metrics and timelines of several hubs on one ledger: one story, one sum."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.many import LocalCluster, until
from tests.end_to_end.raw import curl
from tests.servers import Mosquitto, Postgres, Redis, postgres


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
            await hub.metrics.trail.flush()
    for hub in cluster.hubs:
        answer = await curl(f"{hub.url}/v1/messages/phone/{seq_id}", cluster.tokens["root"])
        hops = [(hop["hub"], hop["what"]) for hop in answer.json["hops"]]
        assert (here.name, "fresh") in hops
        assert (there.name, "sent") in hops
        assert (there.name, "done") in hops
    for hub in cluster.hubs:
        await hub.measure(stored=True)
    totals = (await curl(f"{here.url}/v1/metrics", cluster.tokens["root"])).json["cluster"]
    counted = {
        one["labels"]["outcome"]: one["value"] for one in totals if one["name"] == "duly_messages_total"
    }
    assert counted == {"accepted": 1, "done": 1}


def lines_about(part: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of the outages of a part, without reasons."""
    return [
        record.getMessage().split(":")[0].split(",")[0]
        for record in caplog.records
        if record.name == "duly.outage" and record.__dict__.get("part") == part
    ]


async def see_outage(hub: Hub, parts: set[str], server: Postgres | Redis | Mosquitto) -> None:
    """Stop a server until a hub sees the outage of these parts, and start it until it sees none."""
    current = hub.metrics.outages.current
    await asyncio.to_thread(server.stop)
    await until(lambda: parts <= current.keys())
    await asyncio.to_thread(server.start)
    await until(lambda: not parts & current.keys())


async def test_an_outage_of_the_database_is_two_lines_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"the ledger", "the notifier"}  # both are in the database
    with postgres() as own:
        cluster = LocalCluster(tmp_path, own)
        await cluster.start(1)
        try:
            await see_outage(cluster.hubs[0], parts, own)
        finally:
            await cluster.stop()
    for part in parts:
        assert lines_about(part, caplog) == [f"{part} does not work", f"{part} works again"]


async def test_an_outage_of_the_broker_is_two_lines_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.server.metrics.SAMPLE_SECONDS", 0.05)
    broker = Mosquitto()
    broker.start()
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt=broker.url("hub")))
    try:
        await hub.start()
        await until(lambda: hub.mqtt is not None and hub.mqtt.state()["problem"] is None)
        caplog.clear()
        await see_outage(hub, {"the broker"}, broker)
    finally:
        await hub.stop()
        broker.stop()
        broker.remove()
    assert lines_about("the broker", caplog) == ["the broker does not work", "the broker works again"]


async def test_an_outage_of_a_notifier_of_its_own_is_two_lines_in_the_log(
    tmp_path: Path,
    postgres_server: Postgres,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("duly.server.metrics.SAMPLE_SECONDS", 0.05)
    redis = Redis()
    redis.start()
    cluster = LocalCluster(tmp_path, postgres_server, notifier=redis.url)
    try:
        await cluster.start(1)
        await see_outage(cluster.hubs[0], {"the notifier"}, redis)
    finally:
        await cluster.stop()
        redis.stop()
        redis.remove()
    assert lines_about("the notifier", caplog) == ["the notifier does not work", "the notifier works again"]
    assert lines_about("the ledger", caplog) == []
