"""Sentinels that break a rule, over a plain WebSocket.

`sound` breaks none; `anonymous` names no profile; `silent` sends nothing again; `forgetful` drops its queue
at a cut; `minting` gives each try a new id; `resigned` takes code 4 for the end; `deaf` sends again what was
acknowledged; `absent` drops what happens when the hub goes away; `hasty` sends the newest first.
"""

import asyncio
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

    async def watch(self) -> None:
        for n in count():
            if self.cut and self.mode == "absent":
                self.cut = False
            else:
                data = {"profile_id": "home", "trigger_reason": "conform", "device_address": f"run-{n}"}
                if self.mode == "anonymous":
                    del data["profile_id"]
                event = {"type": "alert_event", "seq_id": f"event-{n}", "data": data}
                self.queue.insert(0 if self.mode == "hasty" else len(self.queue), event)
            await asyncio.sleep(PACE)

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
        sentinel.hear(message.json())
    raise ConnectionError
