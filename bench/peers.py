"""Two nodes at a broker, each in a process of its own: `python -m bench.peers KIND serve|load JSON`.

gmqtt  written by hand on gmqtt: pending → ack → complete, an async handler, no dedup, nothing stored.
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
import socket
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
    a: str = "A"
    b: str = "B"

    def login(self, name: str) -> str:
        """The user that a node logs in as: each has its own, since brokers limit what a user may publish."""
        return f"{self.user}-{'a' if name == self.a else 'b'}"

    def url(self, name: str) -> str:
        """Where the broker is, for this node."""
        login = f"{self.login(name)}:{self.password}" if self.user else name
        return f"mqtt://{login}@{self.host}:{self.port}?client_id={name}"


def task(work: Work) -> tuple[str, str]:
    """A task as a program writes it that knows nothing but the seed."""
    id_, now = str(uuid.uuid4()), int(time.time())
    fields = {
        "sender": work.a,
        "receiver": work.b,
        "msg_id": id_,
        "action": "work",
        "time": now,
        "exp": now + 60,
    }
    return id_, json.dumps(fields | {"payload": {"note": NOTE}})


async def turn_on(payload: Any) -> dict[str, bool]:
    """The handler: the same for all peers that can await."""
    return {"on": True}


# ── gmqtt ────────────────────────────────────────────────────────────────────────────────────────


async def gmqtt(role: str, work: Work) -> None:
    from gmqtt import Client
    from gmqtt.mqtt.constants import MQTTv311

    name = work.b if role == "serve" else work.a
    client = Client(name, clean_session=False)
    if work.user:
        client.set_auth_credentials(work.login(name), work.password)
    done: dict[str, asyncio.Future[None]] = {}

    async def serve(_: Any, topic: str, payload: bytes, qos: int, properties: Any) -> int:
        asked = json.loads(payload)
        sender, id_ = asked["sender"], asked["msg_id"]
        client.publish(f"nodes/{sender}/ack", json.dumps({"msg_id": id_}), qos=1)
        value = await turn_on(asked["payload"])
        client.publish(f"nodes/{sender}/complete", json.dumps({"msg_id": id_, "value": value}), qos=1)
        return 0

    async def hear(_: Any, topic: str, payload: bytes, qos: int, properties: Any) -> int:
        if topic.endswith("/complete"):
            done.pop(json.loads(payload)["msg_id"]).set_result(None)
        return 0

    client.on_message = serve if role == "serve" else hear
    await client.connect(work.host, work.port, version=MQTTv311)
    for kind in ("pending",) if role == "serve" else ("ack", "complete", "failed"):
        client.subscribe(f"nodes/{name}/{kind}", qos=1)
    await asyncio.sleep(0.3)
    if role == "serve":
        await forever()

    async def one() -> None:
        id_, text = task(work)
        future = done[id_] = asyncio.get_running_loop().create_future()
        client.publish(f"nodes/{work.b}/pending", text, qos=1)
        await future

    await measure(work, one)


# ── paho ─────────────────────────────────────────────────────────────────────────────────────────


def paho(role: str, work: Work) -> None:
    from paho.mqtt.client import Client
    from paho.mqtt.enums import CallbackAPIVersion

    name = work.b if role == "serve" else work.a
    client = Client(CallbackAPIVersion.VERSION2, name, clean_session=False)
    client.max_inflight_messages_set(1000)
    if work.user:
        client.username_pw_set(work.login(name), work.password)
    counts: list[Count] = []
    began: dict[str, float] = {}
    over = threading.Event()

    def send() -> None:
        id_, text = task(work)
        began[id_] = time.perf_counter()
        client.publish(f"nodes/{work.b}/pending", text, qos=1)

    def hear(_: Any, __: Any, message: Any) -> None:
        if role == "serve":
            asked = json.loads(message.payload)
            sender, id_ = asked["sender"], asked["msg_id"]
            client.publish(f"nodes/{sender}/ack", json.dumps({"msg_id": id_}), qos=1)
            client.publish(
                f"nodes/{sender}/complete", json.dumps({"msg_id": id_, "value": {"on": True}}), qos=1
            )
        elif message.topic.endswith("/complete"):
            (count,) = counts
            count.add(began.pop(json.loads(message.payload)["msg_id"]))
            if count.over:
                over.set()
            else:
                send()

    client.on_message = hear
    client.on_socket_open = lambda *args: args[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.connect(work.host, work.port)
    client.subscribe(
        [(f"nodes/{name}/{k}", 1) for k in (("pending",) if role == "serve" else ("ack", "complete"))]
    )
    client.loop_start()
    time.sleep(0.3)
    if role == "serve":
        print("ready", flush=True)
        threading.Event().wait()
    counts.append(Count(work.seconds))
    for _ in range(work.depth):
        send()
    over.wait(work.seconds + 20)
    client.loop_stop()
    print(json.dumps(msgspec.to_builtins(counts[0].found())), flush=True)


# ── duly ─────────────────────────────────────────────────────────────────────────────────────────


async def duly(role: str, work: Work) -> None:
    import duly

    name = work.b if role == "serve" else work.a
    node = duly.Node(work.url(name), name=name, store=f"{work.folder}/{name}.db")
    if role == "serve":

        @node.task("work")
        async def work_(task: duly.Task) -> dict[str, bool]:
            return await turn_on(task.payload)

    async with node:
        if role == "serve":
            await forever()
        payload = {"note": NOTE}
        if work.drain:
            await drain(node, work.b, work.drain, payload)
        else:
            await measure(work, lambda: node.call(work.b, "work", payload))


async def drain(node: Any, to: str, count: int, payload: Any) -> None:
    """Send to one who is away, then see how fast he catches up."""
    tasks = []
    for _ in range(count // 500):
        tasks += await asyncio.gather(*(node.send(to, "work", payload, expires=3600) for _ in range(500)))
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
