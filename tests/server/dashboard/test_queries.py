"""Every list is made with as many queries of the ledger for sixty rows as for three."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.units import HOUR, MS
from duly.identity.accounts import Principal, Role
from duly.server.dashboard.visitors import DashboardRole, DashboardVisitor
from duly.server.hub import Hub
from duly.storage.ledger import NEWEST
from duly.storage.postgres.ledger import PostgresLedger
from tests.end_to_end.many import LocalCluster
from tests.servers import Postgres

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW, MANY = 3, 60
MOST = 8
"""The most queries that a list may need."""
ANN = DashboardVisitor("ann", DashboardRole.ADMIN)
ROOT = Principal("root", Role.ADMIN)
PHONE = Principal("phone", Role.APP)
_queries: ContextVar[list[str] | None] = ContextVar("queries", default=None)


class ListedHub:
    """A hub on PostgreSQL with as many devices, commands and alerts as a test asks for."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._rows = 0

    async def grow(self, rows: int) -> None:
        """Add one of each until there are so many."""
        hub, ledger = self.hub, self.hub.ledger
        for n in range(self._rows, rows):
            await hub.accounts.add(Role.DEVICE, f"d{n:03}")
            await hub.accounts.grant("phone", f"d{n:03}")
            await hub.gateway.pushes.store(f"d{n:03}", "status_report", msgspec.Raw(b'{"battery":50}'))
            now = ledger.clock.now()
            command = Message("tablet", f"{now // MS}_{n}", "query", "lamp", b"{}")
            done = w.Advance(command.key, State.DONE, now, Answer())
            await ledger.write(w.Admit(command, now + HOUR, now), done)
            body = json.dumps({"profile_id": "home", "trigger_reason": "x", "timestamp": now // MS})
            alert = Message("gate", f"event-{n:03}", "alert_event", "home", body.encode(), now // MS * MS)
            given_up, waiting = (w.DeliveryRef(alert.key, "alert", who) for who in ("eve", "bob"))
            await ledger.write(
                w.Admit(alert, now + HOUR, now, listed=True),
                w.Deliver(given_up, now + HOUR),
                w.Finish(given_up, 0, State.FAILED, "given up"),
                w.Deliver(waiting, now + HOUR),
            )
        self._rows = rows


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def listed(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: Postgres
) -> AsyncIterator[ListedHub]:
    cluster = LocalCluster(Path(tmp_path_factory.mktemp("hubs")), postgres_server)
    await cluster.start(1)
    yield ListedHub(cluster.hubs[0])
    await cluster.stop()


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PostgresLedger._read

    async def counting(self: PostgresLedger, name: str, *args: Any) -> list[Any]:
        if (queries := _queries.get()) is not None:  # not what the hub does beside the test
            queries.append(name)
        return await read(self, name, *args)

    monkeypatch.setattr(PostgresLedger, "_read", counting)


async def queries_of(work: Awaitable[object]) -> tuple[list[str], object]:
    """The queries of a piece of work, and what it returned."""
    names: list[str] = []
    token = _queries.set(names)
    try:
        found = await work
    finally:
        _queries.reset(token)
    return sorted(names), found


def asked(hub: Hub) -> dict[str, tuple[Awaitable[Any], str]]:
    """Every list, and the name under which its rows are."""
    view = hub.dashboard.view
    return {
        "messages": (view(ANN, "messages", {"limit": "60"}), "messages"),
        "messages by state": (view(ANN, "messages", {"state": "done", "limit": "60"}), "messages"),
        "devices": (view(ANN, "devices", {"limit": "60"}), "devices"),
        "alerts": (view(ANN, "alerts", {"limit": "60"}), "alerts"),
        "active alerts": (view(ANN, "alerts", {"status": "active", "limit": "60"}), "alerts"),
        "dead letters": (view(ANN, "alerts-deliveries", {"limit": "60"}), "deliveries"),
        "open deliveries": (view(ANN, "alerts-deliveries", {"state": "open", "limit": "60"}), "deliveries"),
        "all deliveries": (view(ANN, "alerts-deliveries", {"state": "all", "limit": "60"}), "deliveries"),
        "status page": (view(ANN, "alerts-status", {}), "counters"),
        "overview": (view(ANN, "overview", {}), "metrics"),
        "audit": (view(ANN, "audit", {}), "entries"),
        "sessions": (view(ANN, "sessions", {}), "sessions"),
        "devices by HTTP": (hub.list_devices(ROOT, "", 60), ""),
        "devices of an app": (hub.list_devices(PHONE, "", 60), ""),
        "alerts by HTTP": (
            hub.list_alerts(standing="", sentinel="", limit=60, before=NEWEST, since=0), ""),
        "alerts by status": (
            hub.list_alerts(standing="open", sentinel="", limit=60, before=NEWEST, since=0), ""),
        "duly list": (hub.admin.run(ROOT, "list", {}), "accounts"),
        "duly alert dead": (hub.alerts.operations.deliveries(state="dead", limit=60), "*"),
    }  # fmt: skip


def rows_of(found: Any, name: str) -> int:
    """How many rows a list has."""
    return len(found[0] if not name else found if name == "*" else found[name])


async def test_a_list_of_many_rows_takes_as_many_queries_as_one_of_a_few(listed: ListedHub) -> None:
    counted: dict[int, dict[str, list[str]]] = {}
    rows: dict[int, dict[str, int]] = {}
    for many in (FEW, MANY):
        await listed.grow(many)
        await listed.hub.activity.settle()
        counted[many], rows[many] = {}, {}
        for name, (work, place) in asked(listed.hub).items():
            counted[many][name], found = await queries_of(work)
            rows[many][name] = rows_of(found, place)
    more = {name: names for name, names in counted[MANY].items() if len(names) > len(counted[FEW][name])}
    assert not more, "with more rows"
    assert not {name: names for name, names in counted[MANY].items() if len(names) > MOST}
    grown = {name for name in rows[MANY] if rows[MANY][name] >= MANY}
    assert {
        "messages", "devices", "alerts", "dead letters", "open deliveries", "all deliveries", "duly list",
        "devices by HTTP", "devices of an app", "alerts by HTTP", "alerts by status", "duly alert dead",
    } <= grown  # fmt: skip


async def test_what_became_of_many_alerts_is_counted_with_as_many_queries(listed: ListedHub) -> None:
    await listed.grow(MANY)
    backlog = listed.hub.alerts.backlog
    for touched in (FEW, MANY):
        await backlog.refresh()
        async for record in listed.hub.alerts.operations.newest(touched):
            backlog.touch(record.message.key)
        names, _ = await queries_of(backlog.refresh())
        assert len(names) <= MOST, names
        assert backlog.dead_letters >= touched
