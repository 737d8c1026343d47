"""What a hub says of itself: `/metrics`, `/v1/metrics`, health; totals and trails outlive the hub."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Admit, Advance
from duly.core.units import HOUR
from duly.identity.accounts import Role
from duly.runtime.telemetry import METRICS, OUTCOMES
from duly.runtime.time_series import ChartStep
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Ids, Peer, curl


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(local: HubUnderTest) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await curl(f"{local.url}/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return read(answer.text)


async def command(local: HubUnderTest, ids: Ids) -> str:
    """Send a command and have it carried out; returns its id."""
    seq_id = ids()
    body = {"type": "lock_control", "seq_id": seq_id, "to": "lock", "data": {"open": True}}
    async with local.join("lock") as lock:
        asked = asyncio.create_task(
            curl(f"{local.url}/v1/messages?wait=10", local.tokens["phone"], body=body)
        )
        await obey(lock)
        assert (await asked).status == 200
    return seq_id


async def obey(lock: Peer) -> None:
    await lock.ack(await lock.hear())


def total(metrics: dict[tuple[str, tuple[tuple[str, str], ...]], float], outcome: str) -> float:
    return metrics.get(("duly_messages_total", (("kind", "lock_control"), ("outcome", outcome))), 0.0)


async def test_prometheus_reads_every_declared_metric_and_the_process(local: HubUnderTest) -> None:
    seq_id = await command(local, Ids())
    body = {"type": "lock_control", "seq_id": seq_id, "to": "lock", "data": {"open": True}}
    await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=body)
    await curl(f"{local.url}/v1/state", "wrong")
    answer = await curl(f"{local.url}/metrics")
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {metric.name.removesuffix("_total") for metric in METRICS} <= families
    assert {"process_resident_memory_bytes", "process_cpu_seconds"} <= families
    found = read(answer.text)
    assert total(found, "accepted") == total(found, "done") == total(found, "duplicate") == 1
    assert found["duly_duplicates_total", ()] == 1
    assert found["duly_auth_failures_total", ()] == 1
    assert found["duly_cluster_hubs", ()] == found["duly_notifier_up", ()] == found["duly_ready", ()] == 1
    assert found["duly_commit_seconds_count", ()] >= 2
    assert found["duly_end_to_end_seconds_count", (("stage", "total"),)] == 1


async def test_every_outcome_of_a_kind_is_scraped_before_the_first_one_has_it(local: HubUnderTest) -> None:
    """A rate over a series that begins at 1 misses the first."""
    await command(local, Ids())
    for _ in range(2):
        found = await scrape(local)
        kinds = {dict(labels)["kind"] for name, labels in found if name == "duly_messages_total"}
        assert kinds == {"lock_control"}
        assert {dict(labels)["outcome"] for name, labels in found if name == "duly_messages_total"} == set(
            OUTCOMES
        )
        assert found["duly_messages_total", (("kind", "lock_control"), ("outcome", "unknown"))] == 0
        reasons = {
            dict(labels)["reason"]: value
            for (name, labels), value in found.items()
            if name == "duly_alert_held_back_total"
        }
        assert reasons == {"debounce": 0, "limit": 0, "cooldown": 0}
        await local.restart()


async def test_what_is_refused_before_it_reaches_its_application_is_counted(local: HubUnderTest) -> None:
    ids = Ids()
    await command(local, ids)
    await scrape(local)  # from now on the kind is known
    token, url = local.tokens["phone"], f"{local.url}/v1/messages"
    for body in (
        {"type": "lock_control", "seq_id": ids(), "to": "", "data": {}},
        {"type": "lock_control", "seq_id": ids(), "to": "hall", "data": {}},
        {"type": "No Type", "seq_id": ids(), "to": "lock", "data": {}},
        {"seq_id": ids()},
    ):
        assert (await curl(url, token, body=body)).status in (400, 403)
    async with local.join("phone") as phone:
        await phone.say("lock_control", seq_id=ids(), to="hall", data={})
        assert (await phone.hear())["code"] == 3
    found = await scrape(local)
    assert total(found, "refused") == 3
    assert found["duly_messages_total", (("kind", "other"), ("outcome", "refused"))] == 2
    assert len(await local.refused()) == 5


async def test_a_late_answer_after_a_restart_is_counted_by_the_kind_of_its_command(
    local: HubUnderTest,
) -> None:
    ledger, now = local.hub.ledger, local.hub.ledger.clock.now()
    one = Message("phone", Ids()(), "lock_control", "lock", b"{}")
    await ledger.write(Admit(one, now + HOUR, now))
    await ledger.write(Advance(one.key, State.UNKNOWN, now, Answer()))
    async with local.join("lock") as lock:
        await lock.say("ack", seq_id=one.id, to="phone", code=0)
        await local.until(lambda: total_of(local, "done") == 1)


async def test_a_command_under_way_at_a_restart_is_counted_by_its_kind(local: HubUnderTest) -> None:
    async with local.join("lock") as lock, local.join("phone") as phone:
        seq_id = await phone.command("lock", "lock_control")
        await lock.hear()
        await local.restart()
    async with local.join("lock") as lock:
        await lock.say("ack", seq_id=seq_id, to="phone", code=0)
        await local.until(lambda: total_of(local, "done") == 1)
    found = await scrape(local)
    assert found["duly_end_to_end_seconds_count", (("stage", "total"),)] == 1


def total_of(local: HubUnderTest, outcome: str) -> int:
    local.hub.metrics.trail.fold()
    return local.hub.telemetry.counter("duly_messages_total", "lock_control", outcome).total


async def test_pending_messages_are_counted_with_their_age(local: HubUnderTest) -> None:
    body = {"type": "lock_control", "seq_id": Ids()(), "to": "lock", "data": {}, "queue": True}
    waiting = body | {"exp": local.clock.now() // 1000 + 3_600_000}
    assert (await curl(f"{local.url}/v1/messages", local.tokens["phone"], body=waiting)).status == 202
    local.clock.seconds += 100
    found = await scrape(local)
    assert found["duly_pending", ()] == 1
    assert found["duly_oldest_pending_seconds", ()] == pytest.approx(100, abs=10)
    async with local.join("lock") as lock:
        assert (await scrape(local))["duly_connections", (("role", "device"),)] == 1
        await lock.ack(await lock.hear())
        await local.until(lambda: local.hub.gateway.pending == 0)
    assert (await scrape(local))["duly_pending", ()] == 0


async def test_metrics_are_free_on_this_machine_only(local: HubUnderTest) -> None:
    url, tokens = f"{local.url}/metrics", local.tokens
    proxied = ("-H", "X-Forwarded-For: 192.0.2.7")
    assert (await curl(url, None, *proxied)).status == 401
    assert (await curl(url, tokens["phone"], *proxied)).status == 403
    assert (await curl(url, tokens["root"], *proxied)).status == 200
    assert (await curl(url, None, "-H", "Origin: http://evil.example")).status == 401
    monitor = await local.hub.accounts.add(Role.MONITOR, "prometheus")
    assert (await curl(url, monitor, *proxied)).status == 200
    refused = await curl(f"{local.url}/v1/state", monitor)
    assert (refused.status, refused.json["error"]) == (403, "not_allowed")


@pytest.mark.parametrize(
    "header",
    [
        "X-Forwarded-Proto: https", "X-Forwarded-Host: hub.example", "CF-Connecting-IP: 192.0.2.7",
        "True-Client-IP: 192.0.2.7", "Via: 1.1 proxy", "Forwarded: for=192.0.2.7", "X-Scheme: https",
        "X-Url-Scheme: https", "Front-End-Https: on",
    ],
)  # fmt: skip
async def test_metrics_are_not_free_behind_a_proxy(local: HubUnderTest, header: str) -> None:
    """All that comes through a proxy on this machine comes from this machine."""
    assert (await curl(f"{local.url}/metrics", None, "-H", header)).status == 401


async def test_metrics_are_not_free_behind_a_proxy_that_says_nothing_and_speaks_http_1_0(
    local: HubUnderTest,
) -> None:
    assert (await curl(f"{local.url}/metrics")).status == 200
    assert (await curl(f"{local.url}/metrics", None, "--http1.0")).status == 401


async def test_metrics_are_for_admins_and_monitors(local: HubUnderTest) -> None:
    await command(local, Ids())
    assert (await curl(f"{local.url}/v1/metrics")).status == 401
    assert (await curl(f"{local.url}/v1/metrics", local.tokens["phone"])).status == 403
    shown: dict[str, Any] = (await curl(f"{local.url}/v1/metrics", local.tokens["root"])).json
    assert {one["name"] for one in shown["snapshot"]["metrics"]} == {metric.name for metric in METRICS}
    assert {
        "name": "duly_messages_total",
        "labels": {"kind": "lock_control", "outcome": "done"},
        "value": 1,
    } in (shown["cluster"])
    assert shown["state"]["down"] is None
    monitor = await local.hub.accounts.add(Role.MONITOR, "prometheus")
    assert (await curl(f"{local.url}/v1/metrics", monitor)).json["state"] == {}
    await local.until(lambda: len(local.hub.telemetry.series.points(ChartStep.SECOND)) >= 2)
    chart = (await curl(f"{local.url}/v1/metrics/second", monitor)).json
    assert chart["columns"][0] == "time"
    assert len(chart["rows"][0]) == len(chart["columns"])
    wrong = await curl(f"{local.url}/v1/metrics/fortnight", monitor)
    assert (wrong.status, wrong.json["error"]) == (404, "not_found")


async def test_health_has_the_addresses_that_orchestrators_ask_for(local: HubUnderTest) -> None:
    assert (await curl(f"{local.url}/healthz")).json == {"ok": True}
    assert (await curl(f"{local.url}/readyz")).json == (await curl(f"{local.url}/v1/health")).json


async def test_totals_and_the_trail_outlive_a_restart(local: HubUnderTest) -> None:
    seq_id = await command(local, Ids())
    before = await scrape(local)
    url = f"{local.url}/v1/messages/phone/{seq_id}"
    hops = (await curl(url, local.tokens["phone"])).json["hops"]
    assert [hop["what"] for hop in hops] == ["fresh", "sent", "done"]
    await local.restart()
    after = await scrape(local)
    assert total(after, "done") == total(before, "done") == 1
    assert (await curl(url, local.tokens["phone"])).json["hops"] == hops


async def test_a_hub_that_is_killed_shows_no_total_lower_than_before(local: HubUnderTest) -> None:
    ids = Ids()
    await command(local, ids)
    before = await scrape(local)  # what is shown is stored
    await command(local, ids)
    local.hub.metrics.totals.store = _nothing  # type: ignore[method-assign] # the end comes before the next time
    await local.restart()
    after = await scrape(local)
    assert total(after, "done") == total(before, "done") == 1


async def _nothing() -> None:
    return
