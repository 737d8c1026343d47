"""PostgreSQL behind a black hole: connections stay open and nothing comes back. Within five seconds the hub
says that it is unhealthy and each command is answered; once the database is back nothing is lost or twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from asyncpg.transaction import Transaction

from duly.core import operations as w
from duly.core.messages import Verdict, VerdictKind
from duly.errors import LedgerUnavailable
from duly.storage.postgres.flush import PostgresConnection
from duly.storage.postgres.ledger import PostgresLedger
from duly.storage.postgres.verified_flush import VerifiedFlush
from tests.end_to_end.many import LocalCluster, until
from tests.end_to_end.raw import Closed, Json, Peer, curl, dial, join
from tests.guard import GUARD
from tests.servers import Postgres
from tests.stopwatch import MachineStopwatch
from tests.storage.making import admit, message

WITHIN = 5.0


class Hole:
    """A TCP proxy that can stop forwarding, both ways, and closes nothing; what it took goes on later."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._gates = [asyncio.Event()]
        """of the connections so far, and the last one of those to come"""
        self._gates[0].set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def swallow(self) -> None:
        for gate in self._gates:
            gate.clear()
        self._gates.append(asyncio.Event())

    def heal(self, *, late: float = 0.0) -> None:
        """Forward again; what older connections had said goes on so many seconds later."""
        self._gates[-1].set()
        for gate in self._gates[:-1]:
            asyncio.get_running_loop().call_later(late, gate.set)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate = self._gates[-1]
        await gate.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        for each in (self._pass(reader, back, gate), self._pass(there, writer, gate)):
            task = asyncio.get_running_loop().create_task(each)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await gate.wait()
                writer.write(data)
                await writer.drain()
        await gate.wait()
        writer.close()


@pytest.fixture
async def hole(postgres_server: Postgres) -> AsyncIterator[Hole]:
    it = Hole(postgres_server.port)
    await it.start()
    yield it
    await it.close()


@pytest.fixture
async def cluster(tmp_path: Path, postgres_server: Postgres, hole: Hole) -> AsyncIterator[LocalCluster]:
    it = LocalCluster(tmp_path, postgres_server)
    it.ledger_url = it.ledger_url.replace(f":{postgres_server.port}/", f":{hole.port}/")
    await it.start(1)
    yield it
    hole.heal()
    await it.stop()


async def health(cluster: LocalCluster, wanted: int, within: float) -> float:
    took = MachineStopwatch()
    while (await curl(f"{cluster.hubs[0].url}/v1/health")).status != wanted:
        assert took.seconds < within, f"health is not {wanted} after {within} s"
        await asyncio.sleep(0.05)
    return took.seconds


