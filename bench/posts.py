"""The load over HTTP, in a process of its own: connections that each post one prepared body after another.

`python -m bench.posts` reads a `Work` from its input, measures, and prints a `Found`. It speaks the least
HTTP there is, on asyncio's own transports, so that what is measured is the server. With `pace` it posts so
many events a second instead, listens for the webhook of each, and tells how long that took.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import statistics
import sys
import time
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Struct

from bench.load import be_light


class Work(Struct):
    url: str
    contender: str
    token: str = ""
    connections: int = 1
    batch: int = 1
    seconds: float = 1.0
    repeats: bool = False
    """post a thousand events again and again instead of new ones"""
    pace: int = 0


class Found(Struct):
    rate: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    refused: int = 0
    count: int = 0
    """all that were answered"""
    busy: float = 0.0
    """how much of a core the load itself used"""


RUN = secrets.token_hex(4)
_serial = itertools.count()
NOTE = "x" * 60


def event(contender: str, n: int) -> dict[str, object]:
    """The same for both: who, what, where, how bad."""
    if contender == "alertmanager":
        labels = {"alertname": "disconnect", "instance": f"{RUN}-{n}", "severity": "warning", "job": "gate"}
        return {"labels": labels, "annotations": {"note": NOTE}}
    data = {
        "profile_id": "bench", "trigger_reason": "disconnect", "device_address": f"{RUN}-{n}",
        "severity": "warning", "timestamp": time.time_ns() // 1_000_000, "device_meta": {"note": NOTE},
    }  # fmt: skip
    return {"type": "alert_event", "seq_id": f"{RUN}{n:024x}", "data": data}


def request(work: Work, body: bytes) -> bytes:
    parts = urlsplit(work.url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {work.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def body(work: Work) -> bytes:
    events = [event(work.contender, next(_serial)) for _ in range(work.batch)]
    if work.batch == 1 and work.contender != "alertmanager":
        return msgspec.json.encode(events[0])
    return msgspec.json.encode(events)


class Poster(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[int] | None = None

    def connection_lost(self, problem: Exception | None) -> None:
        if self._answer is not None:
            self._answer.set_exception(RuntimeError("the server closed the connection before it answered"))
            self._answer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found or self._answer is None:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) >= length:
            self._buffer = rest[length:]
            self._answer.set_result(int(head[9:12]))
            self._answer = None

    async def post(self, raw: bytes) -> int:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return await self._answer


async def connect(work: Work) -> Poster:
    parts = urlsplit(work.url)
    _, poster = await asyncio.get_running_loop().create_connection(
        Poster, parts.hostname or "", parts.port or 80
    )
    return poster


async def measure(work: Work) -> Found:
    posters = [await connect(work) for _ in range(work.connections)]
    refused = 0
    took: list[float] = []
    # Prepared beforehand: what is measured is the server.
    count = max(1, 1_000 // work.batch) if work.repeats else round(work.seconds * 12_000 / work.batch) + 8
    prepared = [request(work, body(work)) for _ in range(count)]
    if work.repeats:
        for raw in prepared:
            await posters[0].post(raw)
    supply = iter(itertools.cycle(prepared) if work.repeats else prepared)
    begin, worked = time.perf_counter(), time.process_time()
    end = begin + work.seconds

    async def drive(poster: Poster) -> None:
        nonlocal refused
        while (now := time.perf_counter()) < end:
            raw = next(supply, None)
            if raw is None:
                return
            status = await poster.post(raw)
            took.append(time.perf_counter() - now)
            refused += status >= 400 and status != 409

    await asyncio.gather(*map(drive, posters))
    lasted = time.perf_counter() - begin
    count, busy = len(took) * work.batch, (time.process_time() - worked) / lasted
    return Found(count / lasted, *_quantiles(took), refused=refused, count=count, busy=busy)


def _quantiles(took: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(took, n=100) if len(took) > 1 else [0.0] * 99
    return cuts[49] * 1000, cuts[98] * 1000


async def trigger(work: Work) -> Found:
    """From the moment an event is posted to the moment its webhook is here."""
    from aiohttp import web

    total = round(work.seconds * work.pace)
    everybody = asyncio.Event()
    sent: dict[str, float] = {}
    took: list[float] = []

    async def hook(incoming: web.Request) -> web.Response:
        now = time.perf_counter()
        told = json.loads(await incoming.read())["data"]
        took.append(now - sent[told["event"]])
        if len(took) == total:
            everybody.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/hook", hook)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}/hook\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)  # the profile is set
    posters: asyncio.Queue[Poster] = asyncio.Queue()
    for _ in range(8):
        posters.put_nowait(await connect(work))
    loop = asyncio.get_running_loop()

    async def one() -> None:
        made = event(work.contender, next(_serial))
        poster = await posters.get()
        sent[str(made["seq_id"])] = time.perf_counter()
        await poster.post(request(work, msgspec.json.encode(made)))
        posters.put_nowait(poster)

    began = loop.time()
    tasks = []
    for n in range(total):
        await asyncio.sleep(max(0, began + n / work.pace - loop.time()))
        tasks.append(loop.create_task(one()))
    await asyncio.gather(*tasks)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(everybody.wait(), 10)
    return Found(len(took) / work.seconds, *_quantiles(took), refused=total - len(took))


def main() -> None:
    work = msgspec.json.decode(sys.stdin.readline(), type=Work)
    be_light()
    found = uvloop.run(trigger(work) if work.pace else measure(work))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
