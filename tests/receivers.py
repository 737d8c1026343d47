"""Those who are told: a webhook receiver and a mail server on loopback, as bad as a test wants them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email import message_from_bytes
from email.message import Message
from typing import Any

from aiohttp import web
from aiosmtpd.smtp import SMTP

from tests.guard import GUARD


class Receiver:
    """Does to each request what the next word says: a status, `hang`, `close`, `hang after`, `close after`
    (it was taken, and the answer never came), `429 SECONDS`. When no words are left, 200. `taken` is what
    it accepted."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.taken: dict[str, list[dict[str, Any]]] = {}
        self.news = asyncio.Event()
        self.released = asyncio.Event()
        """lets go who hangs"""
        self.url = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((dict(request.headers), body))
        self.news.set()
        word = self.words.pop(0) if self.words else "200"
        if word in ("200", "close after", "hang after"):
            self.taken.setdefault(request.headers["webhook-id"], []).append(json.loads(body))
        if word.startswith("hang"):
            await self.released.wait()
        if word.startswith("close"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if word.startswith("429 "):
            return web.Response(status=429, headers={"Retry-After": word.split()[1]})
        return web.Response(status=int(word) if word.isdecimal() else 200)

    @property
    def events(self) -> list[str]:
        """The ids of the events it was told of, each delivery once, as a receiver that keeps ids would."""
        told: dict[str, str] = {}
        for bodies in self.taken.values():
            data = bodies[0]["data"]
            for one in data.get("events", [data]):
                told[one["delivery"]] = one["event"]
        return sorted(told.values())

    async def got(self, count: int, patience: float = GUARD) -> None:
        """Until so many requests have come."""
        async with asyncio.timeout(patience):
            while len(self.requests) < count:
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    it = Receiver()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{tail:.*}", it.serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    it.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield it
    finally:
        await runner.cleanup()


class Mailbox:
    """A mail server: `450` or `550` at the end of a mail, `550 rcpt`, `close`, `hang`, and both with `after`;
    then it takes what comes."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.mails: list[Message] = []
        self.attempts = 0
        self.port = 0
        self.released = asyncio.Event()

    async def handle_RCPT(self, server: SMTP, session: Any, envelope: Any, address: str, _: Any) -> str:
        if self.words[:1] == ["550 rcpt"]:
            self.words.pop(0)
            self.attempts += 1
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Any) -> str:
        self.attempts += 1
        word = self.words.pop(0) if self.words else "250"
        if word in ("250", "close after", "hang after"):
            self.mails.append(message_from_bytes(envelope.content))
        if word.startswith("hang"):
            await self.released.wait()
        if word.startswith("close"):
            assert isinstance(server.transport, asyncio.WriteTransport)
            server.transport.abort()
        return "250 OK" if word == "250" else f"{word[:3]} not now" if word[:3].isdecimal() else "250 OK"


@asynccontextmanager
async def mail_server() -> AsyncIterator[Mailbox]:
    box = Mailbox()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(box, loop=loop), "127.0.0.1", 0)
    box.port = server.sockets[0].getsockname()[1]
    try:
        yield box
    finally:
        server.close()