class Presses:
    """An app that sends each command until it is answered with anything but code 4, and a lock that obeys."""

    def __init__(self, phone: Peer, lock: Peer) -> None:
        self.phone, self.lock = phone, lock
        self.effects: list[str] = []
        self.slowest = 0.0
        self.codes: list[int] = []

    async def obey(self) -> None:
        while True:
            command = await self.lock.hear()
            if command["type"] == "lock_control":
                if command["seq_id"] not in self.effects:
                    self.effects.append(command["seq_id"])
                await self.lock.ack(command)

    async def press(self) -> str:
        seq_id = self.phone.ids()
        while True:
            took = MachineStopwatch()
            await self.phone.command("lock", seq_id=seq_id)
            said = await self.phone.first(lambda f: f["type"] == "server_ack" and f.get("seq_id") == seq_id)
            self.slowest = max(self.slowest, took.seconds)
            self.codes.append(said["code"])
            if said["code"] != 4:
                return seq_id
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", ["proxy", "stopped"])
async def test_health_and_commands_within_five_seconds_and_nothing_lost_or_double(
    cluster: LocalCluster, hole: Hole, postgres_server: Postgres, how: str
) -> None:
    async with cluster.join(0, "lock") as lock, cluster.join(0, "phone") as phone:
        presses = Presses(phone, lock)
        obeying = asyncio.create_task(presses.obey())
        await cluster.known("lock")
        warm = await presses.press()  # what is sent while a device is being welcomed may be overtaken
        await phone.first(lambda f: f["type"] == "ack" and f["seq_id"] == warm)
        presses.effects.clear()
        sent = [await presses.press() for _ in range(5)]

        def swallow() -> None:
            hole.swallow() if how == "proxy" else postgres_server.tell_all(signal.SIGSTOP)

        def heal() -> None:
            hole.heal() if how == "proxy" else postgres_server.tell_all(signal.SIGCONT)

        pressing = asyncio.create_task(presses.press())
        swallow()
        try:
            assert await health(cluster, 503, WITHIN) < WITHIN
            await until(lambda: 4 in presses.codes, WITHIN)
            await asyncio.sleep(1)
        finally:
            heal()
        sent.append(await asyncio.wait_for(pressing, GUARD))
        await health(cluster, 200, 15)
        sent += [await presses.press() for _ in range(3)]
        assert presses.slowest < WITHIN
        await until(lambda: len(presses.effects) >= len(sent))
        assert presses.effects == sent, (
            presses.codes,
            [f for f in phone.heard if f.get("seq_id") in set(sent) - set(presses.effects)],
        )
        token = cluster.tokens["root"]
        for seq_id in sent:
            async with asyncio.timeout(GUARD):
                while (
                    json.loads((await curl(f"{cluster.hubs[0].url}/v1/messages/phone/{seq_id}", token)).body)[
                        "state"
                    ]
                    != "done"
                ):
                    await asyncio.sleep(0.1)
        obeying.cancel()


async def test_an_idle_hub_is_unhealthy_within_five_seconds_too(cluster: LocalCluster, hole: Hole) -> None:
    hole.swallow()
    await health(cluster, 503, WITHIN)
    hole.heal()
    await health(cluster, 200, 10)


async def test_every_request_is_answered_within_five_seconds_for_as_long_as_it_lasts(
    cluster: LocalCluster, hole: Hole
) -> None:
    """Not only the first one: those after it queued behind the looks of the hub itself."""
    url, token = cluster.hubs[0].url, cluster.tokens["phone"]

    async def ask() -> float:
        took = MachineStopwatch()
        assert (await curl(f"{url}/v1/messages?limit=1", token)).status == 503
        return took.seconds

    hole.swallow()
    await health(cluster, 503, WITHIN)
    took = [await ask() for _ in range(3)]
    took += await asyncio.gather(*(ask() for _ in range(5)))
    hole.heal()
    assert max(took) < WITHIN, took
    await health(cluster, 200, 10)


@contextlib.asynccontextmanager
async def swallowing_ledger(
    server: Postgres, hole: Hole, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PostgresLedger]:
    """A ledger behind the hole that holds message 0; the hole swallows every commit until the patch is
    undone."""
    url = server.create_database()
    async with await PostgresLedger.open(url.replace(f":{server.port}/", f":{hole.port}/")) as ledger:
        await ledger.write(admit(message(0)))
        commit, store = Transaction.commit, VerifiedFlush.store

        async def commit_into_the_hole(self: Transaction) -> None:
            hole.swallow()
            await commit(self)

        async def store_into_the_hole(self: VerifiedFlush, connection: PostgresConnection) -> bool:
            hole.swallow()
            return await store(self, connection)

        monkeypatch.setattr(Transaction, "commit", commit_into_the_hole)
        monkeypatch.setattr(VerifiedFlush, "store", store_into_the_hole)
        yield ledger


ONE_STATEMENT: w.Group = (admit(message(1)),)
WITH_LOCKS: w.Group = (admit(message(1)), w.AppendEntry("log", b"x", 1))
BOTH_WAYS = pytest.mark.parametrize("writes", [ONE_STATEMENT, WITH_LOCKS], ids=["one statement", "locks"])


