"""A ledger that cannot be read for an unforeseen reason, such as a missing table or a damaged page: every
client gets code 4, no connection of another client ends, and the error is logged and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from duly.errors import LedgerError, LedgerUnavailable
from duly.runtime.tasks import ENGINE_TRIES
from duly.storage.postgres.ledger import PostgresLedger
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.many import LocalCluster
from tests.end_to_end.raw import curl, dial, join
from tests.guard import GUARD
from tests.servers import Postgres

ITEMS = "duly_items"
MESSAGES = "duly_messages"


@asynccontextmanager
async def without_table(url: str, table: str) -> AsyncIterator[None]:
    """The table is gone while the block runs."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"ALTER TABLE {table} RENAME TO away")
        try:
            yield
        finally:
            await connection.execute(f"ALTER TABLE away RENAME TO {table}")
    finally:
        await connection.close()


async def test_every_client_is_answered_while_accounts_cannot_be_read(
    tmp_path: Path, postgres_server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server)
    await cluster.start(1)
    hub = cluster.hubs[0]
    try:
        async with cluster.join(0, "phone") as phone, asyncio.timeout(GUARD):
            async with without_table(cluster.ledger_url, ITEMS):
                command = {"type": "query", "seq_id": "1_0", "to": "lock"}
                asked = (curl(f"{hub.url}/v1/messages", "unknown", body=command) for _ in range(5))
                for said in await asyncio.gather(*asked):
                    assert (said.status, said.json["code"]) == (500, 4)
                said = await curl(f"{hub.url}/v1/devices", "unknown")
                assert (said.status, said.json["code"]) == (500, 4)
                async with dial(hub.url) as stranger:
                    await stranger.say("auth", token="unknown")
                    ack = await stranger.hear()
                    assert (ack["type"], ack["code"], ack["error"]) == ("server_ack", 4, "internal")
                seq_id = await phone.command("lock")
                assert (await phone.hear_of(seq_id))["code"] in (1, 4), (
                    "its connection lives, and is answered"
                )
            assert hub.tasks.failures["reading the ledger"] > 0
            logged = [line.getMessage() for line in caplog.records if line.levelname == "ERROR"]
            assert any("reading the ledger failed" in line for line in logged), logged
            seq_id = await phone.command("lock")
            assert (await phone.hear_of(seq_id))["code"] == 1, "the lock is offline"
            async with join(hub.url, cluster.tokens["tablet"]):
                pass
    finally:
        await cluster.stop()


async def test_commands_get_code_4_while_their_table_is_gone_and_go_on_when_it_is_back(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server)
    await cluster.start(1)
    hub = cluster.hubs[0]
    try:
        async with cluster.join(0, "phone") as phone, cluster.join(0, "lock") as lock:
            seq_id = await phone.command("lock")
            await lock.obey()  # so that the lock's connection has read the ledger
            await phone.first(lambda frame: frame["type"] == "ack" and frame["seq_id"] == seq_id)
            async with asyncio.timeout(GUARD), without_table(cluster.ledger_url, MESSAGES):
                for _ in range(2 * ENGINE_TRIES):
                    seq_id = await phone.command("lock")
                    assert (await phone.hear_of(seq_id))["code"] == 4
                assert (await curl(f"{hub.url}/v1/health")).status == 503
                sent = {"type": "lock_control", "seq_id": phone.ids(), "to": "lock"}
                said = await curl(f"{hub.url}/v1/messages", cluster.tokens["phone"], body=sent)
                assert (said.status, said.json["code"]) == (503, 4)
            assert not any(task.given_up for task in hub.tasks.lives), "the hub has not given up"
            async with asyncio.timeout(GUARD):
                while (await curl(f"{hub.url}/v1/health")).status != 200:
                    await asyncio.sleep(0.05)
                seq_id = await phone.command("lock")
                await lock.obey()
                while (heard := await phone.hear_of(seq_id))["type"] != "ack":
                    assert heard["code"] == 0
    finally:
        await cluster.stop()


