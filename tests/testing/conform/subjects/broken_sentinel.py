"""Sentinels that break a rule, over a plain WebSocket or by requests.

`sound` breaks none; `anonymous` names no profile; `silent` sends nothing again; `forgetful` drops its queue
at a cut; `minting` gives each try a new id; `resigned` takes code 4 for the end; `deaf` sends again what was
acknowledged; `absent` drops what happens when the hub goes away; `hasty` sends the newest first; `volatile`
keeps its queue in memory; `noisy` reports each repeat, and limits as it should; `unlimited` reports as much
as there is, and debounces as it should; `literate` ends at what is no frame.

Over HTTP there are two more: `gullible` takes every 2xx for an acknowledgement, whatever it says, and
`patient` has no time-out for its requests.
"""

import asyncio
import time
from itertools import count
from typing import Any

import aiohttp

PACE = 0.05
Json = dict[str, Any]


class BrokenSentinel:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.queue: list[Json] = []
        self.acknowledged: list[Json] = []
        self.cut = False
        self.tries = count()
        self.run = f"run{time.time_ns()}" if mode == "volatile" else "run"

    async def watch(self) -> None:
        for n in count():
            if self.cut and self.mode == "absent":
                self.cut = False
            else:
                data = {
                    "profile_id": "home",
                    "trigger_reason": "conform",
                    "device_address": f"{self.run}-{n}",
                }
                if self.mode == "anonymous":
                    del data["profile_id"]
                event = {"type": "alert_event", "seq_id": f"{self.run}-event-{n}", "data": data}
                self.queue.insert(0 if self.mode == "hasty" else len(self.queue), event)
            await asyncio.sleep(PACE)

    async def signal(self) -> None:
        """What must be held back: the same again and again, and too much of one device."""
        if self.mode not in ("noisy", "unlimited"):
            return
        for n in count():
            if n == 0 or self.mode == "noisy":
                self.report("same", "repeated", n)
            if n < 10 or self.mode == "unlimited":
                self.report("busy", f"busy-{n}", n)
            await asyncio.sleep(PACE)

    def report(self, device: str, reason: str, n: int) -> None:
        now = time.time_ns() // 1_000_000
        data = {"profile_id": "home", "trigger_reason": reason, "timestamp": now}
        data["device_address"] = f"{self.run}-{device}"
        self.queue.append({"type": "alert_event", "seq_id": f"{device}-{n}", "data": data})

    def hear(self, frame: Json) -> None:
        if frame["type"] != "server_ack" or "seq_id" not in frame:
            return
        ended = (0, 4, 5) if self.mode == "resigned" else (0, 5)
        for event in [
            one for one in self.queue if one["seq_id"] == frame["seq_id"] and frame["code"] in ended
        ]:
            self.queue.remove(event)
            self.acknowledged.append(event)

    async def send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        sent: dict[str, int] = {}
        if self.mode == "deaf":
            for event in self.acknowledged:
                await socket.send_json(event)
        while True:
            for event in list(self.queue) if self.mode != "hasty" or len(self.queue) > 2 else ():
                tries = sent.get(event["seq_id"], 0)
                if self.mode == "silent" and (tries or event.get("sent")):
                    continue
                if tries % 10 == 0:
                    seq_id = (
                        f"{event['seq_id']}-{next(self.tries)}" if self.mode == "minting" else event["seq_id"]
                    )
                    await socket.send_json({"type": event["type"], "data": event["data"], "seq_id": seq_id})
                    event["sent"] = True
                sent[event["seq_id"]] = tries + 1
            await asyncio.sleep(PACE)


async def main(mode: str, url: str) -> None:
    sentinel = BrokenSentinel(mode)
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        tasks.create_task(sentinel.watch())
        tasks.create_task(sentinel.signal())
        while True:
            try:
                async with http.ws_connect(f"{url}/v1/ws") as socket:
                    await socket.send_json({"type": "auth", "token": "conform"})
                    await asyncio.gather(listen(sentinel, socket), sentinel.send(socket))
            except (aiohttp.ClientError, ConnectionError):
                sentinel.cut = True
                if mode == "forgetful":
                    sentinel.queue.clear()
            await asyncio.sleep(0.02)


async def listen(sentinel: BrokenSentinel, socket: aiohttp.ClientWebSocketResponse) -> None:
    async for message in socket:
        try:
            frame = message.json()
            known = isinstance(frame, dict) and isinstance(frame["type"], str)
        except (ValueError, KeyError):
            known = False
        if known:
            sentinel.hear(frame)
        elif sentinel.mode == "literate":
            raise ValueError(message.data)
    raise ConnectionError


async def main_http(mode: str, url: str) -> None:
    sentinel = BrokenSentinel(mode)
    limit = aiohttp.ClientTimeout(total=None if mode == "patient" else 2 * PACE)
    headers = {"Authorization": "Bearer conform"}
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as http, asyncio.TaskGroup() as tasks:
        tasks.create_task(sentinel.watch())
        while True:
            for event in sentinel.queue[:]:
                if mode == "silent" and event.get("sent"):
                    continue
                await post(sentinel, http, url, event)
                break
            if mode == "deaf" and sentinel.acknowledged:
                await post(sentinel, http, url, sentinel.acknowledged[0])
            await asyncio.sleep(PACE / 2)


async def post(sentinel: BrokenSentinel, http: aiohttp.ClientSession, url: str, event: Json) -> None:
    seq_id = event["seq_id"]
    if sentinel.mode == "minting":
        seq_id += f"-{next(sentinel.tries)}"
    frame = {"type": event["type"], "data": event["data"], "seq_id": seq_id}
    event["sent"] = True
    try:
        async with http.post(f"{url}/v1/messages", json=frame) as response:
            if sentinel.mode == "gullible" and response.ok:
                sentinel.hear({"type": "server_ack", "seq_id": event["seq_id"], "code": 0})
            elif response.content_type == "application/json":
                sentinel.hear(await response.json())
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        sentinel.cut = True