@BOTH_WAYS
async def test_many_who_wait_for_a_commit_in_doubt_fail_together(
    postgres_server: Postgres, hole: Hole, monkeypatch: pytest.MonkeyPatch, writes: w.Group
) -> None:
    async with swallowing_ledger(postgres_server, hole, monkeypatch) as ledger:
        with pytest.raises(LedgerUnavailable, match="may or may not be stored"):
            await ledger.write(*writes)
        with pytest.raises(LedgerUnavailable, match="does not answer"):
            ledger.check()  # so the hub is unhealthy, although its own looks still wait for a connection
        monkeypatch.undo()
        took = MachineStopwatch()
        looks = (ledger.find(message(0).key) for _ in range(4))
        ended = await asyncio.gather(*looks, return_exceptions=True)
        assert [type(end) for end in ended] == [LedgerUnavailable] * 4
        assert took.seconds < WITHIN
        hole.heal()
        assert await ledger.find(message(0).key) is not None
        ledger.check()


@BOTH_WAYS
async def test_a_commit_that_was_swallowed_cannot_land_after_a_hub_has_looked(
    postgres_server: Postgres, hole: Hole, monkeypatch: pytest.MonkeyPatch, writes: w.Group
) -> None:
    """Its bytes are in the hole when it is given up: nothing is read before it has surely failed."""
    async with swallowing_ledger(postgres_server, hole, monkeypatch) as ledger:
        took = MachineStopwatch()
        with pytest.raises(LedgerUnavailable, match="may or may not be stored"):
            await ledger.write(*writes)
        assert took.seconds < WITHIN
        monkeypatch.undo()
        hole.heal(late=1)
        assert await ledger.find(message(1).key) is None
        await asyncio.sleep(1.5)
        assert await ledger.find(message(1).key) is None, "it landed after we had looked"
        verdict = await ledger.apply(admit(message(1)))
        assert isinstance(verdict, Verdict)
        assert verdict.kind is VerdictKind.FRESH


async def turned_away(peer: Peer) -> tuple[Json, str]:
    """The last frame before the hub hangs up, and the reason that it gives."""
    try:
        while True:
            await peer.hear()
    except Closed as closed:
        return peer.heard[-1], str(closed.args[1])


async def test_a_client_that_logs_in_meanwhile_is_told_to_try_again_not_that_its_token_is_wrong(
    cluster: LocalCluster, hole: Hole
) -> None:
    hole.swallow()
    await health(cluster, 503, WITHIN)
    async with dial(cluster.hubs[0].url) as peer:
        await peer.say("auth", token=cluster.tokens["phone"])
        said, reason = await turned_away(peer)
    assert (said["type"], said["code"], said["error"]) == ("server_ack", 4, "internal")
    assert reason.startswith("try again soon: ")


async def test_a_client_whose_welcome_cannot_be_made_is_told_so_too(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database falls silent after the login and before the welcome."""

    async def fail(*_: object) -> None:
        raise LedgerUnavailable("no answer")

    monkeypatch.setattr(cluster.hubs[0].router, "connected", fail)
    async with dial(cluster.hubs[0].url) as peer:
        await peer.say("auth", token=cluster.tokens["phone"])
        said, reason = await turned_away(peer)
    assert (said["type"], said["code"], said["detail"]) == ("server_ack", 4, "no answer")
    assert reason == "try again soon: no answer"


async def test_a_hub_that_is_stopped_meanwhile_ends_soon(
    cluster: LocalCluster, hole: Hole, tmp_path: Path
) -> None:
    """Each part waited for the database in turn: with clients and commands under way that took 12 s, and a
    service manager may kill after 10."""
    args = ("--ledger", cluster.ledger_url, "--secret-key", str(tmp_path / "secret.key"), "--port", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "duly", "up", "--no-mqtt", "--data", str(tmp_path / "stopped"), *args,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    url = (await process.stdout.readline()).split()[1].decode()
    async with join(url, cluster.tokens["lock"]) as lock, join(url, cluster.tokens["phone"]) as phone:
        await phone.command("lock")
        await lock.obey()
        hole.swallow()
        for _ in range(20):
            await phone.command("lock")
        took = MachineStopwatch()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert took.seconds < 9
