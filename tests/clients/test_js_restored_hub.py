"""`App` and `Chat` of `duly.js`, whose hub comes back from an older backup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from duly.clients.chat import Chat
from duly.clients.device import Command, Device
from duly.identity.accounts import Role
from duly.transports.websocket import WebSocketSession
from duly.wire.outgoing import AckFrame, OutgoingFrame, ServerAck
from tests.browsers import browser
from tests.clients.test_js import Tab, first_page, kept, site, tab
from tests.clients.test_js_chat import enter
from tests.restorable_hub import RestorableHub

__all__ = ["browser", "first_page", "kept", "site", "tab"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path, site: str) -> AsyncIterator[RestorableHub]:
    it = RestorableHub(tmp_path / "hub", origins=[site])
    await it.start()
    await it.add(Role.APP, "phone")
    await it.add(Role.DEVICE, "lock")
    await it.add(Role.USER, "ann", "bob")
    await it.hub.accounts.grant("phone", "lock")
    yield it
    await it.stop()


@pytest.mark.parametrize("reload", [False, True])
async def test_a_page_gets_the_pushes_that_have_the_numbers_of_lost_ones(
    tab: Tab, local: RestorableHub, reload: bool
) -> None:
    await tab.open()
    async with Device(local.url, local.tokens["lock"]) as lock:
        await lock.push("count", 1)
        backup = await local.back_up()
        for n in (2, 3, 4):
            await lock.push("count", n)
        await tab.until("told.some(([event, what]) => what.data === 4)")

    async def push_many() -> None:
        async with Device(local.url, local.tokens["lock"]) as lock:
            for n in range(5, 12):
                await lock.push("count", n)

    if reload:
        await tab.page.goto("about:blank")
    await local.come_back(backup, push_many)
    if reload:
        await tab.load()
        await tab.open()
    await tab.until("told.some(([event, what]) => what.data === 11)")
    seen = [push["data"] for push in await tab.told("push")]
    assert seen == ([] if reload else [1, 2, 3, 4]) + list(range(5, 12))
    assert len(await tab.told("gap")) == 1


@pytest.mark.parametrize("reload", [False, True])
async def test_a_page_gets_the_lines_that_have_the_numbers_of_lost_ones(
    tab: Tab, local: RestorableHub, reload: bool
) -> None:
    await enter(tab, local.tokens["ann"])
    async with Chat(local.url, local.tokens["bob"]) as bob:
        await bob.send("ann", "1")
        backup = await local.back_up()
        for n in (2, 3, 4):
            await bob.send("ann", str(n))
        await tab.until("lines.some(({ data }) => data.text === '4')")

    async def say() -> None:
        async with Chat(local.url, local.tokens["bob"]) as bob:
            for n in range(5, 10):
                await bob.send("ann", str(n))

    if reload:
        await tab.page.goto("about:blank")
    await local.come_back(backup, say)
    if reload:
        await tab.load()
        await enter(tab, local.tokens["ann"])
    await tab.until("lines.some(({ data }) => data.text === '9')")
    seen = [line["data"]["text"] for line in await tab.do("lines")]
    assert seen == ([] if reload else ["1", "2", "3", "4"]) + ["5", "6", "7", "8", "9"]


async def test_a_command_that_the_lost_ledger_may_have_taken_is_not_refused_for_the_page(
    tab: Tab, local: RestorableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = asyncio.Event()
    await tab.open()
    async with Device(local.url, local.tokens["lock"]) as lock:

        @lock.on("open")
        async def open_(command: Command) -> None:
            ran.set()

        backup = await local.back_up()
        with monkeypatch.context() as mute:
            mute.setattr(WebSocketSession, "push", _unless_to_the_app(WebSocketSession.push))
            await tab.do("void (globalThis.ack = seen(app.send('lock', 'open')))")
            await ran.wait()
            await local.stop()
    await local.come_back(backup)
    assert (await tab.do("ack"))["state"] == "unknown"


def _unless_to_the_app(push: Callable[[WebSocketSession, OutgoingFrame], None]) -> Any:
    """What the hub says of commands to their sender is lost."""

    def lossy(session: WebSocketSession, frame: OutgoingFrame) -> None:
        if not isinstance(frame, (AckFrame, ServerAck)):
            push(session, frame)

    return lossy
