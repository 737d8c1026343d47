"""`duly once`: the keys of functions and requests, listed, settled and forgotten beside the processes that
use them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI

import duly
from duly.integrations.asgi import IdempotencyMiddleware
from duly.integrations.idempotency_key import IdempotencyPolicy
from tests.cli.conftest import CommandLine
from tests.guard import GUARD

PROGRAM = """
import os, sys, duly

@duly.once(sys.argv[1], scope="pay", key=str, lease=0.05)
def pay(order: str) -> str:
    if order == "dies":
        os._exit(9)
    return f"paid {order}"

print(pay(sys.argv[2]))
"""


def run(cli: CommandLine, order: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, url(cli), order], capture_output=True, text=True, check=False
    )


def url(cli: CommandLine) -> str:
    return f"sqlite:///{cli.folder}/app.db"


def states(cli: CommandLine, *options: str) -> dict[str, str]:
    return {one["key"]: one["state"] for one in cli.ask("once", "list", "--ledger", url(cli), *options)}


def test_an_unknown_run_is_listed_settled_and_repeated(cli: CommandLine) -> None:
    assert run(cli, "a").stdout == "paid a\n"
    assert run(cli, "dies").returncode == 9
    unknown = run(cli, "dies")
    assert "duly.errors.Unknown" in unknown.stderr
    assert states(cli) == {"a": "done", "dies": "unknown"}
    assert states(cli, "--state", "unknown") == {"dies": "unknown"}
    assert states(cli, "--scope", "other") == {}
    where = ("--ledger", url(cli))
    refused = cli.duly("once", "settle", "pay", "a", "--done", '"x"', *where)
    assert (refused.returncode, "only a run whose end is unknown" in refused.stderr) == (6, True)
    settled = cli.duly("once", "settle", "pay", "dies", "--done", '"paid by hand"', *where)
    assert (settled.returncode, settled.stdout) == (0, "pay dies is settled; repeats get this outcome\n")
    assert run(cli, "dies").stdout == "paid by hand\n"


def test_a_run_whose_process_died_is_settled_without_a_repeat_before(cli: CommandLine) -> None:
    run(cli, "dies")
    assert states(cli) == {"dies": "running"}
    where = ("--ledger", url(cli))
    done = cli.duly("once", "settle", "pay", "dies", "--failed", "no money came", *where)
    assert done.stdout == "pay dies is settled; repeats get this outcome\n", done.stderr
    assert "duly.errors.Failed: Settled: no money came" in run(cli, "dies").stderr


def test_a_forgotten_key_runs_again_and_others_do_not(cli: CommandLine) -> None:
    run(cli, "a")
    run(cli, "b")
    done = cli.duly("once", "forget", "pay", "a", "--ledger", url(cli))
    assert (done.returncode, done.stdout) == (0, "pay a is forgotten: it may run again\n")
    assert states(cli) == {"b": "done"}


def test_the_latest_keys_are_listed_first(cli: CommandLine) -> None:
    @duly.once(url(cli), scope="pay", key=str)
    def pay(order: str) -> None: ...

    for order in ("b", "a", "c"):
        pay(order)
    assert list(states(cli)) == ["c", "a", "b"]
    assert list(states(cli, "--limit", "1", "--state", "done")) == ["c"]


def test_a_running_process_hears_of_it(cli: CommandLine) -> None:
    runs: list[int] = []

    @duly.once(url(cli), scope="pay", key=str)
    def pay(n: int) -> int:
        runs.append(n)
        return len(runs)

    assert [pay(7), pay(7)] == [1, 1]
    assert cli.duly("once", "forget", "pay", "7", "--ledger", url(cli)).returncode == 0
    assert pay(7) == 2


def test_a_request_is_settled_with_a_status(cli: CommandLine) -> None:
    app = FastAPI()
    policy = IdempotencyPolicy(lease=0.05)
    app.add_middleware(IdempotencyMiddleware, ledger=url(cli), default=policy)

    begun = asyncio.Event()

    @app.post("/pay")
    async def pay() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def ask(cancel: bool = False) -> httpx.Response | None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            sent = asyncio.create_task(client.post("/pay", headers={"idempotency-key": "k-1"}))
            if cancel:
                await begun.wait()
                sent.cancel()
                await asyncio.gather(sent, return_exceptions=True)
                return None
            return await sent

    asyncio.run(ask(cancel=True))
    assert states(cli) == {"k-1": "unknown"}
    where = ("--ledger", url(cli))
    done = cli.duly(
        "once", "settle", "http/anonymous", "k-1", "--done", '{"paid":1}', "--status", "201", *where
    )
    assert done.returncode == 0, done.stderr
    answer = asyncio.run(ask())
    assert answer is not None
    assert (answer.status_code, answer.json()) == (201, {"paid": 1})


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("settle", "pay", "none", "--done", "1"), 5, "is not known"),
        (("forget", "pay", "none"), 5, "is not known"),
        (("settle", "pay", "a"), 2, "either --done JSON or --failed TEXT"),
        (("settle", "pay", "a", "--done", "{"), 2, "this is not JSON"),
    ],
)
def test_wrong_use_is_told(cli: CommandLine, words: tuple[str, ...], code: int, says: str) -> None:
    run(cli, "a")
    done = cli.duly("once", *words, "--ledger", url(cli))
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


def test_a_run_that_goes_on_is_neither_settled_nor_forgotten(cli: CommandLine) -> None:
    program = PROGRAM.replace("os._exit(9)", "print('begun', flush=True); sys.stdin.read()").replace(
        "0.05", "30"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, url(cli), "dies"], stdin=-1, stdout=-1, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    try:
        for words in (("forget", "pay", "dies"), ("settle", "pay", "dies", "--done", "1")):
            done = cli.duly("once", *words, "--ledger", url(cli))
            assert (done.returncode, "is running" in done.stderr) == (6, True), done.stderr
    finally:
        process.communicate(timeout=GUARD)
