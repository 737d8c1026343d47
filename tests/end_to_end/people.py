"""People who chat over a plain WebSocket: nothing here imports duly's clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.end_to_end.raw import Json, Peer, dial
from tests.guard import GUARD


class Person(Peer):
    """A peer that chats: it acknowledges what it is told, unless told not to."""

    welcome: Json
    acking = True

    async def ask(self, type: str, to: str | None = None, **data: Any) -> Json:
        """Send something that has an answer; the `server_ack`."""
        seq_id = data.pop("seq_id", None) or self.ids()
        fields: Json = {"seq_id": seq_id} | ({} if to is None else {"to": to})
        for name in ("exp",):
            if name in data:
                fields[name] = data.pop(name)
        await self.say(type, **fields, data=data)
        return await self.first(lambda f: f["type"] == "server_ack" and f.get("seq_id") == seq_id)

    async def chat(self, to: str, text: str, **more: Any) -> Json:
        return await self.ask("group_chat" if to.startswith("#") else "one_chat", to, text=text, **more)

    async def line(self, patience: float = GUARD) -> Json:
        """The next line of any conversation."""
        frame = await self.first(lambda f: "n" in f and f["type"] not in ("server_ack", "receipt"), patience)
        if self.acking:
            await self.say("ack", conv=frame["conv"], n=frame["n"])
        return frame

    async def lines(self, count: int) -> list[Json]:
        return [await self.line() for _ in range(count)]

    async def texts(self, count: int) -> list[str]:
        return [line["data"]["text"] for line in await self.lines(count)]

    async def no_line(self, seconds: float = 0.15) -> bool:
        try:
            await self.line(seconds)
        except TimeoutError:
            return True
        return False

    async def receipt(self, state: str) -> Json:
        return await self.first(lambda f: f["type"] == "receipt" and f["data"]["state"] == state)

    async def history(self, conv: str, **more: Any) -> Json:
        answer = await self.ask("history", conv=conv, **more)
        assert answer["code"] == 0, answer
        page: Json = answer["data"]
        return page


@asynccontextmanager
async def enter(url: str, token: str, cursors: dict[str, int] | None = None) -> AsyncIterator[Person]:
    async with dial(url) as peer:
        person = Person(peer.socket)
        await person.say("auth", token=token, **({} if cursors is None else {"cursors": cursors}))
        person.welcome = await person.hear()
        assert person.welcome["type"] == "welcome", person.welcome
        yield person
