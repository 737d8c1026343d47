"""The page where two hubs share a PostgreSQL: a session, an audit chain and a timeline are those of both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Admit, Advance
from duly.core.units import HOUR, MS
from duly.server.dashboard.visitors import DashboardRole
from tests.end_to_end.many import LocalCluster, until
from tests.guard import GUARD
from tests.server.dashboard.test_fuzz import some
from tests.server.dashboard.visiting import mint
from tests.servers import Postgres

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: Postgres
) -> AsyncIterator[LocalCluster]:
    it = LocalCluster(Path(tmp_path_factory.mktemp("hubs")), postgres_server)
    await it.start(2)
    yield it
    await it.stop()


class ClusterVisitor:
    """A person who has logged in by one hub, and whom a load balancer leads to either."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession) -> None:
        self._urls = [hub.url for hub in cluster.hubs]
        self._http = http
        self.csrf = ""

    async def ask(self, hub: int, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer of a hub."""
        heads = options.pop("headers", {}) | {"Host": "127.0.0.1"}
        url = f"{self._urls[hub]}{path}"
        async with self._http.request(method, url, headers=heads, **options) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, hub: int, path: str, **query: str) -> Any:
        """What a view of a hub shows."""
        status, said = await self.ask(hub, "GET", path, params=query)
        assert status == 200, said
        return said

    async def act(self, hub: int, action: str, **wanted: str) -> tuple[int, Any]:
        """Do something at a hub."""
        heads = {"X-CSRF-Token": self.csrf}
        return await self.ask(hub, "POST", f"/page/do/{action}", json=wanted, headers=heads)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ann(cluster: LocalCluster) -> AsyncIterator[ClusterVisitor]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        visitor = ClusterVisitor(cluster, http)
        link = await cluster.hubs[0].dashboard.access.make_link("ann", DashboardRole.ADMIN)
        status, said = await visitor.ask(1, "POST", "/page/login", json={"link": link})
        assert status == 200, said
        visitor.csrf = (await visitor.get(0, "/page/session"))["csrf"]
        yield visitor


async def test_a_link_made_at_one_hub_lets_in_at_the_other_and_a_session_holds_at_both(
    cluster: LocalCluster, ann: ClusterVisitor
) -> None:
    await until(lambda: all(len(hub.gateway.remote.hubs) == 2 for hub in cluster.hubs))
    for hub in range(2):
        assert (await ann.get(hub, "/page/session"))["name"] == "ann"
        seen = await ann.get(hub, "/overview.json")
        assert {one["name"] for one in seen["hubs"]} == {one.name for one in cluster.hubs}, "as in logs"
        assert seen["health"]["ledger"]["engine"].startswith("PostgreSQL")
        assert seen["health"]["notifier"]["problem"] is None


async def test_a_command_for_a_device_at_the_other_hub_has_one_timeline(
    cluster: LocalCluster, ann: ClusterVisitor
) -> None:
    id_ = mint()
    async with cluster.join(1, "lock") as lock:
        await cluster.known("lock")
        status, said = await ann.act(0, "command.send", id=id_, device="lock", type="lock_control", data="{}")
        assert (status, said["server_ack"]["code"]) == (200, 0), said
        await lock.ack(await lock.hear())
        async with asyncio.timeout(GUARD):
            while (await ann.get(0, "/message.json", scope="dashboard", id=id_))["state"] != "done":
                await asyncio.sleep(0.01)
    async with asyncio.timeout(GUARD):  # until both have noted that its sender's request was over
        while True:
            for one in cluster.hubs:
                await one.metrics.trail.flush()
            here, there = [await ann.get(hub, "/message.json", scope="dashboard", id=id_) for hub in range(2)]
            if here["timeline"] == there["timeline"] and here["timeline"][-1]["what"] == "not told":
                break
    steps = {(step["what"], step.get("hub", "")) for step in here["timeline"]}
    assert ("fresh", cluster.hubs[0].name) in steps
    assert ("sent", cluster.hubs[1].name) in steps


async def test_an_answer_shows_at_the_other_hub_that_the_device_was_heard(
    cluster: LocalCluster, ann: ClusterVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a write for each answer: the hub that heard it stores it with its heartbeat."""
    monkeypatch.setattr("duly.apps.gateway.device_list.STORED_EVERY", 0)

    async def listed_at(hub: int) -> dict[str, Any]:
        heads = {"Authorization": f"Bearer {cluster.tokens['phone']}"}
        _, listed = await ann.ask(hub, "GET", "/v1/devices", headers=heads)
        lock: dict[str, Any] = next(one for one in listed["devices"] if one["name"] == "lock")
        return lock

    await until(lambda: all(len(hub.gateway.remote.hubs) == 2 for hub in cluster.hubs))
    async with cluster.join(1, "lock") as lock:
        await cluster.known("lock")
        asked = cluster.hubs[0].ledger.clock.now() // MS
        wanted = {"id": mint(), "device": "lock", "type": "lock_control", "data": "{}"}
        assert (await ann.act(0, "command.send", **wanted))[1]["server_ack"]["code"] == 0
        await lock.ack(await lock.hear())
        async with asyncio.timeout(GUARD):
            while (await ann.get(0, "/device.json", name="lock"))["last_heard"] < asked:
                await asyncio.sleep(0.01)
        for hub in range(2):
            shown = (await ann.get(hub, "/devices.json", name="lock"))["devices"][0]["last_heard"]
            assert (await listed_at(hub))["last_heard"] == shown >= asked
    async with asyncio.timeout(GUARD):
        while (lock_then := await listed_at(0))["online"]:
            await asyncio.sleep(0.01)
    assert lock_then["last_heard"] == shown, "and not when it left"


async def test_what_waits_for_an_offline_device_is_shown_at_every_hub(
    cluster: LocalCluster, ann: ClusterVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.server.dashboard.device_views.COUNT_SECONDS", 0.0)
    id_ = mint()
    wanted = {"id": id_, "device": "lamp", "type": "dev_control", "data": "{}", "queue": "yes"}
    assert (await ann.act(0, "command.send", **wanted))[1]["server_ack"]["code"] == 0
    for hub, one in enumerate(cluster.hubs):
        await one.gateway.unheld.refresh()
        assert (await ann.get(hub, "/device.json", name="lamp"))["queue"] == 1
        gauges = (await ann.get(hub, "/overview.json"))["metrics"]
        assert gauges["duly_waiting"] == {"": 1}
        assert gauges["duly_oldest_pending_seconds"][""] > 0
    assert (await ann.act(1, "message.cancel", scope="dashboard", id=id_))[0] == 200
    await cluster.hubs[0].gateway.unheld.refresh()
    assert (await ann.get(0, "/device.json", name="lamp"))["queue"] == 0


async def test_totals_are_those_of_all_hubs(
    cluster: LocalCluster, ann: ClusterVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.server.dashboard.overview.TOTALS_SECONDS", 0.0)
    await until(lambda: all(len(hub.gateway.remote.hubs) == 2 for hub in cluster.hubs))
    async with cluster.join(0, "phone") as phone:
        refused = await phone.command("lamp")
        assert (await phone.hear_of(refused))["error"] == "offline"
    for one in cluster.hubs:
        await one.measure(stored=True)
    for hub in range(2):
        counted = (await ann.get(hub, "/overview.json"))["metrics"]["duly_messages_total"]
        assert counted["lock_control/refused"] == 1, "it was refused at the first hub"


async def test_messages_are_found_by_every_filter_at_either_hub(
    cluster: LocalCluster, ann: ClusterVisitor
) -> None:
    ledger = cluster.hubs[0].ledger
    now = ledger.clock.now()
    for n, state in enumerate((State.DONE, State.UNKNOWN, State.FAILED)):
        message = Message("tablet", f"{now // 1000}_{n}", "query", "lamp", b"{}")
        await ledger.write(Admit(message, now + 24 * HOUR, now))
        await ledger.write(Advance(message.key, state, now, Answer()))
    for hub, query, found in (
        (0, {"scope": "tablet"}, 3),
        (1, {"scope": "tablet", "state": "trouble", "since": str(now // 1000 - 1)}, 2),
        (0, {"to": "lamp", "kind": "query", "state": "unknown"}, 1),
        (1, {"id": f"{now // 1000}_2"}, 1),
        (0, {"scope": "tablet", "until": str(now // 1000 - 60_000)}, 0),
    ):
        seen = await ann.get(hub, "/messages.json", **query)
        assert (len(seen["messages"]), seen["next"]) == (found, None), query
    first = await ann.get(0, "/messages.json", scope="tablet", limit="2")
    second = await ann.get(0, "/messages.json", scope="tablet", limit="2", before=first["next"])
    assert len({one["id"] for one in first["messages"] + second["messages"]}) == 3


async def test_what_is_done_at_both_hubs_is_one_audit_chain(
    cluster: LocalCluster, ann: ClusterVisitor
) -> None:
    for hub in range(2):
        status, _ = await ann.act(hub, "message.cancel", scope="nobody", id="1_1")
        assert status == 404
    entries = (await ann.get(1, "/audit.json"))["entries"]
    assert [one["action"] for one in entries[:2]] == ["message.cancel"] * 2
    for one in cluster.hubs:
        assert (await one.dashboard.audit.verify()).entries == entries[0]["n"]


async def test_no_question_and_no_action_is_answered_with_500(
    cluster: LocalCluster, ann: ClusterVisitor
) -> None:
    draw = random.Random(0)
    dashboard = cluster.hubs[0].dashboard
    for view in dashboard.views:
        for _ in range(8):
            query = some(draw)
            status, said = await ann.ask(0, "GET", f"/{view}.json", params=query)
            assert status in (200, 400, 404), (view, query, said)
    for action in dashboard.actions:
        for _ in range(8):
            wanted = some(draw)
            status, said = await ann.act(1, action, **wanted)
            assert status in (200, 400, 404, 413, 429), (action, wanted, said)


async def test_a_session_that_ends_at_one_hub_ends_at_both(
    cluster: LocalCluster, ann: ClusterVisitor
) -> None:
    status, _ = await ann.ask(1, "POST", "/page/logout", json={}, headers={"X-CSRF-Token": ann.csrf})
    assert status == 200
    status, _ = await ann.ask(0, "GET", "/overview.json")
    assert status == 401
