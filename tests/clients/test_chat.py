"""`duly.Chat` on a real hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

import duly
from duly.apps.chat.conversations import convs
from duly.apps.chat.queries import CONVERSATIONS_LIMIT
from duly.apps.chat.subscriptions import Subscriptions
from duly.clients.chat import Chat, Line, News, Presence, Receipt, Typing
from duly.clients.chat_positions import ChatPositions
from duly.clients.chat_types import ConversationList
from duly.core.operations import PutItem
from duly.core.outbox import Outbox
from duly.errors import NotAuthenticated, Stopped
from duly.identity.accounts import Role
from tests.guard import GUARD
from tests.local_hub import LocalHub
from tests.servers import free_port


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalHub]:
    local = LocalHub(tmp_path / "hub")
    await local.start()
    await local.add(Role.USER, "ann", "bob", "cid")
    yield local
    await local.stop()


def chat(local: LocalHub, name: str, store: str | None = None) -> Chat:
    return Chat(local.url, local.tokens[name], store=store)


async def take(person: Chat, count: int) -> list[Line]:
    """The next lines, all made use of."""
    lines: list[Line] = []
    async with asyncio.timeout(GUARD):
        async for line in person.lines():
            if len(lines) == count:
                raise AssertionError(f"one too many: {line}")
            lines.append(line)
            if len(lines) == count:
                person._at.read(line.conv, line.n)
                return lines
    return lines


async def test_two_people_talk(local: LocalHub) -> None:
    async with chat(local, "ann") as ann, chat(local, "bob") as bob:
        assert (ann.name, bob.name) == ("ann", "bob")
        sent = await ann.send("bob", "hello")
        assert (sent.conv, sent.n) == ("ann+bob", 1)
        (line,) = await take(bob, 1)
        assert (line.sender, line.text, line.n, line.type) == ("ann", "hello", 1, "one_chat")
        await bob.send("ann", {"text": "hi", "mood": "good"})
        (line,) = await take(ann, 1)
        assert (line.text, line.data["mood"], line.n) == ("hi", "good", 2)


async def test_what_is_said_at_once_arrives_in_the_order_it_was_said(local: LocalHub) -> None:
    async with chat(local, "ann") as ann, chat(local, "bob") as bob:
        sent = await asyncio.gather(*(ann.send("bob", str(i)) for i in range(100)))
        assert [one.n for one in sent] == list(range(1, 101))
        assert [line.text for line in await take(bob, 100)] == [str(i) for i in range(100)]


@pytest.fixture
def late_subscription(local: LocalHub, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """A hub that has told who comes which conversations there are, and learns of those begun meanwhile when
    this is set: another hub has stored their first line, or it is stored during the welcome."""
    learns, load_new = asyncio.Event(), Subscriptions.load_new

    async def load_late(self: Subscriptions, name: str) -> None:
        await learns.wait()
        await load_new(self, name)

    monkeypatch.setattr(Subscriptions, "load_new", load_late)
    monkeypatch.setattr(Subscriptions, "join", lambda self, name, conv, told=0: self.refresh_person(name))
    return learns


async def test_who_answers_before_the_first_line_is_told_is_told_it(
    local: LocalHub, late_subscription: asyncio.Event
) -> None:
    async with chat(local, "ann") as ann, chat(local, "bob") as bob:
        await bob.send("ann", "first")
        assert (await ann.send("bob", "second")).n == 2
        late_subscription.set()
        first, _ = await take(ann, 2)  # what one said oneself is told as well, if it was not the next line
        assert (first.text, first.n) == ("first", 1)


def test_an_answer_does_not_count_what_came_before_it_as_read() -> None:
    """The program has not asked for the line yet, and may crash before it does."""
    at = ChatPositions(lambda conv, n: None, lambda: None)
    assert at.arrived("ann+bob", 1)
    at.sent("ann+bob", 2)
    assert (at.heard_to, at.read_to) == ({"ann+bob": 2}, {})


async def test_nothing_is_lost_or_repeated_when_the_hub_restarts(local: LocalHub) -> None:
    async with chat(local, "ann") as ann, chat(local, "bob") as bob:

        async def talk() -> None:
            for i in range(60):
                await ann.send("bob", str(i))

        talking = asyncio.create_task(talk())
        got = await take(bob, 15)
        await local.stop()
        await local.start()
        got += await take(bob, 45)
        await talking
        assert [line.text for line in got] == [str(i) for i in range(60)]
        assert [line.n for line in got] == list(range(1, 61))


async def test_a_line_that_was_not_made_use_of_comes_again_after_a_crash(
    local: LocalHub, tmp_path: Path
) -> None:
    store = str(tmp_path / "bob.db")
    async with chat(local, "ann") as ann:
        for i in range(5):
            await ann.send("bob", str(i))
        bob = chat(local, "bob", store)
        await bob.__aenter__()
        async with asyncio.timeout(GUARD):
            async for line in bob.lines():
                if line.n == 3:
                    break  # made use of 1 and 2 only
        await bob.stop()
        async with chat(local, "bob", store) as bob:
            assert [line.n for line in await take(bob, 3)] == [3, 4, 5]
        async with chat(local, "bob", store) as bob:
            await ann.send("bob", "new")
            assert [line.text for line in await take(bob, 1)] == ["new"]


async def test_what_was_said_before_a_crash_is_sent_after_it(local: LocalHub, tmp_path: Path) -> None:
    store = str(tmp_path / "ann.db")
    ann = chat(local, "ann", store)
    await ann.__aenter__()
    await local.stop()
    saying = asyncio.create_task(ann.send("bob", "said while the hub was away"))
    while not ann._sending or not len(cast("Outbox", ann._engine._machine)):
        await asyncio.sleep(0.01)
    await ann.stop()
    with pytest.raises(Stopped):
        await saying
    await local.start()
    async with chat(local, "ann", store), chat(local, "bob") as bob:
        assert [line.text for line in await take(bob, 1)] == ["said while the hub was away"]


async def test_groups_receipts_history_and_news(local: LocalHub) -> None:
    async with chat(local, "ann") as ann, chat(local, "bob") as bob, chat(local, "cid") as cid:
        group = await ann.create_group("club", "bob")
        await ann.invite(group, "cid")
        assert (await take(cid, 1))[0].data["group"] == group
        await cid.join(group)
        sent = await ann.send(group, "welcome")
        await take(bob, 3)
        await take(cid, 1)
        news = ann.news()
        async with asyncio.timeout(GUARD):
            seen: list[News] = []
            while not all(Receipt(group, sent.n, name, "delivered") in seen for name in ("bob", "cid")):
                seen.append(await anext(news))
        receipts = await ann.receipts(group, sent.n)
        assert (receipts.state, receipts.delivered, receipts.read, receipts.of) == ("delivered", 2, 0, 2)
        bob.read(group, sent.n)
        cid.typing(group)
        async with asyncio.timeout(GUARD):
            while not (Receipt(group, sent.n, "bob", "read") in seen and Typing(group, "cid") in seen):
                seen.append(await anext(news))
        await ann.edit(group, sent.n, "welcome!")
        await bob.send(group, "thanks")
        page = await cid.history(group)
        assert [(line.type, line.text) for line in page[-3:]] == [
            ("group_chat", "welcome!"), ("edit", ""), ("group_chat", "thanks"),
        ]  # fmt: skip
        assert page[-3].edited
        assert (await ann.group(group))["members"] == {"ann": "owner", "bob": "member", "cid": "member"}
        await ann.remove(group, "cid")
        with pytest.raises(duly.Refused, match="no such conversation"):
            await cid.send(group, "hello?")
        (shown,) = await bob.conversations()
        assert (shown["conv"], shown["name"], shown["read"]) == (group, "club", sent.n)


async def test_conversations_come_a_page_at_a_time(local: LocalHub) -> None:
    known = [f"ann+p{n:03}" for n in range(CONVERSATIONS_LIMIT + 3)]
    await local.hub.ledger.write(*(PutItem(convs("ann"), conv, b"") for conv in known))
    async with chat(local, "ann") as ann:
        assert [one["conv"] for one in await ann.conversations()] == known
        first = await ann._ask("conversations", {"limit": 2}, ConversationList)
        assert ([one["conv"] for one in first.conversations], first.next) == (known[:2], known[1])
        rest = await ann._ask("conversations", {"after": known[-2]}, ConversationList)
        assert ([one["conv"] for one in rest.conversations], rest.next) == (known[-1:], "")
        for limit in (0, CONVERSATIONS_LIMIT + 1):
            with pytest.raises(duly.Refused, match="1 to 200 conversations"):
                await ann._ask("conversations", {"limit": limit}, ConversationList)


async def test_friends_see_each_other_come_and_go(local: LocalHub) -> None:
    async with chat(local, "ann") as ann:
        async with chat(local, "bob") as bob:
            await ann.ask_friend("bob")
            await take(bob, 1)
            await bob.accept_friend("ann")
            assert (await ann.friends())["friends"] == ["bob"]
        async with asyncio.timeout(GUARD):
            async for news in ann.news():
                if isinstance(news, Presence):
                    assert news == Presence("bob", {"online": False})
                    break


async def test_registering_and_logging_in_and_out(local: LocalHub) -> None:
    await Chat.register(local.url, "zoe", "correct horse")
    with pytest.raises(duly.Refused, match="taken"):
        await Chat.register(local.url, "zoe", "correct horse")
    with pytest.raises(NotAuthenticated):
        await Chat.log_in(local.url, "zoe", "wrong horse")
    token = await Chat.log_in(local.url, "zoe", "correct horse", "laptop")
    async with Chat(local.url, token) as zoe:
        assert (await zoe.send("ann", "hi")).conv == "ann+zoe"
        await zoe.log_out(everywhere=True)
    with pytest.raises(NotAuthenticated):
        async with Chat(local.url, token):
            pass


async def test_what_was_heard_and_not_made_use_of_comes_again_also_after_a_reconnect(local: LocalHub) -> None:
    async with chat(local, "ann") as ann:
        for i in range(3):
            await ann.send("bob", str(i))
        async with chat(local, "bob") as bob:
            while bob._at.heard_to.get("ann+bob") != 3:
                await asyncio.sleep(0.01)
            await local.stop()
            await local.start()
            while not bob.connected:
                await asyncio.sleep(0.01)
            await bob.conversations()
        async with chat(local, "bob") as bob:
            assert [line.text for line in await take(bob, 3)] == ["0", "1", "2"]


async def test_of_several_hubs_one_that_is_there_is_asked(local: LocalHub) -> None:
    urls = f"http://127.0.0.1:{free_port()}, {local.url}/"
    await Chat.register(urls, "dan", "dan's password")
    token = await Chat.log_in(urls, "dan", "dan's password")
    async with asyncio.timeout(GUARD), Chat(urls, token) as dan:
        assert (await dan.send("ann", "hello")).conv == "ann+dan"
        await dan.log_out(everywhere=True)
    with pytest.raises(NotAuthenticated):
        async with Chat(urls, token):
            pass
