"""Apps that break a rule, over a plain WebSocket.

`sound` breaks none. `silent` sends nothing again; `restless` mints a new id for each try; `hasty` takes
`server_ack` for the end; `literal` takes code 5 for a refusal; `strict` takes no `ack` before `server_ack`;
`gullible` takes every `ack` for its own; `fickle` lets a later answer change the end; `stubborn` sends again
what was refused; `resigned` takes code 4 for the end; `hopeful` takes unknown for done; `backward` counts
down; `fragile` ends at what it does not know; `reborn` begins its ids anew at each start; `pressing` sends a
command again all the time; `eager` takes an `ack` of a device at work for the end; `literate` ends at what is
no frame; `confident` sends nothing again that the hub has stored, also after a cut.
"""

import asyncio
import time
from typing import Any

import aiohttp

RESEND = 0.1
RESENDS = 3
Json = dict[str, Any]


class BrokenApp:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.n = 1_000 if mode == "backward" else -1
        self.frame: Json = {}
        self.taken = False
        self.tries = 0
        self.ended: Json | None = None
        self.over = asyncio.Event()

    def mint(self) -> str:
        self.n += -1 if self.mode == "backward" else 1
        ms = 1_700_000_000_000 if self.mode == "reborn" else time.time_ns() // 1_000_000
        return f"{ms}_{self.n}"

    def begin(self) -> None:
        self.taken = False
        data = {"ended": self.ended}
        self.frame = {"type": "conform", "seq_id": self.mint(), "to": "lock", "data": data}
        self.over.clear()

    def end(self, state: str, code: int) -> None:
        if not self.over.is_set() or self.mode == "fickle":
            self.ended = {"id": self.frame["seq_id"], "state": state, "code": code}
            self.over.set()

    def hear(self, frame: Json) -> None:
        own = frame.get("seq_id") == self.frame.get("seq_id")
        match frame["type"]:
            case "server_ack" if own:
                self.accepted(frame["code"])
            case "ack" if own or self.mode == "gullible":
                if frame.get("state") == "delivered" and self.mode != "eager":
                    pass
                elif self.taken or self.mode != "strict":
                    state = "done" if self.mode == "hopeful" else frame["state"]
                    self.end(state, frame.get("code", 0))
            case "welcome" | "server_ack" | "ack":
                pass
            case _ if self.mode == "fragile":
                raise ValueError(frame)

    def accepted(self, code: int) -> None:
        self.taken = True
        if code in (0, 5) and self.mode == "hasty":
            self.end("done", 0)
        elif (
            code in (1, 2, 3)
            or (code == 4 and self.mode == "resigned")
            or (code == 5 and self.mode == "literal")
        ):
            self.end("refused", code)
            if self.mode == "stubborn":
                self.over.clear()
                self.taken = False
        elif code == 4:
            self.taken, self.tries = False, 0


async def main(mode: str, url: str) -> None:
    app = BrokenApp(mode)
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.ws_connect(f"{url}/v1/ws") as socket:
                    await socket.send_json({"type": "auth", "token": "conform"})
                    await asyncio.gather(listen(app, socket), press(app, socket))
            except (aiohttp.ClientError, ConnectionError):
                pass
            await asyncio.sleep(0.02)


async def listen(app: BrokenApp, socket: aiohttp.ClientWebSocketResponse) -> None:
    async for message in socket:
        try:
            frame = message.json()
            known = isinstance(frame, dict) and isinstance(frame["type"], str)
        except (ValueError, KeyError):
            known = False
        if known:
            app.hear(frame)
        elif app.mode == "literate":
            raise ValueError(message.data)
    raise ConnectionError


async def press(app: BrokenApp, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Send commands one after another, each until it has ended."""
    again = bool(app.frame) and not app.over.is_set()
    while True:
        if not again:
            app.begin()
        app.tries = 0
        if not again or not (app.mode == "silent" or (app.mode == "confident" and app.taken)):
            await socket.send_json(app.frame)
        again = False
        while not app.over.is_set():
            try:
                async with asyncio.timeout(RESEND / 20 if app.mode == "pressing" else RESEND):
                    await app.over.wait()
            except TimeoutError:
                if app.taken or app.mode == "silent":
                    continue
                app.tries += 1
                if app.tries > RESENDS and app.mode != "pressing":
                    continue
                if app.mode == "restless":
                    app.frame["seq_id"] = app.mint()
                await socket.send_json(app.frame)
        if app.mode == "fickle":
            await asyncio.sleep(0.1)
