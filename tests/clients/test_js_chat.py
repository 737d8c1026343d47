"""`Chat` of `duly.js` in a real browser, against a real hub and `duly.Chat`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from duly.apps.chat.subscriptions import Subscriptions
from duly.clients.chat import Chat, Line
from duly.identity.accounts import Role
from tests.browsers import browser
from tests.clients.test_js import Tab, first_page, kept, site, tab
from tests.guard import GUARD
from tests.local_hub import LocalHub

__all__ = ["browser", "first_page", "kept", "site", "tab"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENTER = """(() => {
  globalThis.chat = new Chat(hub, %s);
  globalThis.lines = [];
  globalThis.others = [];
  chat.on("line", (line) => lines.push(line));
  for (const event of ["receipt", "typing", "presence"]) chat.on(event, (what) => others.push([event, what]));
  return seen(chat.ready);
})()"""


@pytest_asyncio.fixture(loop_scope="module")
async def local(tmp_path: Path, site: str) -> AsyncIterator[LocalHub]:
    it = LocalHub(tmp_path / "hub", origins=[site])
    await it.start()
    await it.add(Role.USER, "ann", "bob", "cid")
    yield it
    await it.stop()


async def enter(tab: Tab, token: str) -> None:
    await tab.do(ENTER % json.dumps(token))


async def take(person: Chat, count: int) -> list[Line]:
    lines: list[Line] = []
    async with asyncio.timeout(GUARD):
        async for line in person.lines():
            lines.append(line)
            if len(lines) == count:
                person._at.read(line.conv, line.n)
                break
    return lines


async def test_a_page_and_a_program_talk(tab: Tab, local: LocalHub) -> None:
    await enter(tab, local.tokens["ann"])
    async with Chat(local.url, local.tokens["bob"]) as bob:
        sent = await tab.do('chat.send("bob", "hello")')
        assert (sent["conv"], sent["n"]) == ("ann+bob", 1)
        (line,) = await take(bob, 1)
        assert (line.sender, line.text) == ("ann", "hello")
        await tab.until(
            'others.some(([e, { n, state }]) => e === "receipt" && n === 1 && state === "delivered")'
        )
        await bob.send("ann", "hi")
        await tab.until("lines.length === 1")
        (heard,) = await tab.do("lines")
        assert (heard["sender"], heard["data"], heard["n"]) == ("bob", {"text": "hi"}, 2)
        bob.typing("ann+bob")
        await tab.until('others.some(([e, { sender }]) => e === "typing" && sender === "bob")')
        receipts = await tab.do('chat.receipts("ann+bob", 1)')
        assert (receipts["state"], receipts["delivered"]) == ("delivered", 1)


async def test_who_answers_before_the_first_line_is_told_is_told_it(
    tab: Tab, local: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `duly.Chat`: a hub may learn later of a conversation that was begun meanwhile."""
    learns, load_new = asyncio.Event(), Subscriptions.load_new

    async def load_late(self: Subscriptions, name: str) -> None:
        await learns.wait()
        await load_new(self, name)

    monkeypatch.setattr(Subscriptions, "load_new", load_late)
    monkeypatch.setattr(Subscriptions, "join", lambda self, name, conv, told=0: self.refresh_person(name))
    await enter(tab, local.tokens["ann"])
    async with Chat(local.url, local.tokens["bob"]) as bob:
        await bob.send("ann", "first")
        assert (await tab.do('chat.send("bob", "second")'))["n"] == 2
        learns.set()
        await tab.until("lines.length > 0")
        assert (await tab.do("lines"))[0]["data"] == {"text": "first"}


async def test_what_is_said_while_the_hub_is_away_arrives_once_and_in_order(
    tab: Tab, local: LocalHub
) -> None:
    await enter(tab, local.tokens["ann"])
    async with Chat(local.url, local.tokens["bob"]) as bob:
        await tab.do('chat.send("bob", "0")')
        await local.stop()
        await tab.until("!chat.connected")
        said = asyncio.create_task(
            tab.do('Promise.all(["1", "2", "3", "4"].map((text) => chat.send("bob", text)))')
        )
        await local.start()
        assert [line.text for line in await take(bob, 5)] == ["0", "1", "2", "3", "4"]
        assert [one["n"] for one in await said] == [2, 3, 4, 5]


async def test_a_reload_loses_nothing_and_repeats_nothing(tab: Tab, local: LocalHub) -> None:
    await enter(tab, local.tokens["ann"])
    async with Chat(local.url, local.tokens["bob"]) as bob:
        await bob.send("ann", "first")
        await tab.until("lines.length === 1")
        await local.stop()
        await tab.until("!chat.connected")
        await tab.do(
            '(chat.send("bob", "kept").catch(() => {}), new Promise((done) => setTimeout(done, 100)))'
        )
        await tab.page.goto("about:blank")
        await local.start()
        await tab.load()
        await enter(tab, local.tokens["ann"])
        assert [line.text for line in await take(bob, 1)] == ["kept"]
        await bob.send("ann", "second")
        await tab.until("lines.length === 1")
        assert [line["data"]["text"] for line in await tab.do("lines")] == ["second"]


async def test_groups_history_refusals_and_logging_in(tab: Tab, local: LocalHub) -> None:
    who = json.dumps([local.url, "zoe", "correct horse"])
    await tab.do(f"Chat.register(...{who})")
    wrong = await tab.do(f'seen(Chat.logIn({json.dumps(local.url)}, "zoe", "wrong horse"))')
    assert (wrong["name"], wrong["code"]) == ("Refused", 401)
    await enter(tab, await tab.do(f"Chat.logIn(...{who})"))
    assert await tab.do("chat.name") == "zoe"
    group = await tab.do('chat.createGroup("club", ["bob"])')
    async with Chat(local.url, local.tokens["bob"]) as bob:
        await tab.do(f"chat.send({json.dumps(group)}, 'teh end')")
        await tab.do(f"chat.edit({json.dumps(group)}, 2, 'the end')")
        await take(bob, 3)
        page = await tab.do(f"chat.history({json.dumps(group)})")
        assert [(line["type"], line["edited"]) for line in page] == [
            ("group_create", False), ("group_chat", True), ("edit", False),
        ]  # fmt: skip
        assert page[1]["data"] == {"text": "the end"}
    refused = await tab.do('seen(chat.send("nobody", "hello?"))')
    assert (refused["name"], refused["code"], refused["error"]) == ("Refused", 3, "not_allowed")


async def test_a_page_that_was_logged_out_is_told(tab: Tab, local: LocalHub) -> None:
    token = await local.hub.people.let_in("cid", "page")
    await enter(tab, token)
    await tab.do("void chat.on('denied', ({ code }) => { globalThis.denied = code; })")
    async with Chat(local.url, token) as remote:
        await remote.log_out(everywhere=True)
    await tab.until("globalThis.denied === 3")
