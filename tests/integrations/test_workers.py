"""The middleware in several worker processes on one ledger: what each of them did is in a file they wrote."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import servers
from tests.guard import GUARD

WORKERS = 4


class WorkerServer:
    """`uvicorn --workers 4` with one ledger."""

    def __init__(self, folder: Path, ledger: str) -> None:
        self.log = folder / "effects"
        self.log.touch()
        self.port = servers.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.errors = folder / "errors"
        program = [sys.executable, "-m", "uvicorn", "tests.integrations.worker_app:app"]
        options = ["--workers", str(WORKERS), "--port", str(self.port), "--log-level", "warning"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*program, *options],
                env=os.environ | {"SHOP_LEDGER": ledger, "SHOP_LOG": str(self.log)},
                stderr=errors,
                start_new_session=True,
            )

    @property
    def effects(self) -> list[tuple[str, int]]:
        pairs = (line.split() for line in self.log.read_text().splitlines())
        return [(order, int(pid)) for order, pid in pairs]

    async def ready(self, client: httpx.AsyncClient) -> None:
        async with asyncio.timeout(GUARD):
            while True:
                try:
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return
                except httpx.HTTPError:
                    await asyncio.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(GUARD)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(GUARD)


@pytest.fixture(params=["sqlite", "postgres"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerServer]:
    ledger = f"sqlite:///{tmp_path}/app.db"
    if request.param == "postgres":
        ledger = request.getfixturevalue("postgres_server").create_database()
    server = WorkerServer(tmp_path, ledger)
    yield server
    server.stop()


def one_connection_each() -> httpx.AsyncClient:
    """Return a client that opens a connection for every request, so that all workers get some."""
    return httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=30)


async def until_answered(client: httpx.AsyncClient, url: str, key: str, order: str) -> httpx.Response:
    """Send a request again while the first is in progress, as a client does."""
    while True:
        sent = await client.post(url, json={"order": order}, headers={"idempotency-key": key})
        if sent.status_code != 409 or sent.json()["type"] != "urn:duly:in-progress":
            return sent
        await asyncio.sleep(0.02)


async def test_every_request_sent_three_times_at_once_to_four_workers_runs_once(
    workers: WorkerServer,
) -> None:
    sent = 0
    async with one_connection_each() as client:
        await workers.ready(client)
        async with asyncio.timeout(GUARD):
            while len({pid for _, pid in workers.effects}) < 2:  # until several workers were at it
                names = [f"o-{n}" for n in range(sent, sent + 30)]
                asked = (until_answered(client, f"{workers.url}/charge", n, n) for n in names * 3)
                answers = await asyncio.gather(*asked)
                sent += 30
                assert Counter(answer.status_code for answer in answers) == {200: 90}
                assert sum("idempotent-replayed" in answer.headers for answer in answers) == 60
    assert sorted(order for order, _ in workers.effects) == sorted(f"o-{n}" for n in range(sent))


@pytest.mark.parametrize(("route", "runs"), [("charge", 1), ("mail", 2)])
async def test_a_worker_that_is_killed_in_the_middle_leaves_what_its_route_declares(
    workers: WorkerServer, route: str, runs: int, tmp_path: Path
) -> None:
    url, free = f"{workers.url}/{route}", tmp_path / "free"
    body = {"order": "o-1", "hang": str(free)}
    headers = {"idempotency-key": "k-1"}
    async with one_connection_each() as client:
        await workers.ready(client)
        first = asyncio.create_task(client.post(url, json=body, headers=headers))
        async with asyncio.timeout(GUARD):
            while not workers.effects:
                await asyncio.sleep(0.01)
        early = await client.post(url, json=body, headers=headers)
        assert early.json()["type"] == "urn:duly:in-progress"
        free.touch()
        os.kill(workers.effects[0][1], signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await first
        async with asyncio.timeout(GUARD):
            while True:
                try:
                    later = await client.post(url, json=body, headers=headers)
                except httpx.HTTPError:  # a connection that the dead worker had taken
                    continue
                if later.json().get("type") != "urn:duly:in-progress":
                    break
                await asyncio.sleep(0.05)
    assert len(workers.effects) == runs
    if route == "charge":
        assert (later.status_code, later.json()["type"]) == (409, "urn:duly:unknown")
    else:
        assert (later.status_code, later.json()) == (200, {"paid": "o-1"})
