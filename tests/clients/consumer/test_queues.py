"""A lamp behind real queues: off-on-off-on in all 24 orders, each switch delivered three times, a consumer
killed in the middle of one, alone and beside another. The lamp's own file tells what happened."""

from __future__ import annotations

import asyncio
import itertools
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import aiohttp
import pytest
from redis.asyncio import Redis

from duly.clients.consumer.queue_message import PARTITIONS
from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from tests import servers
from tests.clients.consumer import lamp_process
from tests.guard import GUARD
from tests.nsqd import Nsqd

ORDERS = list(itertools.permutations(range(4)))
Switch = dict[Any, Any]
Publish = Callable[[list[Switch]], Awaitable[None]]
NONSENSE: Switch = {"body": "nonsense"}
"""What an example cannot read: it must not end the consumer, nor the one that is started after it."""
HALF = 40
"""Of 96 switches, those after which the first consumer dies."""


async def nothing() -> None:
    return


class Queue:
    """A queue that a consumer reads as an example does."""

    def __init__(
        self, example: str, url: str, publish: Publish, clear: Callable[[], Awaitable[None]] = nothing
    ) -> None:
        self.example, self.url, self.publish, self.clear = example, url, publish, clear


@pytest.fixture
def redis_server() -> Iterator[servers.Redis]:
    server = servers.Redis()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def nsqd() -> Iterator[Nsqd]:
    server = Nsqd()
    server.start()
    yield server
    server.remove()


def redis_stream(server: servers.Redis) -> Queue:
    async def publish(switches: list[Switch]) -> None:
        async with Redis.from_url(server.url) as redis:
            for switch in switches:
                await redis.xadd("lamps", switch)

    return Queue("lamp_redis", server.url, publish)


def rabbitmq_queue(server: servers.RabbitMqHost) -> Queue:
    async def publish(switches: list[Switch]) -> None:
        async with await aio_pika.connect(server.amqp_url) as broker:
            channel = await broker.channel()
            await channel.declare_queue("lamps", durable=True)
            for switch in switches:
                message = aio_pika.Message(
                    switch["body"].encode(),
                    message_id=switch.get("id"),
                    app_id=switch.get("sender"),
                    headers={name: switch[name] for name in ("lane", "n") if name in switch},
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                )
                await channel.default_exchange.publish(message, "lamps")

    async def clear() -> None:
        async with await aio_pika.connect(server.amqp_url) as broker:
            await (await broker.channel()).queue_delete("lamps")  # with what other tests have left

    return Queue("lamp_rabbitmq", server.amqp_url, publish, clear)


def nsq_topic(server: Nsqd) -> Queue:
    async def publish(switches: list[Switch]) -> None:
        """Publish one by one, so that NSQ notes a time of its own with each, which is not the sender's."""
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as http:
            for switch in switches:
                async with http.post("/pub", params={"topic": "lamps"}, json=switch) as answer:
                    assert answer.status == 200, await answer.text()

    return Queue("lamp_nsq", f"127.0.0.1:{server.port}", publish)


@pytest.fixture(params=["redis", "rabbitmq", "nsq"])
async def queue(request: pytest.FixtureRequest) -> Queue:
    match request.param:
        case "redis":
            it = redis_stream(request.getfixturevalue("redis_server"))
        case "rabbitmq":
            it = rabbitmq_queue(request.getfixturevalue("rabbitmq_server"))
        case _:
            it = nsq_topic(request.getfixturevalue("nsqd"))
    await it.clear()
    return it