async def test_errors_of_own_queries_are_those_of_the_ledger(postgres_server: Postgres) -> None:
    url = postgres_server.create_database()
    ledger = await PostgresLedger.open(url)
    seen: list[LedgerError] = []
    ledger.on_read_error = seen.append
    try:
        async with without_table(url, ITEMS):
            with pytest.raises(LedgerError, match="UndefinedTableError") as found:
                await ledger.items([("bucket", "name")])
        assert seen == [found.value]
        with pytest.raises(asyncpg.UndefinedTableError):  # a caller's own SQL keeps its errors
            async with ledger.transaction() as tx:
                await tx.fetch("SELECT 1 FROM no_such_table")
    finally:
        await ledger.close()


async def test_a_name_that_postgres_cannot_look_for_is_the_callers_mistake(
    tmp_path: Path, postgres_server: Postgres
) -> None:
    cluster = LocalCluster(tmp_path, postgres_server)
    await cluster.start(1)
    try:
        url, root = cluster.hubs[0].url, cluster.tokens["root"]
        for path in ("v1/messages?scope=a%00b", "v1/messages/a%00b/1_0", "v1/devices?after=%00"):
            said = await curl(f"{url}/{path}", root)
            assert said.status in (200, 400, 404), (path, said.text)
    finally:
        await cluster.stop()


async def test_a_bug_in_taking_a_frame_is_answered_and_ends_no_connection(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    async with join(local.url, local.tokens["phone"]) as phone:
        with monkeypatch.context() as patch:
            patch.setattr(local.hub.gateway, "receive", broken)
            for seq_id in [await phone.command("lock"), await phone.command("lock", "own_type")]:
                ack = await phone.hear_of(seq_id)
                assert (ack["code"], ack["error"]) == (4, "internal")
            said = await curl(
                f"{local.url}/v1/messages", local.tokens["phone"],
                body=[{"type": "lock_control", "seq_id": "1_0", "to": "lock"}],
            )  # fmt: skip
            assert (said.status, said.json[0]["code"]) == (200, 4)
        assert local.hub.tasks.failures["frame"] == 3
        seq_id = await phone.command("lock")
        assert (await phone.hear_of(seq_id))["code"] == 1


async def test_a_refusal_that_cannot_be_recorded_is_no_refusal(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is told to try again: what is refused for good is recorded."""

    async def away(*_: object) -> None:
        raise LedgerUnavailable("the disk is full")

    async with join(local.url, local.tokens["phone"]) as phone:
        with monkeypatch.context() as patch:
            patch.setattr(local.hub.activity, "refuse", away)
            await phone.say("lock_control", seq_id="1_0")
            ack = await phone.hear_of("1_0")
            assert (ack["code"], ack["error"]) == (4, "internal")
        await phone.say("lock_control", seq_id="1_1")
        assert (await phone.hear_of("1_1"))["code"] == 2


async def test_a_bug_in_a_login_is_answered(local: HubUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(local.hub, "login", broken)
    async with dial(local.url) as phone:
        await phone.say("auth", token=local.tokens["phone"])
        ack = await phone.hear()
        assert (ack["type"], ack["code"], ack["error"]) == ("server_ack", 4, "internal")
    assert local.hub.tasks.failures["WebSocket"] == 1


@pytest.mark.parametrize("query", ["", "?wait=0"])
async def test_a_future_that_another_part_cancels_leaves_no_request_without_an_answer(
    local: HubUnderTest, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    async def cancelled(*_: object) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    monkeypatch.setattr(local.hub, "login", cancelled)
    monkeypatch.setattr(local.hub, "recognise", lambda token: None)
    said = await curl(f"{local.url}/v1/messages{query}", local.tokens["phone"], body={"type": "query"})
    assert (said.status, said.json["code"]) == (500, 4)
    assert local.hub.tasks.failures["HTTP request"] == 1
