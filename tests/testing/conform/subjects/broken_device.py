"""Devices that break a rule, over a plain WebSocket: MODE URL TOKEN STORE.

`naive` remembers nothing; `hasty` answers before it stores; `forgetful` keeps the last 100 ids and nothing of
those before; `deaf` answers no repeat; `anonymous` takes the id for the key, of any sender; `careless` runs
what has expired; `disorderly` runs commands as they come; `amnesic` forgets at a cut; `mumbling` does not say
for whom its answers are; `polite` calls what it does not know done; `fragile` ends at what it cannot read;
`pingless` answers no pings; `pushy` sends a push once; `lonely` does not come back; `volatile` stores
nothing; `slow` works before it stores; `careful` notes what it begins, and breaks no rule of restarts.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp


def replace(file: Path, text: str) -> None:
    """A kill leaves the old file or the new one."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


class BrokenDevice:
    def __init__(self, mode: str, store: str) -> None:
        self.mode = mode
        self.memory = Path(store, "memory.json")
        self.number = Path(store, "count")
        text = self.memory.read_text() if self.memory.exists() else "{}"
        self.known: dict[str, dict[str, Any]] = json.loads(text)

    def count(self) -> int:
        n = int(self.number.read_text()) + 1 if self.number.exists() else 1
        replace(self.number, str(n))
        return n

    def save(self) -> None:
        if self.mode == "volatile":
            return
        if self.mode == "forgetful":
            self.known = dict(list(self.known.items())[-100:])
        replace(self.memory, json.dumps(self.known))

    async def take(self, frame: dict[str, Any], socket: aiohttp.ClientWebSocketResponse) -> None:
        key = frame["seq_id"] if self.mode == "anonymous" else f"{frame['from']} {frame['seq_id']}"
        ack = {"type": "ack", "seq_id": frame["seq_id"], "to": frame["from"]}
        if self.mode == "mumbling":
            del ack["to"]
        if key in self.known and self.mode != "naive":
            if self.mode != "deaf" and "code" in self.known[key]:
                await socket.send_json(self.known[key] | ack)
            return
        if frame["type"] != "count":
            await socket.send_json(ack | {"code": 0 if self.mode == "polite" else 7})
            return
        if frame.get("exp", 0) < time.time() * 1000 and self.mode != "careless":
            await socket.send_json(ack | {"code": 4, "state": "expired"})
            return
        if self.mode == "careful":
            self.known[key] = {}
            self.save()
        n = self.count()
        if self.mode in ("slow", "careful"):
            await asyncio.sleep(0.1)
        self.known[key] = {"code": 0, "data": {"count": n}}
        if self.mode == "hasty":
            await socket.send_json(self.known[key] | ack)
            await asyncio.sleep(0.2)
            self.save()
            return
        self.save()
        await socket.send_json(self.known[key] | ack)
        if self.mode == "pushy" and frame["data"].get("push"):
            await socket.send_json({"type": "event_report", "seq_id": "1_0", "data": {}})


async def main(mode: str, url: str, token: str, store: str) -> None:
    device = BrokenDevice(mode, store)
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.ws_connect(f"{url}/v1/ws", autoping=mode != "pingless") as socket:
                    await socket.send_json({"type": "auth", "token": token})
                    async for message in socket:
                        try:
                            frame = json.loads(message.data)
                            if isinstance(frame["seq_id"], str) and "from" in frame:
                                await device.take(frame, socket)
                        except (ValueError, KeyError, TypeError):
                            if mode == "fragile" and "welcome" not in message.data:
                                return
            except aiohttp.ClientError:
                pass
            if mode == "lonely":
                return
            if mode == "amnesic":
                device.known.clear()
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