class Lamps:
    """A lamp for each order, and the consumers that switch them."""

    def __init__(self, queue: Queue, folder: Path, ledger: str) -> None:
        self._queue, self._ledger = queue, ledger
        self._file = folder / "lamps.txt"
        self._running: list[Process] = []

    async def consumer(self, *, order: str = "replay", dies_after: int = 0) -> Process:
        program = await asyncio.create_subprocess_exec(
            sys.executable, lamp_process.__file__, self._queue.example, self._queue.url, self._ledger,
            str(self._file), order, str(dies_after), stdout=DEVNULL, stderr=PIPE,
        )  # fmt: skip
        self._running.append(program)
        return program

    async def killed(self, program: Process) -> None:
        """Until a consumer has killed itself."""
        assert program.stderr is not None
        said = await program.stderr.read()
        assert await program.wait() == -9, said.decode()

    async def until(self, done: Callable[[], bool | Awaitable[bool]]) -> None:
        async with asyncio.timeout(GUARD):
            while not (await it if isinstance(it := done(), Awaitable) else it):
                for program in self._running:
                    if program.returncode not in (None, -9):
                        assert program.stderr is not None
                        raise AssertionError((await program.stderr.read()).decode())
                await asyncio.sleep(0.02)

    def switched(self) -> dict[str, list[tuple[int, str]]]:
        """What each lamp has written, in order."""
        seen: dict[str, list[tuple[int, str]]] = {f"lamp-{k}": [] for k in range(len(ORDERS))}
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            lamp, n, body = line.split()
            seen[lamp].append((int(n), body))
        return seen

    async def end(self) -> None:
        for program in self._running:
            if program.returncode is None:
                program.kill()
            await program.communicate()


@pytest.fixture
async def lamps(queue: Queue, tmp_path: Path, ledger: str) -> AsyncIterator[Lamps]:
    it = Lamps(queue, tmp_path, ledger)
    await queue.publish([NONSENSE, *switches()])
    yield it
    await it.end()


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lamps.db"


def switches() -> list[Switch]:
    """Off-on-off-on for each lamp in its order, everything three times."""
    one_round = [
        {"id": f"{k}-{n}", "sender": "remote", "lane": f"lamp-{k}", "n": n, "body": "on" if n % 2 else "off"}
        for k, order in enumerate(ORDERS)
        for n in order
    ]
    return one_round * 3


def both_serve(ledger: Ledger) -> Callable[[], Awaitable[bool]]:
    """Whether two consumers share the lanes evenly."""

    async def shared() -> bool:
        holders = (await ledger.bucket("consumer lamps registry")).values()
        of_each = Counter(holder.partition(b"/")[0] for holder in holders)
        return sorted(of_each.values()) == [PARTITIONS // 2, PARTITIONS // 2]

    return shared


ALL = [(0, "off"), (1, "on"), (2, "off"), (3, "on")]


def all_in_order(lamps: Lamps) -> bool:
    return all(seen == ALL for seen in lamps.switched().values())


def all_at_the_end(lamps: Lamps) -> bool:
    return all(ALL[-1] in seen for seen in lamps.switched().values())


@pytest.mark.timeout(120)
async def test_a_consumer_that_is_killed_in_the_middle_repeats_and_loses_nothing(lamps: Lamps) -> None:
    first = await lamps.consumer(dies_after=HALF)
    await lamps.killed(first)
    assert sum(map(len, lamps.switched().values())) == HALF
    await lamps.consumer()
    await lamps.until(lambda: all_at_the_end(lamps))
    assert all_in_order(lamps)


@pytest.mark.proof
@pytest.mark.timeout(120)
async def test_where_only_the_latest_counts_every_lamp_ends_on(lamps: Lamps) -> None:
    first = await lamps.consumer(order="latest", dies_after=HALF // 4)
    await lamps.killed(first)
    await lamps.consumer(order="latest")
    await lamps.until(lambda: all_at_the_end(lamps))
    for seen in lamps.switched().values():
        assert seen == sorted(set(seen)), "a switch was repeated, or came after a later one"
        assert seen[-1] == ALL[-1]


@pytest.fixture
def shared_ledger(postgres_server: servers.Postgres) -> str:
    return postgres_server.create_database()


@pytest.mark.timeout(120)
async def test_of_two_consumers_one_goes_on_when_the_other_is_killed(
    queue: Queue, tmp_path: Path, shared_ledger: str
) -> None:
    lamps = Lamps(queue, tmp_path, shared_ledger)
    try:
        dying, _ = await asyncio.gather(lamps.consumer(dies_after=HALF // 5), lamps.consumer())
        async with await open_ledger(shared_ledger) as ledger:
            await lamps.until(both_serve(ledger))
        await queue.publish(switches())
        await lamps.killed(dying)
        await lamps.until(lambda: all_at_the_end(lamps))
        assert all_in_order(lamps)
    finally:
        await lamps.end()
