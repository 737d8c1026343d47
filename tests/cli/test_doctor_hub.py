"""`duly doctor` of a hub that runs: what is in force there, and whether what it depends on answers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.cli.conftest import CommandLine
from tests.servers import Postgres, Redis


def findings(cli: CommandLine, *args: str) -> dict[str, dict[str, str]]:
    return {one["what"]: one for one in cli.ask("doctor", *args)["findings"]}


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture
def own_redis() -> Iterator[Redis]:
    server = Redis()
    server.start()
    yield server
    server.remove()


def url_of(postgres: Postgres) -> str:
    return postgres.create_database()


def test_the_settings_are_those_of_the_hub_not_of_the_folder(cli: CommandLine) -> None:
    cli.env["DULY_PATIENCE"] = "42"
    cli.up()
    del cli.env["DULY_PATIENCE"]
    (cli.folder / "duly.toml").write_text("patience = 7\nwindow = 9\n")
    found = findings(cli)
    assert "42 s to answer" in found["order"]["fact"]
    assert "a gap waits 300 ms" in found["order"]["fact"]
    assert "patience = 42" in found["settings"]["fact"]
    assert "SQLite" in found["ledger"]["fact"]
    assert found["soundness"]["is"] == "ok"
    assert "notifier" not in found, "there is one hub"


def test_a_postgresql_ledger_and_a_dead_redis(
    cli: CommandLine, postgres_server: Postgres, own_redis: Redis
) -> None:
    ledger = url_of(postgres_server)
    cli.up("--ledger", ledger, "--notifier", own_redis.url)
    found = findings(cli)
    assert {one["is"] for one in found.values()} <= {"ok", "warn"}, found
    assert "PostgreSQL" in found["ledger"]["fact"]
    assert "schema" in found["ledger"]["fact"]
    assert "heard after" in found["notifier"]["fact"]
    assert "1 hub" in found["notifier"]["fact"]

    own_redis.stop(signal.SIGKILL)
    done = cli.duly("doctor")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    assert "notifier" in line
    assert "nothing is lost" in line

    own_redis.start()
    for _ in range(10):  # the hub tries again, ever more slowly, up to five seconds
        if cli.duly("doctor").returncode == 0:
            break
    else:
        raise AssertionError("it is back, and the doctor does not see it")


def test_postgresql_itself_is_away(cli: CommandLine, own_postgres: Postgres) -> None:
    ledger = url_of(own_postgres)
    cli.up("--ledger", ledger)
    own_postgres.stop(signal.SIGKILL)
    done = cli.duly("doctor", "--json")
    assert done.returncode == 1
    found = findings(cli)
    assert found["hub"]["is"] == "ok", "it runs"
    assert found["ledger"]["is"] == "bad"
    assert found["notifier"]["is"] == "bad"


def test_without_a_hub_the_ledger_that_is_named_is_looked_at_and_left_alone(
    cli: CommandLine, postgres_server: Postgres
) -> None:
    ledger = url_of(postgres_server)
    found = findings(cli, "--ledger", ledger)
    assert "it has no ledger yet" in found["ledger"]["fact"]
    assert "it has no ledger yet" in findings(cli, "--ledger", ledger)["ledger"]["fact"], "it only looks"
    assert cli.duly("add", "app", "phone", "--ledger", ledger).returncode == 0
    found = findings(cli, "--ledger", ledger)
    assert found["ledger"]["is"] == "ok"
    assert "0 messages remembered" in found["ledger"]["fact"]


def test_without_a_hub_a_dead_redis_is_trouble(
    cli: CommandLine, postgres_server: Postgres, own_redis: Redis
) -> None:
    cli.env["DULY_LEDGER"] = url_of(postgres_server)
    cli.env["DULY_NOTIFIER"] = own_redis.url
    found = findings(cli)
    assert found["notifier"]["is"] == "ok", found["notifier"]
    assert "heard after" in found["notifier"]["fact"]
    own_redis.stop(signal.SIGKILL)
    done = cli.duly("doctor")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    assert "notifier" in line
    assert "nothing is lost" in line
    assert own_redis.url in line


def test_a_ledger_that_does_not_answer_is_trouble(cli: CommandLine) -> None:
    done = cli.duly("doctor", "--ledger", "postgresql://duly:secret@127.0.0.1:1/x")
    assert done.returncode == 1
    assert "✗ ledger" in done.stdout
    assert "secret" not in done.stdout


def test_no_password_is_told(cli: CommandLine, postgres_server: Postgres, own_redis: Redis) -> None:
    ledger = url_of(postgres_server).replace("duly@", "duly:secret@")
    cli.up("--ledger", ledger, "--notifier", own_redis.url.replace("redis://", "redis://:secret@"))
    done = cli.duly("doctor", "--json")
    assert "secret" not in done.stdout


def test_who_is_no_admin_is_told_that_there_is_more(home: CommandLine) -> None:
    token = home.duly("add", "app", "guest").stdout.strip()
    hub: dict[str, Any] = findings(home, "--url", f"http://127.0.0.1:{home.port}", "--token", token)["hub"]
    assert "only an admin" in hub["fact"]


def test_a_hub_that_was_killed(cli: CommandLine) -> None:
    hub = cli.up()
    hub.stop(signal.SIGKILL)
    found = findings(cli)
    assert "none runs" in found["hub"]["fact"]
    assert "SQLite" in found["ledger"]["fact"]


def test_two_clients_with_the_token_of_one_device(cli: CommandLine) -> None:
    """Neither is served for long: `why` and `doctor` say so, and what to do."""
    cli.up()
    token = cli.ask("add", "device", "lock")["token"]
    asyncio.run(fight(f"http://127.0.0.1:{cli.port}", token))
    (why,) = [one for one in cli.ask("why") if one["word"] == "taken_over"]
    assert (why["scope"], why["id"]) == ("lock", "websocket connect")
    assert "two clients use the token of lock" in why["reason"]
    done = cli.duly("doctor")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    assert "give each an account of its own" in line


async def fight(url: str, token: str) -> None:
    """Two clients that connect in turns, as soon as the other has thrown them out."""
    async with aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            socket = await stack.enter_async_context(http.ws_connect(f"{url}/v1/ws"))
            await socket.send_json({"type": "auth", "token": token})
            assert (await socket.receive_json())["type"] == "welcome"
