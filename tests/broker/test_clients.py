"""Clients of the embedded broker: who floods goes, and nobody waits for what is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from duly.broker import rules as broker_rules
from duly.broker.callout import BrokerConnection
from duly.broker.clients import ANSWERED, ANSWERED_LATER, BACKLOG, PUBLISHED, BrokerClients, UserList
from duly.broker.rules import DEVICES
from duly.core.acl import HUB


class Callout:
    """A broker with these connections."""

    def __init__(self, *connections: BrokerConnection) -> None:
        self.all = list(connections)
        self.kicked: list[int] = []

    async def connections(self, user: str = "") -> list[BrokerConnection]:
        return [one for one in self.all if user in ("", one.user)]

    async def kick(self, cid: int) -> None:
        self.kicked.append(cid)

    async def kick_user(self, user: str) -> None:
        for one in await self.connections(user):
            await self.kick(one.cid)


FLOOD = PUBLISHED[DEVICES].amount * 100


@pytest.mark.parametrize(
    ("published", "waiting", "kicked"),
    [
        (1, BACKLOG + 1, []),
        (FLOOD, BACKLOG, [7]),
        (FLOOD, BACKLOG + 1, [7, 1]),
    ],
)
async def test_what_a_flood_has_left_for_the_hub_is_skipped(
    published: int, waiting: int, kicked: list[int]
) -> None:
    clients = BrokerClients(UserList(), None)
    callout = Callout(
        BrokerConnection(1, HUB, DEVICES, 0, waiting),
        BrokerConnection(2, HUB, DEVICES, 0, 0),
        BrokerConnection(7, "thief", DEVICES, published, 0),
        BrokerConnection(8, "lock", DEVICES, 5, 10 * BACKLOG),
    )
    clients.callout = callout  # type: ignore[assignment]  # without a broker
    await clients.check_rates()
    assert callout.kicked == kicked


async def test_what_a_device_answers_is_no_flood_and_what_it_adds_is() -> None:
    clients = BrokerClients(UserList(), None)
    burst, tasks = PUBLISHED[DEVICES].burst, 1_000
    callout = Callout()
    clients.callout = callout  # type: ignore[assignment]  # without a broker

    async def publishes(total: int, given: int) -> None:
        callout.all = [BrokerConnection(7, "lock", DEVICES, total)]
        clients.given = lambda: {"lock": given} if given else {}
        await clients.check_rates()

    await publishes(tasks * ANSWERED, tasks)
    assert not callout.kicked, "answers to what it was given just now"
    await publishes(tasks * ANSWERED, tasks)
    await publishes(tasks * ANSWERED + ANSWERED_LATER, 0)
    assert not callout.kicked, "answers to what it was given before"
    await publishes(tasks * ANSWERED + ANSWERED_LATER + burst * 3, 0)
    assert callout.kicked == [7], "more than it was given"


async def test_whose_the_client_ids_are_is_kept_and_a_broken_file_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "client_ids.json"
    users = UserList([broker_rules.device(name, "x") for name in ("lock", "thief")])
    clients = BrokerClients(users, None)
    clients.restore(path)
    assert clients._client_ids.owner("esp32", "lock") == "lock"
    clients.keep(path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = BrokerClients(users, None)
    again.restore(path)
    assert again._client_ids.owner("esp32", "thief") == "lock"
    path.write_bytes(b"{")
    again = BrokerClients(users, None)
    again.restore(path)
    assert again._client_ids.owner("esp32", "thief") == "thief"
