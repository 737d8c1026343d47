"""A client that does not run says so, whatever is asked of it; readers of its news do not wait for ever."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from duly.clients.app import App
from duly.clients.base import Client
from duly.clients.chat import Chat
from duly.clients.device import Device
from duly.clients.sentinel import Sentinel
from duly.errors import Stopped
from duly.identity.accounts import Role
from tests.guard import GUARD
from tests.local_hub import LocalHub

Ask = Callable[[Any], object]

ASKED: Mapping[type[Client], Mapping[str, Ask]] = {
    App: {
        "send": lambda app: app.send("lock", "query"),
        "post": lambda app: app.post("lock", "query"),
        "download": lambda app: app.download("lock", "log", "log"),
    },
    Device: {"push": lambda device: device.push("event_report", 1)},
    Chat: {
        "send": lambda chat: chat.send("bob", "hi"),
        "edit": lambda chat: chat.edit("ann+bob", 1, "ho"),
        "delete": lambda chat: chat.delete("ann+bob", 1),
        "create_group": lambda chat: chat.create_group("us", "bob"),
        "invite": lambda chat: chat.invite("#us", "bob"),
        "join": lambda chat: chat.join("#us"),
        "leave": lambda chat: chat.leave("#us"),
        "remove": lambda chat: chat.remove("#us", "bob"),
        "set_role": lambda chat: chat.set_role("#us", "bob", "admin"),
        "ask_friend": lambda chat: chat.ask_friend("bob"),
        "accept_friend": lambda chat: chat.accept_friend("bob"),
        "remove_friend": lambda chat: chat.remove_friend("bob"),
        "block": lambda chat: chat.block("bob"),
        "unblock": lambda chat: chat.unblock("bob"),
        "read": lambda chat: chat.read("ann+bob", 1),
        "typing": lambda chat: chat.typing("ann+bob"),
        "history": lambda chat: chat.history("ann+bob"),
        "receipts": lambda chat: chat.receipts("ann+bob", 1),
        "conversations": lambda chat: chat.conversations(),
        "group": lambda chat: chat.group("#us"),
        "friends": lambda chat: chat.friends(),
    },
    Sentinel: {
        "disconnect": lambda sentinel: sentinel.disconnect("watch"),
        "reconnect": lambda sentinel: sentinel.reconnect("watch"),
        "trigger": lambda sentinel: sentinel.trigger("fall", "watch"),
        "cancel": lambda sentinel: sentinel.cancel("watch"),
        "update": lambda sentinel: sentinel.update("event", meta=1),
        "stand_down": lambda sentinel: sentinel.stand_down(),
        "drained": lambda sentinel: sentinel.drained(),
        "waiting": lambda sentinel: sentinel.waiting,
    },
}
"""What can be asked of each client only while it runs."""
ALWAYS = {
    Client: {"start", "ready", "stop", "run", "connected", "works_offline"},
    App: {"pushes"},
    Device: {"on", "serve"},
    Chat: {"register", "log_in", "log_out", "denied", "lines", "news"},
    Sentinel: {"news"},
}
"""What can be asked of each client at any time."""
ROLES = {App: Role.APP, Device: Role.DEVICE, Chat: Role.USER, Sentinel: Role.SENTINEL}


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalHub]:
    hub = LocalHub(tmp_path)
    await hub.start()
    yield hub
    await hub.stop()


def made(kind: type[Client], url: str = "http://127.0.0.1:9", token: str = "token") -> Any:
    return kind(url, token)  # type: ignore[call-arg]  # the base class takes more


async def ask(client: Client, question: Ask) -> None:
    async with asyncio.timeout(GUARD):
        said = question(client)
        if isinstance(said, Awaitable):
            await said


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_every_public_method_is_listed_here(kind: type[Client]) -> None:
    public = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    assert public == set(ASKED[kind]) | ALWAYS[Client] | ALWAYS[kind]


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
async def test_a_client_that_has_not_started_says_so(kind: type[Client]) -> None:
    for name, question in ASKED[kind].items():
        with pytest.raises(Stopped, match=f"this {kind.__name__} is not running; use 'async with'"):
            await ask(made(kind), question)
        assert name in dir(kind)
    if kind is Chat:
        assert made(kind).denied == ""


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
async def test_a_client_that_has_stopped_says_so(kind: type[Client], local: LocalHub) -> None:
    await local.add(ROLES[kind], "me")
    client = made(kind, local.url, local.tokens["me"])
    async with asyncio.timeout(GUARD):
        await client.start()
        await client.ready()
        await client.stop()
    for question in ASKED[kind].values():
        with pytest.raises(Stopped, match=f"this {kind.__name__} is not running; use 'async with'"):
            await ask(client, question)


@pytest.mark.parametrize("kind", [App, Chat])
async def test_a_client_that_has_not_reached_its_hub_says_so(kind: type[Client]) -> None:
    client = made(kind)
    await client.start()
    try:
        with pytest.raises(Stopped, match=f"this {kind.__name__} has not reached its hub yet; call ready"):
            await ask(client, ASKED[kind]["send"])
    finally:
        await client.stop()


@pytest.mark.parametrize(
    ("kind", "news"), [(App, "pushes"), (Chat, "news"), (Chat, "lines"), (Sentinel, "news")]
)
async def test_a_reader_of_news_ends_with_its_client(kind: type[Client], news: str, local: LocalHub) -> None:
    await local.add(ROLES[kind], "me")
    client = made(kind, local.url, local.tokens["me"])

    async def read() -> None:
        async for _ in getattr(client, news)():
            pass

    async with asyncio.timeout(GUARD):
        for _ in range(2):  # also after another start
            await client.start()
            await client.ready()
            reading = asyncio.create_task(read())
            await asyncio.sleep(0)
            assert not reading.done()
            await client.stop()
            await reading
