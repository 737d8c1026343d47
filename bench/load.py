"""The load, in a process of its own: apps and devices, the same for every contender.

python -m bench.load reads its work as JSON, measures for a while and prints what it found; with `idle` it
connects devices, says how many, and holds them until its input ends.

Every app has its device, and keeps `depth` commands of 214 bytes under way: whenever the final ack of one
comes, it sends the next. A command counts when its final ack is there. `busy` tells how much of a core the
load itself used: near 1, the client is the limit and not the server.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import uvloop
from msgspec import Raw, Struct

from bench.websocket import WebSocketClient, connect

WARM_SECONDS = 0.4
SIZE = 214


class Pair(Struct):
    """An app and its device."""

    app: str
    device: str
    app_token: str = ""
    device_token: str = ""


class Work(Struct):
    """What the load is to do."""

    url: str
    pairs: list[Pair]
    depth: int = 1
    seconds: float = 1.0
    idle: bool = False
    device_url: str = ""
    """where the devices go, if remote"""


class Found(Struct):
    """What the load found; times in milliseconds."""

    rate: float
    p50: float
    p99: float
    count: int
    """all that were done, also while warming up"""
    busy: float = 0.0
    """how much of a core the load itself used"""


class Frame(Struct, omit_defaults=True, gc=False):
    """What of a frame the load reads and writes."""

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
        self.began, self.worked = time.perf_counter(), time.process_time()
        self.begin = self.began + WARM_SECONDS
        self.end = self.begin + seconds
        self.took: list[float] = []
        self.all = 0

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() >= self.end

    def add(self, began: float) -> None:
        """One that began then has come back now."""
        now = time.perf_counter()
        self.all += 1
        if self.begin <= now < self.end:
            self.took.append(now - began)

    def found(self) -> Found:
        """What it came to."""
        if not self.took:
            raise RuntimeError("nothing came back in the time that counts")
        took = sorted(self.took)
        rate = len(took) / (self.end - self.begin)
        busy = (time.process_time() - self.worked) / (time.perf_counter() - self.began)
        p50, p99 = statistics.median(took) * 1e3, took[len(took) * 99 // 100] * 1e3
        return Found(rate, p50, p99, self.all, busy)


def commands(pair: Pair) -> Iterator[tuple[str, bytes]]:
    """Frames of 214 bytes, numbered as an app numbers them."""
    before = b'{"type":"lock_control","seq_id":"'
    after = f'","from":"{pair.app}","to":"{pair.device}","data":{{"note":"'.encode()
    filling = b"x" * SIZE
    for n in itertools.count():
        seq_id = f"{time.time_ns() // 1_000_000}_{n}"
        room = SIZE - len(before) - len(after) - len(seq_id) - 3
        yield seq_id, b'%b%b%b%b"}}' % (before, seq_id.encode(), after, filling[:room])


# ── over WebSocket ───────────────────────────────────────────────────────────────────────────────


class BenchDevice(WebSocketClient):
    """A device that does what it is told, at once."""

    def __init__(self, token: str, over: asyncio.Future[None]) -> None:
        super().__init__(token)
        self.over = over

    def text(self, payload: bytes) -> None:
        frame = decode(payload)
        self.send(f'{{"type":"ack","seq_id":"{frame.seq_id}","to":"{frame.from_}","code":0}}'.encode())

    def lost(self) -> None:
        if not self.over.done():
            self.over.set_exception(RuntimeError("the server closed a device's connection"))


class BenchApp(WebSocketClient):
    """An app that has so many commands under way."""

    _count: Count

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.app_token)
        self.over = self.loop.create_future()
        self._made = commands(pair)
        self._under_way: dict[str, float] = {}

    def begin(self, depth: int, count: Count) -> None:
        """Sends the first commands; those that come back are counted."""
        self._count = count
        for _ in range(depth):
            self.command()

    def command(self) -> None:
        """Sends the next command."""
        seq_id, frame = next(self._made)
        self._under_way[seq_id] = time.perf_counter()
        self.send(frame)

    def text(self, payload: bytes) -> None:
        frame = decode(payload)
        if frame.code:
            self._fail(f"refused: {payload.decode()}")
        if frame.type == "ack" and (began := self._under_way.pop(frame.seq_id, None)) is not None:
            self._count.add(began)
            if not self._count.over:
                self.command()
            elif not self._under_way and not self.over.done():
                self.over.set_result(None)

    def lost(self) -> None:
        self._fail("the server closed an app's connection")

    def _fail(self, why: str) -> None:
        if not self.over.done():
            self.over.set_exception(RuntimeError(why))


async def over_websocket(work: Work) -> Found:
    """Apps and devices at a hub."""
    broken = asyncio.get_running_loop().create_future()
    devices = [BenchDevice(pair.device_token, broken) for pair in work.pairs]
    for device in devices:
        await connect(work.device_url or work.url, device)
    apps = [BenchApp(pair) for pair in work.pairs]
    for app in apps:
        await connect(work.url, app)
    count = Count(work.seconds)
    for app in apps:
        app.begin(work.depth, count)
    ended = asyncio.gather(*(app.over for app in apps))
    await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
    if broken.done():
        ended.cancel()
        broken.result()
    await ended
    found = count.found()
    for client in (*apps, *devices):
        client.close()
    return found


async def stay(work: Work) -> None:
    """Connects devices that get no commands, and holds them."""
    gate = asyncio.Semaphore(50)
    broken = asyncio.get_running_loop().create_future()

    async def one(pair: Pair) -> None:
        async with gate:
            await connect(work.url, BenchDevice(pair.device_token, broken))

    await asyncio.gather(*map(one, work.pairs))
    print(len(work.pairs), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if broken.done():
        broken.result()


# ── over NATS JetStream ──────────────────────────────────────────────────────────────────────────


async def over_nats(work: Work) -> Found:
    """The stream takes a command once (Nats-Msg-Id) and says so; the device's consumer gets it, acknowledges
    it and answers the app on its own subject."""
    import nats
    from nats.js.api import ConsumerConfig, DeliverPolicy

    subscriptions: list[Any] = []
    links = [await nats.connect(work.url) for _ in range(2 * len(work.pairs))]

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
    """Raises the limit of open files as far as it goes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def be_light() -> None:
    """A load runs for seconds and makes no cycles: it has nothing to collect."""
    gc.freeze()
    gc.disable()


def main() -> None:
    work = msgspec.json.decode(sys.stdin.readline(), type=Work)
    allow_many_files()
    be_light()
    if work.idle:
        uvloop.run(stay(work))
        return
    run = over_nats if work.url.startswith("nats:") else over_websocket
    print(msgspec.json.encode(uvloop.run(run(work))).decode(), flush=True)


if __name__ == "__main__":
    main()
