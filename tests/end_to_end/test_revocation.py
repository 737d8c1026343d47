"""What is taken away at one hub is taken away at every hub, at once; what is given is given at once.

The law: the hubs here get no hints, so nothing of this rests on hints. The clients share no code with duly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duly.identity.account_directory import MISSES
from duly.identity.accounts import Role
from duly.identity.login_guard import LOOKUP
from duly.server.revocation import Revocation
from duly.storage.postgres.ledger import PostgresLedger
from tests.end_to_end.many import LocalCluster
from tests.end_to_end.people import enter
from tests.end_to_end.raw import Ids, Response, curl, dial, join
from tests.servers import Postgres
from tests.stopwatch import Stopwatch

PASSWORD = "correct horse"
CHANGED = "battery staple"


@pytest.fixture
async def cluster(postgres_server: Postgres, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """Two hubs on one PostgreSQL that hear nothing of each other."""
    cluster = LocalCluster(tmp_path, postgres_server)
    try:
        await cluster.start(2, hints=False)
        yield cluster
    finally:
        await cluster.stop()


async def admin(cluster: LocalCluster, hub: int, verb: str, **wanted: str) -> Response:
    return await curl(f"{cluster.hubs[hub].url}/v1/admin/{verb}", cluster.tokens["root"], body=wanted)


async def log_in(cluster: LocalCluster, hub: int, name: str, password: str = PASSWORD) -> Response:
    return await curl(f"{cluster.hubs[hub].url}/v1/login", body={"name": name, "password": password})


async def may_list(cluster: LocalCluster, hub: int, token: str) -> int:
    return (await curl(f"{cluster.hubs[hub].url}/v1/messages", token)).status


async def settle(cluster: LocalCluster, name: str) -> str:
    """Register somebody at the first hub; the token of a login that both hubs have seen."""
    made = await curl(f"{cluster.hubs[0].url}/v1/people", body={"name": name, "password": PASSWORD})
    assert made.status == 201, made.body
    token: str = (await log_in(cluster, 0, name)).json["token"]
    assert [await may_list(cluster, hub, token) for hub in (0, 1)] == [200, 200]
    return token


async def test_an_old_password_is_void_at_every_hub_at_once(cluster: LocalCluster) -> None:
    token = await settle(cluster, "ann")
    assert (await log_in(cluster, 1, "ann")).status == 200
    change = {"old": PASSWORD, "new": CHANGED}
    assert (await curl(f"{cluster.hubs[0].url}/v1/password", token, body=change)).status == 200
    assert (await log_in(cluster, 1, "ann")).status == 401
    assert await may_list(cluster, 1, token) == 401
    assert (await log_in(cluster, 1, "ann", CHANGED)).status == 200


@pytest.fixture
def no_check(monkeypatch: pytest.MonkeyPatch) -> asyncio.Lock:
    """Hubs look for revoked tokens only while this is free, and hold it while they do. They look every second
    or so, which on a busy machine is before the client has asked all that must be refused."""
    check, free = Revocation.check, asyncio.Lock()

    async def held(self: Revocation) -> None:
        async with free:
            await check(self)

    monkeypatch.setattr(Revocation, "check", held)
    return free


@pytest.mark.parametrize("how", ["logout", "everywhere", "remove", "password"])
async def test_a_login_that_ended_elsewhere_says_nothing_more_and_is_hung_up_on(
    no_check: asyncio.Lock, cluster: LocalCluster, how: str
) -> None:
    token = await settle(cluster, "ann")
    await settle(cluster, "bob")
    async with enter(cluster.hubs[1].url, token) as ann:
        assert (await ann.chat("bob", "hello"))["code"] == 0
        await no_check.acquire()
        took = Stopwatch()
        match how:
            case "logout":
                ended = await curl(f"{cluster.hubs[0].url}/v1/logout", token, body={})
            case "everywhere":
                ended = await curl(f"{cluster.hubs[0].url}/v1/logout", token, body={"everywhere": True})
            case "password":
                change = {"old": PASSWORD, "new": CHANGED}
                ended = await curl(f"{cluster.hubs[0].url}/v1/password", token, body=change)
            case _:
                ended = await admin(cluster, 0, "remove", name="ann")
        assert ended.status == 200, ended.body
        said = await ann.chat("bob", "it is still me")
        assert (said["code"], said["error"]) == (3, "not_allowed"), said
        answer = await ann.ask("history", conv="ann+bob")
        assert answer["code"] == 3, "nor is anything read"
        no_check.release()
        await ann.closed()
        assert took.seconds < 4
    assert await may_list(cluster, 1, token) == 401


@pytest.mark.parametrize("how", ["replace", "remove", "revoke"])
async def test_an_app_that_lost_its_right_elsewhere_commands_nothing(
    no_check: asyncio.Lock, cluster: LocalCluster, how: str
) -> None:
    async with cluster.join(1, "lock") as lock, cluster.join(1, "phone") as phone:
        first = await phone.command("lock")
        await lock.obey()
        assert (await phone.hear_of(first))["code"] == 0
        await no_check.acquire()
        if how == "revoke":
            await admin(cluster, 0, "revoke", app="phone", device="lock")
        elif how == "replace":
            await admin(cluster, 0, "add", role="app", name="phone", replace="1")
        else:
            await admin(cluster, 0, "remove", name="phone")
        second = await phone.command("lock")
        await phone.hear_of(first)
        refused = await phone.hear_of(second)
        assert (refused["code"], refused["error"]) == (3, "not_allowed"), refused
        assert await lock.hears_nothing(0.3)
        third = {"type": "lock_control", "seq_id": Ids()(), "to": "lock", "data": {}}
        http = await curl(f"{cluster.hubs[1].url}/v1/messages", cluster.tokens["phone"], body=third)
        assert http.status == (403 if how == "revoke" else 401)
        no_check.release()
        if how != "revoke":
            await phone.closed()
    words = [r.word for r in await cluster.hubs[1].ledger.refusals() if r.scope == "phone"]
    assert "not_allowed" in words, "what was refused can be asked for"


async def test_a_hub_that_cannot_ask_the_ledger_lets_no_caller_in(
    cluster: LocalCluster, postgres_server: Postgres
) -> None:
    token = await settle(cluster, "ann")
    ledger = cluster.hubs[1].ledger
    assert isinstance(ledger, PostgresLedger)
    await ledger._pool.close()
    asked = [await may_list(cluster, 1, one) for one in (token, cluster.tokens["phone"])]
    assert asked == [503, 503]
    assert (await log_in(cluster, 1, "ann")).status == 503
    async with dial(cluster.hubs[1].url) as peer:
        await peer.say("auth", token=cluster.tokens["phone"])
        said = await peer.hear()
        assert (said["type"], said["code"]) == ("server_ack", 4)


async def test_what_was_made_at_one_hub_is_known_at_the_other_at_once(cluster: LocalCluster) -> None:
    for n in range(10):
        app, device = f"app{n}", f"lock{n}"
        tokens = {}
        for role, name in ((Role.APP, app), (Role.DEVICE, device)):
            made = await admin(cluster, 0, "add", role=role.value, name=name)
            tokens[name] = made.json["token"]
        async with (
            join(cluster.hubs[1].url, tokens[device]) as lock,
            join(cluster.hubs[1].url, tokens[app]) as phone,
        ):
            early = await phone.command(device)
            assert (await phone.hear_of(early))["error"] == "not_allowed", "nothing was granted yet"
            await admin(cluster, 0, "grant", app=app, device=device)
            seq_id = await phone.command(device)
            assert (await phone.hear_of(seq_id))["code"] == 0
            assert (await lock.obey())["seq_id"] == seq_id
        name = f"user{n}"
        await curl(f"{cluster.hubs[0].url}/v1/people", body={"name": name, "password": PASSWORD})
        assert (await log_in(cluster, 1, name)).status == 200


async def test_a_flood_of_nonsense_asks_the_ledger_for_little(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = cluster.hubs[1].ledger
    asked = 0
    read = ledger.items

    async def counted(wanted: Any) -> Any:
        nonlocal asked
        asked += 1
        return await read(wanted)

    monkeypatch.setattr(ledger, "items", counted)
    async with cluster.join(1, "phone") as phone:
        asked, took = 0, Stopwatch()
        seq_ids = [await phone.command(f"stranger{n}") for n in range(500)]
        words = [(await phone.hear_of(seq_id))["error"] for seq_id in seq_ids]
        assert set(words) == {"not_allowed"}
        often = 60 + MISSES.amount * took.wall
        assert asked <= often, "an account may make a hub look in the ledger so often and no more"
    asked, took = 0, Stopwatch()

    async def knock(n: int) -> int:
        return await may_list(cluster, 1, f"duly_{n}")

    statuses = [
        status for n in range(5) for status in await asyncio.gather(*(knock(n * 20 + i) for i in range(20)))
    ]
    assert set(statuses) <= {401, 429}
    assert statuses[-1] == 429
    assert asked <= 20 + LOOKUP.amount * took.wall
