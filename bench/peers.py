"""Two nodes at a broker, each in a process of its own: `python -m bench.peers KIND serve|load JSON`.

gmqtt  written by hand on gmqtt: pending → ack → complete, no dedup, nothing stored.
paho   the same on paho, as its documentation shows it.
duly   two `duly.Node`, each with its file.

The load keeps so many tasks of 214 bytes under way, for a while, and prints what it found. A task counts when
its `complete` is there. With `drain` it sends so many to a node that is away, says so, and measures from its
return.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
import uuid
from typing import Any

import msgspec
from msgspec import Struct

from bench.load import Count

NOTE = "x" * 172


class Work(Struct):
    host: str
    port: int
    user: str = ""
    password: str = ""
    depth: int = 100
    seconds: float = 2.0
    folder: str = ""
    drain: int = 0

    def url(self, name: str) -> str:
        login = f"{self.user}:{self.password}" if self.user else name
        return f"mqtt://{login}@{self.host}:{self.port}?client_id={name}"


class Pending(Struct):
    sender: str
    receiver: str
    msg_id: str
    action: str
    time: int
    exp: int
    payload: Any


class Answer(Struct, omit_defaults=True):
    msg_id: str
    value: Any = None


_pending = msgspec.json.Decoder(Pending).decode
_answer = msgspec.json.Decoder(Answer).decode
_encode = msgspec.json.Encoder().encode


def task() -> bytes:
    now = int(time.time())
    return _encode(Pending("A", "B", str(uuid.uuid4()), "work", now, now + 60, {"note": NOTE}))


# ── gmqtt ────────────────────────────────────────────────────────────────────────────────────────


async def gmqtt(role: str, work: Work) -> None:
    from gmqtt import Client
    from gmqtt.mqtt.constants import MQTTv311

    name = "B" if role == "serve" else "A"
    client = Client(name, clean_session=False)
    if work.user:
        client.set_auth_credentials(work.user, work.password)
    done: dict[str, asyncio.Future[None]] = {}

    def serve(_: Any, topic: str, payload: bytes, qos: int, properties: Any) -> int:
        asked = _pending(payload)
        client.publish(f"nodes/{asked.sender}/ack", _encode(Answer(asked.msg_id)), qos=1)
        client.publish(f"nodes/{asked.sender}/complete", _encode(Answer(asked.msg_id, {"on": True})), qos=1)
        return 0

    def hear(_: Any, topic: str, payload: bytes, qos: int, properties: Any) -> int:
        if topic.endswith("/complete"):
            done.pop(_answer(payload).msg_id).set_result(None)
        return 0

    client.on_message = serve if role == "serve" else hear
    await client.connect(work.host, work.port, version=MQTTv311)
    for kind in ("pending",) if role == "serve" else ("ack", "complete", "failed"):
        client.subscribe(f"nodes/{name}/{kind}", qos=1)
    await asyncio.sleep(0.3)
    if role == "serve":
        await forever()

    async def one() -> None:
        text = task()
        id_ = _pending(text).msg_id
        future = done[id_] = asyncio.get_running_loop().create_future()
        client.publish("nodes/B/pending", text, qos=1)
        await future

    await measure(work, one)


# ── paho ─────────────────────────────────────────────────────────────────────────────────────────


def paho(role: str, work: Work) -> None:
    from paho.mqtt.client import Client
    from paho.mqtt.enums import CallbackAPIVersion

    name = "B" if role == "serve" else "A"
    client = Client(CallbackAPIVersion.VERSION2, name, clean_session=False)
    client.max_inflight_messages_set(1000)
    if work.user:
        client.username_pw_set(work.user, work.password)
    count = Count(work.seconds)
    began: dict[str, float] = {}
    over = threading.Event()

    def send() -> None:
        text = task()
        began[_pending(text).msg_id] = time.perf_counter()
        client.publish("nodes/B/pending", text, qos=1)

    def hear(_: Any, __: Any, message: Any) -> None:
        if role == "serve":
            asked = _pending(message.payload)
            client.publish(f"nodes/{asked.sender}/ack", _encode(Answer(asked.msg_id)), qos=1)
            client.publish(
                f"nodes/{asked.sender}/complete", _encode(Answer(asked.msg_id, {"on": True})), qos=1
            )
        elif message.topic.endswith("/complete"):
            count.add(began.pop(_answer(message.payload).msg_id))
            if count.over:
                over.set()
            else:
                send()

    client.on_message = hear
    client.connect(work.host, work.port)
    client.subscribe(
        [(f"nodes/{name}/{k}", 1) for k in (("pending",) if role == "serve" else ("ack", "complete"))]
    )
    client.loop_start()
    time.sleep(0.3)
    if role == "serve":
        print("ready", flush=True)
        threading.Event().wait()
    count.__init__(work.seconds)  # type: ignore[misc]
    for _ in range(work.depth):
        send()
    over.wait(work.seconds + 20)
    client.loop_stop()
    print(json.dumps(msgspec.to_builtins(count.found())), flush=True)


# ── duly ─────────────────────────────────────────────────────────────────────────────────────────


async def duly(role: str, work: Work) -> None:
    import duly

    name = "B" if role == "serve" else "A"
    node = duly.Node(work.url(name), name=name, data=f"{work.folder}/{name}.db")
    if role == "serve":

        @node.task("work")
        async def turn_on(task: duly.Task) -> dict[str, bool]:
            return {"on": True}

    async with node:
        if role == "serve":
            await forever()
        payload = {"note": NOTE}
        if work.drain:
            await drain(node, work.drain, payload)
        else:
            await measure(work, lambda: node.call("B", "work", payload))


async def drain(node: Any, count: int, payload: Any) -> None:
    """Send to one who is away, then see how fast he catches up."""
    tasks = []
    for _ in range(count // 500):
        tasks += await asyncio.gather(*(node.send("B", "work", payload, expires=3600) for _ in range(500)))
    await asyncio.sleep(1.0)
    print("sent", flush=True)
    first, last = 0.0, 0.0
    for each in tasks:
        await each.result
        last = time.perf_counter()
        first = first or last
    print(json.dumps({"rate": count / (last - first)}), flush=True)


# ── all ──────────────────────────────────────────────────────────────────────────────────────────


async def forever() -> None:
    print("ready", flush=True)
    await asyncio.Event().wait()


async def measure(work: Work, one: Any) -> None:
    count = Count(work.seconds)

    async def worker() -> None:
        while not count.over:
            began = time.perf_counter()
            await one()
            count.add(began)

    await asyncio.gather(*itertools.starmap(worker, itertools.repeat((), work.depth)))
    print(json.dumps(msgspec.to_builtins(count.found())), flush=True)


def main() -> None:
    import uvloop

    kind, role, text = sys.argv[1:]
    work = msgspec.json.decode(text, type=Work)
    match kind:
        case "gmqtt":
            uvloop.run(gmqtt(role, work))
        case "paho":
            paho(role, work)
        case "duly":
            uvloop.run(duly(role, work))


if __name__ == "__main__":
    main()
