"""Metrics and timelines of several hubs on one ledger: one story, one sum."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.core.messages import key_of
from duly.core.units import SECOND
from duly.server.hub import Hub
from duly.settings import Settings
from tests.end_to_end.many import LocalCluster, until
from tests.end_to_end.raw import curl
from tests.servers import Mosquitto, Postgres, Redis, postgres

NEVER = 3600.0
"""Seconds between two looks at the parts of a hub, so that only what a part says is heard."""


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


async def test_a_command_for_a_device_at_another_hub_is_measured_in_every_stage(
    cluster: LocalCluster,
) -> None:
    here, there = cluster.hubs
    async with cluster.join(1, "lock") as lock, cluster.join(0, "phone") as phone:
        await cluster.known("lock")
        seq_id = await phone.command("lock")
        await lock.ack(await lock.hear())
        await phone.first(lambda frame: frame["type"] == "ack" and frame["seq_id"] == seq_id)
    record = await there.ledger.find(key_of("phone", seq_id))
    assert record is not None
    took = (record.moved_at - record.accepted_at) / SECOND
    for hub in cluster.hubs:
        hub.metrics.trail.fold()
    stages = there.telemetry.stages
    assert {name: sum(cell.counts) for name, cell in stages.items()} == {"send": 1, "run": 1, "total": 1}
    assert stages["send"].sum + stages["run"].sum == pytest.approx(stages["total"].sum)
    assert stages["total"].sum >= took, "it is measured from its acceptance at the other hub"
    assert not any(sum(cell.counts) for cell in here.telemetry.stages.values())


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
    monkeypatch.setattr("duly.server.metrics.SAMPLE_SECONDS", NEVER)
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


async def test_an_outage_of_the_embedded_broker_of_a_moment_is_two_lines_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.server.metrics.SAMPLE_SECONDS", NEVER)
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0))
    try:
        await hub.start()
        mqtt = hub.mqtt
        assert mqtt is not None
        assert mqtt.broker is not None
        assert mqtt.broker.pid is not None
        os.kill(mqtt.broker.pid, signal.SIGKILL)
        await until(lambda: mqtt.broker is not None and mqtt.broker.restarts == 1)
        await until(lambda: mqtt.state()["problem"] is None)
    finally:
        await hub.stop()
    assert lines_about("the broker", caplog) == ["the broker does not work", "the broker works again"]


async def test_an_outage_of_a_notifier_of_its_own_is_two_lines_in_the_log(
    tmp_path: Path,
    postgres_server: Postgres,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("duly.server.metrics.SAMPLE_SECONDS", NEVER)
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
