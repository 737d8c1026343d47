"""The load, in a process of its own: apps and devices, the same for every contender.

python -m bench.load JSON measures for a while and prints what it found; with `idle` it connects devices, says
how many, and holds them until its input ends.

Every app has its device, and keeps `depth` commands of 214 bytes under way: whenever the final ack of one
comes, it sends the next. A command counts when its final ack is there.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import sys
import time
from typing import Any

import aiohttp
import msgspec
import uvloop
from aiohttp import WSMsgType
from msgspec import Raw, Struct

WARM_SECONDS = 0.4
SIZE = 214


class Pair(Struct):
    """An app and its device."""

    app: str
    device: str
    app_token: str = ""
    device_token: str = ""


class Work(Struct):
    url: str
    pairs: list[Pair]
    depth: int = 1
    seconds: float = 1.0
    idle: bool = False
    device_url: str = ""
    """where the devices go, if remote"""


class Found(Struct):
    rate: float
    p50: float
    p99: float
    count: int
    """all that were done, also while warming up"""


class Frame(Struct, omit_defaults=True):
    type: str
    seq_id: str = ""
    from_: str = msgspec.field(default="", name="from")
    to: str = ""
    data: Raw = Raw(b"")
    code: int | None = None
    error: str = ""


decode = msgspec.json.Decoder(Frame).decode
encode = msgspec.json.Encoder().encode


class Count:
    """What came back in the time that counts, and how long each took."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.perf_counter() + WARM_SECONDS
        self.end = self.begin + seconds
        self.took: list[float] = []
        self.all = 0

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.end

    def add(self, began: float) -> None:
        now = time.perf_counter()
        self.all += 1
        if self.begin <= now < self.end:
            self.took.append(now - began)

    def found(self) -> Found:
        took = sorted(self.took)
        rate = len(took) / (self.end - self.begin)
        return Found(rate, statistics.median(took) * 1e3, took[len(took) * 99 // 100] * 1e3, self.all)


def commands(pair: Pair) -> Any:
    """Frames of 214 bytes, numbered as an app numbers them."""
    for n in itertools.count():
        seq_id = f"{time.time_ns() // 1_000_000}_{n}"
        bare = encode(Frame("lock_control", seq_id, from_=pair.app, to=pair.device, data=Raw(b'{"note":""}')))
        note = b"x" * (SIZE - len(bare))
        yield seq_id, bare.replace(b'"note":""', b'"note":"%b"' % note)


# ── over WebSocket ───────────────────────────────────────────────────────────────────────────────


async def dial(session: aiohttp.ClientSession, url: str, token: str) -> aiohttp.ClientWebSocketResponse:
    socket = await session.ws_connect(
        f"{url}/v1/ws", headers={"Authorization": f"Bearer {token}"}, max_msg_size=0
    )
    welcome = decode((await socket.receive()).data)
    if welcome.type != "welcome":
        raise RuntimeError(f"not welcome: {welcome}")
    return socket


async def device(socket: aiohttp.ClientWebSocketResponse) -> None:
    async for message in socket:
        frame = decode(message.data)
        ack = encode(Frame("ack", frame.seq_id, to=frame.from_, code=0))
        await socket.send_frame(ack, WSMsgType.TEXT)


async def app(socket: aiohttp.ClientWebSocketResponse, pair: Pair, depth: int, count: Count) -> None:
    made = commands(pair)
    under_way: dict[str, float] = {}

    async def send() -> None:
        seq_id, frame = next(made)
        under_way[seq_id] = time.perf_counter()
        await socket.send_frame(frame, WSMsgType.TEXT)

    for _ in range(depth):
        await send()
    async for message in socket:
        frame = decode(message.data)
        if frame.code:
            raise RuntimeError(f"refused: {frame}")
        if frame.type == "ack" and (began := under_way.pop(frame.seq_id, None)) is not None:
            count.add(began)
            if not count.over:
                await send()
            elif not under_way:
                return


async def over_websocket(work: Work) -> Found:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        where = work.device_url or work.url
        devices = [await dial(session, where, pair.device_token) for pair in work.pairs]
        apps = [await dial(session, work.url, pair.app_token) for pair in work.pairs]
        answering = [asyncio.create_task(device(socket)) for socket in devices]
        count = Count(work.seconds)
        await asyncio.gather(
            *(app(socket, pair, work.depth, count) for socket, pair in zip(apps, work.pairs, strict=True))
        )
        for socket in (*apps, *devices):
            await socket.close()
        await asyncio.gather(*answering)
    return count.found()


async def stay(work: Work) -> None:
    """Connect, and be there."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        gate = asyncio.Semaphore(50)

        async def one(pair: Pair) -> aiohttp.ClientWebSocketResponse:
            async with gate:
                return await dial(session, work.url, pair.device_token)

        sockets = await asyncio.gather(*map(one, work.pairs))
        reading = [asyncio.create_task(device(socket)) for socket in sockets]
        print(len(sockets), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        if any(task.done() for task in reading):
            raise RuntimeError("the hub hung up on some of them")
        for task in reading:
            task.cancel()


# ── over NATS JetStream ──────────────────────────────────────────────────────────────────────────


async def over_nats(work: Work) -> Found:
    """The stream takes a command once (Nats-Msg-Id) and says so; the device's consumer gets it, acknowledges
    it and answers the app on its own subject."""
    import nats
    from nats.js.api import ConsumerConfig, DeliverPolicy

    subscriptions: list[Any] = []
    links = [await nats.connect(work.url) for _ in range(2 * len(work.pairs))]
    count = Count(work.seconds)

    async def answer(link: Any, pair: Pair) -> None:
        async def got(message: Any) -> None:
            frame = decode(message.data)
            await message.ack()
            await link.publish(f"ack.{pair.app}", encode(Frame("ack", frame.seq_id, code=0)))

        only_new = ConsumerConfig(deliver_policy=DeliverPolicy.NEW)
        stream = link.jetstream()
        heard = await stream.subscribe(f"cmd.{pair.device}", cb=got, manual_ack=True, config=only_new)
        subscriptions.append(heard)

    async def ask(link: Any, pair: Pair) -> None:
        made, stream = commands(pair), link.jetstream()
        under_way: dict[str, asyncio.Future[None]] = {}

        async def ended(message: Any) -> None:
            future = under_way.get(decode(message.data).seq_id)
            if future is not None and not future.done():
                future.set_result(None)

        await link.subscribe(f"ack.{pair.app}", cb=ended)
        await link.flush()

        async def one() -> None:
            while not count.over:
                began = time.perf_counter()
                seq_id, frame = next(made)
                end = under_way[seq_id] = asyncio.get_running_loop().create_future()
                taken = await stream.publish(
                    f"cmd.{pair.device}", frame, headers={"Nats-Msg-Id": f"{pair.app}:{seq_id}"}
                )
                if taken.duplicate:
                    raise RuntimeError("a new command was taken for a repeat")
                await end
                del under_way[seq_id]
                count.add(began)

        await asyncio.gather(*(one() for _ in range(work.depth)))

    setup = links[0].jetstream()
    await setup.add_stream(name="commands", subjects=["cmd.*"], duplicate_window=120)
    await setup.purge_stream("commands")
    half = len(work.pairs)
    await asyncio.gather(*(answer(link, pair) for link, pair in zip(links[:half], work.pairs, strict=True)))
    count = Count(work.seconds)
    await asyncio.gather(*(ask(link, pair) for link, pair in zip(links[half:], work.pairs, strict=True)))
    for heard in subscriptions:
        await heard.unsubscribe()  # deletes its consumer, too
    for link in links:
        await link.close()
    return count.found()


def allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    work = msgspec.json.decode(sys.stdin.readline(), type=Work)
    allow_many_files()
    if work.idle:
        uvloop.run(stay(work))
        return
    run = over_nats if work.url.startswith("nats:") else over_websocket
    print(msgspec.json.encode(uvloop.run(run(work))).decode(), flush=True)


if __name__ == "__main__":
    main()
