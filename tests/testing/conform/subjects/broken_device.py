"""Devices that break a rule, over a plain WebSocket: MODE URL TOKEN STORE.

`naive` remembers nothing; `hasty` answers before it stores; `forgetful` keeps the last 100 ids and nothing of
those before; `deaf` answers no repeat; `anonymous` takes the id for the key, of any sender; `careless` runs
what has expired; `disorderly` runs commands as they come; `amnesic` forgets at a cut; `mumbling` does not say
for whom its answers are; `polite` calls what it does not know done; `fragile` ends at what it cannot read;
`pingless` answers no pings; `pushy` sends a push once; `lonely` does not come back; `volatile` stores
nothing; `slow` works before it stores; `careful` notes what it begins, and breaks no rule of restarts;
`formal` wants every command to have data; `strict` passes over commands with fields that it does not know;
`waiting` waits for ever for the
command before; `ordering` orders what is in no lane; `sulking` runs nothing more of a sender of whom it has
forgotten an id; `hoarding` keeps the last 200 ids and nothing of those before; `leisurely` takes its time for
every frame, and breaks no rule of pushes; `fading` keeps the last 100 ids in its file, and the marks of those
before in memory only; `possessive` passes over an id that another sender has used; `silent` passes over what
it does not know; `dazed` comes back after a cut, and hears nothing then; `textual` compares ids as texts;
`recent` takes the id that it forgot last for the newest; `trusting` runs what has an
`exp` that is no number, but nothing that was minted a day ago.
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


def moment(id_: str) -> list[int]:
    """What ids are compared by."""
    return [int(part) for part in id_.split("_")]


class BrokenDevice:
    def __init__(self, mode: str, store: str) -> None:
        self.mode = mode
        self.memory = Path(store, "memory.json")
        self.number = Path(store, "count")
        text = self.memory.read_text() if self.memory.exists() else "{}"
        self.known: dict[str, dict[str, Any]] = json.loads(text)
        self.lost: set[str] = set()
        """senders of whom an id was forgotten"""
        self.marks: dict[str, list[int]] = {}
        """of each sender the newest id that was forgotten"""
        self.newest: dict[str, int] = {}
        self.pushes: dict[str, dict[str, Any]] = {}
        self.owners: dict[str, str] = {}
        """who has used an id first"""
        self.connections = 0

    def count(self) -> int:
        n = int(self.number.read_text()) + 1 if self.number.exists() else 1
        replace(self.number, str(n))
        return n

    def save(self) -> None:
        if self.mode == "volatile":
            return
        few = dict.fromkeys(("forgetful", "sulking", "fading", "textual", "recent"), 100) | {"hoarding": 200}
        kept = few.get(self.mode, len(self.known))
        forgotten = list(self.known)[: max(0, len(self.known) - kept)]
        self.lost |= {key.split()[0] for key in forgotten}
        for sender, id_ in map(str.split, forgotten):
            newest = [] if self.mode == "recent" else self.marks.get(sender, [])
            self.marks[sender] = max(newest, moment(id_))
        self.known = {key: answer for key, answer in self.known.items() if key not in forgotten}
        replace(self.memory, json.dumps(self.known))

    async def take(self, frame: dict[str, Any], socket: aiohttp.ClientWebSocketResponse) -> None:
        key = frame["seq_id"] if self.mode == "anonymous" else f"{frame['from']} {frame['seq_id']}"
        ack = {"type": "ack", "seq_id": frame["seq_id"], "to": frame["from"]}
        if self.mode == "mumbling":
            del ack["to"]
        if self.passes_over(frame):
            return
        if key in self.known and self.mode != "naive":
            if self.mode != "deaf" and "code" in self.known[key]:
                await socket.send_json(self.known[key] | ack)
            return
        if frame["type"] != "count":
            await socket.send_json(ack | {"code": 0 if self.mode == "polite" else 7})
            return
        trusted = self.mode == "trusting" and isinstance(frame.get("exp"), str)
        if not trusted and frame.get("exp", 0) < time.time() * 1000 and self.mode != "careless":
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
        if self.mode == "pushy" and frame.get("data", {}).get("push"):
            await socket.send_json({"type": "event_report", "seq_id": "1_0", "data": {}})
        if self.mode == "leisurely" and frame.get("data", {}).get("push"):
            push = {"type": "event_report", "seq_id": f"1_{n}", "data": {}}
            self.pushes[f"1_{n}"] = push
            await socket.send_json(push)

    def passes_over(self, frame: dict[str, Any]) -> bool:
        """Whether a rule is broken by doing nothing."""
        order, sender, n = frame.get("order", {}), frame["from"], int(frame["seq_id"].split("_")[1])
        fields = {"type", "seq_id", "to", "from", "data", "exp", "order"}
        match self.mode:
            case "formal":
                return "data" not in frame
            case "strict":
                return not set(frame) <= fields
            case "possessive":
                return bool(self.owners.setdefault(frame["seq_id"], sender) != sender)
            case "silent":
                return bool(frame["type"] != "count")
            case "dazed":
                return self.connections > 1
            case "waiting" if order.get("key"):
                before, self.newest[sender] = self.newest.get(sender, -1), n
                return bool(order["after"] > before >= 0)
            case "ordering" if order.get("mode") == "any":
                before, self.newest[sender] = self.newest.get(sender, -1), n
                return n < before
            case "trusting":
                return moment(frame["seq_id"])[0] < (time.time() - 86_400) * 1000
            case "fading" | "recent" | "textual":
                known, mark = f"{sender} {frame['seq_id']}" in self.known, self.marks.get(sender, [])
                if self.mode == "textual":
                    return not known and frame["seq_id"] <= "_".join(map(str, mark))
                return not known and moment(frame["seq_id"]) <= mark
            case "sulking":
                known = f"{sender} {frame['seq_id']}" in self.known
                return not known and sender in self.lost - {"conform"}
        return False


async def main(mode: str, url: str, token: str, store: str) -> None:
    device = BrokenDevice(mode, store)
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.ws_connect(f"{url}/v1/ws", autoping=mode != "pingless") as socket:
                    await socket.send_json({"type": "auth", "token": token})
                    device.connections += 1
                    for push in device.pushes.values():
                        await socket.send_json(push)
                    async for message in socket:
                        if mode == "leisurely":
                            await asyncio.sleep(0.4)
                        try:
                            frame = json.loads(message.data)
                            if frame["type"] == "server_ack":
                                device.pushes.pop(frame["seq_id"], None)
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
