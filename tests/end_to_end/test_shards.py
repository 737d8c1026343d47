"""Two shards behind HAProxy, each with its own PostgreSQL: a site is placed by its hash or by the map, and a
shard whose database is dead takes no other one with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from deploy.cluster import HubServer

from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.end_to_end.raw import Ids, Json
from tests.guard import GUARD, LIMIT
from tests.servers import Postgres, free_port, missing, wait_for_port

DEPLOY = Path(__file__).parents[2] / "deploy"
MOVED = "moved-house"
"""the site that the map in `deploy/` places by hand, at shard 1"""


def shard_of(site: str) -> int:
    """Where an operator makes the accounts of a site: the sum that docs/scale.md gives."""
    return zlib.crc32(site.encode()) % 2


SITES = [next(f"house-{n}" for n in range(100) if shard_of(f"house-{n}") == shard) for shard in (0, 1)]


class Shards:
    """Two databases, a hub on the first and two on the second, and the balancer."""

    def __init__(self, folder: Path) -> None:
        self.databases = [Postgres(), Postgres()]
        self.ledgers = [each.create_database() for each in self.databases]
        origins = ",".join(f"http://{site}.duly.example" for site in (*SITES, MOVED))
        self.hubs = [
            HubServer(
                folder / name,
                {
                    "ledger": self.ledgers[shard], "no_mqtt": "true", "origins": origins,
                    "secret_key": str(folder / f"secret-{shard}.key"),
                },
            )
            for name, shard in (("a", 0), ("b", 1), ("c", 1))
        ]  # fmt: skip
        self.port = free_port()
        self._balancer: subprocess.Popen[bytes] | None = None
        self.tokens: dict[str, str] = {}

    async def prepare(self, site: str, shard: int) -> None:
        """An app and a device of a site, at its shard only."""
        async with await open_ledger(self.ledgers[shard]) as ledger:
            accounts = Accounts(ledger)
            self.tokens[f"{site}/app"] = await accounts.add(Role.APP, f"{site}-app")
            self.tokens[f"{site}/lock"] = await accounts.add(Role.DEVICE, f"{site}-lock")
            await accounts.grant(f"{site}-app", f"{site}-lock")

    def start(self) -> None:
        for hub in self.hubs:
            hub.start()
        a, b, c = (f"127.0.0.1:{hub.port}" for hub in self.hubs)
        places = {"SHARD0A": a, "SHARD0B": a, "SHARD1A": b, "SHARD1B": c, "MAP": str(DEPLOY / "shards.map")}
        binary = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
        if binary is None:
            missing("haproxy")
        self._balancer = subprocess.Popen(
            [binary, "-db", "-f", str(DEPLOY / "shards.cfg")],
            env=os.environ | places | {"LISTEN": f"127.0.0.1:{self.port}"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for_port(self.port, self._balancer, "haproxy")

    def stop(self) -> None:
        if self._balancer is not None:
            self._balancer.kill()
            self._balancer.wait(GUARD)
        for hub in self.hubs:
            hub.stop()
        for database in self.databases:
            database.remove()

    async def ask(self, site: str, wait: float = 5.0) -> tuple[int, Json]:
        """A command of a site's app to its lock, through the balancer; the status, and what it says."""
        body = {"type": "lock_control", "seq_id": Ids()(), "to": f"{site}-lock"}
        headers = {
            "Host": f"{site}.duly.example",
            "Authorization": f"Bearer {self.tokens[f'{site}/app']}",
        }
        url = f"http://127.0.0.1:{self.port}/v1/messages?wait={wait}"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            text = await answer.text()
            return answer.status, (await answer.json() if text.startswith("{") else {"text": text})

    @contextlib.asynccontextmanager
    async def lock(self, site: str) -> AsyncIterator[None]:
        """The site's lock, which does what it is told and comes back whenever it is hung up on."""
        serving = asyncio.create_task(self._serve(site))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, site: str) -> None:
        headers = {"Host": f"{site}.duly.example"}
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with (
                    aiohttp.ClientSession() as http,
                    http.ws_connect(f"http://127.0.0.1:{self.port}/v1/ws", headers=headers) as socket,
                ):
                    await socket.send_json({"type": "auth", "token": self.tokens[f"{site}/lock"]})
                    async for message in socket:
                        frame = message.json()
                        if frame["type"] == "lock_control":
                            said = {"type": "ack", "seq_id": frame["seq_id"], "to": frame["from"], "code": 0}
                            await socket.send_json(said)
            await asyncio.sleep(0.1)

    async def until(self, site: str, status: int) -> Json:
        """Until a command of this site is answered so; what was said."""
        async with asyncio.timeout(GUARD):
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    found, said = await self.ask(site, 1.0)
                    if found == status:
                        return said
                await asyncio.sleep(0.2)


@pytest.mark.proof
@pytest.mark.timeout(4 * LIMIT)
async def test_sites_are_placed_by_hash_or_map_and_shards_do_not_share_their_fate(tmp_path: Path) -> None:
    shards = await asyncio.to_thread(Shards, tmp_path)
    try:
        for site, shard in ((SITES[0], 0), (SITES[1], 1), (MOVED, 1)):
            await shards.prepare(site, shard)
        await asyncio.to_thread(shards.start)
        async with shards.lock(SITES[0]), shards.lock(SITES[1]), shards.lock(MOVED):
            for site in (*SITES, MOVED):
                assert (await shards.until(site, 200))["ack"]["state"] == "done"
            await asyncio.to_thread(shards.databases[1].stop, signal.SIGKILL)
            for site in (SITES[1], MOVED):
                await shards.until(site, 503)
            assert (await shards.until(SITES[0], 200))["ack"]["state"] == "done", "the other shard goes on"
            await asyncio.to_thread(shards.databases[1].start)
            for site in (SITES[1], MOVED):
                assert (await shards.until(site, 200))["ack"]["state"] == "done"
        for shard, sites in enumerate(((SITES[0],), (SITES[1], MOVED))):
            async with await open_ledger(shards.ledgers[shard]) as ledger:
                found = {record.message.scope for record in (await ledger.messages(limit=1_000)).records}
                assert found == {f"{site}-app" for site in sites}, (
                    "a shard has the commands of its sites only"
                )
    finally:
        await asyncio.to_thread(shards.stop)
