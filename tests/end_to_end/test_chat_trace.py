"""The trace of a line of chat: with whom it is, by whom it was read, whom it waits for; from every hub."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from duly.apps.chat import subscriptions
from duly.core.units import MS
from duly.identity.accounts import Role
from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.raw import Json
from tests.end_to_end.test_chat_again import hurry, told
from tests.guard import GUARD


async def trace(chat_hub: HubWithPeople, scope: str, id_: str, who: str | None = None) -> Json:
    token = chat_hub.tokens[who or "root"]
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http,
        http.get(f"{chat_hub.url}/v1/messages/{scope}/{id_}") as answer,
    ):
        found: Json = await answer.json()
        return found


async def until(chat_hub: HubWithPeople, scope: str, id_: str, state: str, name: str) -> dict[str, Any]:
    """A recipient's part of the trace, once it says so."""
    async with asyncio.timeout(GUARD):
        while True:
            line = (await trace(chat_hub, scope, id_))["line"]
            for one in line["recipients"]:
                if (one["name"], one["state"]) == (name, state):
                    found: dict[str, Any] = one
                    return found
            await asyncio.sleep(0.02)


async def test_a_line_says_who_has_it_from_every_hub_and_after_a_restart(
    chat_hubs: tuple[HubWithPeople, HubWithPeople], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "NOTED_AFTER", 100 * MS)
    here, there = chat_hubs
    here.tokens["root"] = await here.hub.accounts.add(Role.ADMIN, "root")
    await there.hub.accounts.refresh()
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        group = (await ann.ask("group_create", name="club", members=["bob", "cid"]))["data"]["group"]
        assert (await bob.line())["type"] == "group_create"
        bob.acking = False
        id_ = ann.ids()
        n = (await ann.chat(group, "hello", seq_id=id_))["n"]
        assert (await bob.line())["n"] == n
        for chat_hub in chat_hubs:
            sent = await until(chat_hub, "ann", id_, "sent", "bob")
            assert sent["attempts"] >= 1
            assert sent["acknowledged"] == n - 1
            waiting = await until(chat_hub, "ann", id_, "waiting", "cid")
            assert waiting["since"] > 10**12
        await bob.say("ack", conv=group, n=n)
        for chat_hub in chat_hubs:
            assert (await until(chat_hub, "ann", id_, "delivered", "bob"))["acknowledged"] == n
        await bob.say("read", conv=group, n=n)
        for chat_hub in chat_hubs:
            assert (await until(chat_hub, "ann", id_, "read", "bob"))["read"] == n
    await there.restart()
    line = (await trace(there, "ann", id_))["line"]
    assert (line["conv"], line["n"], line["of"], line["delivered"], line["read"]) == (group, n, 2, 1, 1)
    states = [(one["name"], one["state"]) for one in line["recipients"]]
    assert states == [("cid", "waiting"), ("bob", "read")], "who does not have it comes first"


async def test_a_line_is_not_said_to_be_sent_again_before_it_was_stored(chat_hub: HubWithPeople) -> None:
    hurry(chat_hub)
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        bob.acking = False
        ids = [ann.ids(), ann.ids()]
        await ann.chat("bob", "one", seq_id=ids[0])
        await told(bob, 1, 3)
        await ann.chat("bob", "two", seq_id=ids[1])
        await told(bob, 2, 2)
        both = [await trace(chat_hub, "ann", id_, "ann") for id_ in ids]
    again = [[hop["time"] for hop in of["hops"] if hop.get("attempt", 0) > 1] for of in both]
    assert len(again[0]) > len(again[1]) > 0
    assert min(again[1]) >= both[1]["accepted_at"]


async def test_what_is_no_line_has_none(chat_hub: HubWithPeople) -> None:
    chat_hub.tokens["root"] = await chat_hub.hub.accounts.add(Role.ADMIN, "root")
    async with chat_hub.enter("ann") as ann:
        id_ = ann.ids()
        await ann.ask("friend_ask", user="bob", seq_id=id_)
    assert "line" not in await trace(chat_hub, "ann", id_)


async def test_a_line_between_two_is_traced_by_whom_it_concerns(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        id_ = ann.ids()
        await ann.chat("bob", "hello", seq_id=id_)
        await bob.line()
        await ann.receipt("delivered")
        for who in ("ann", "bob"):
            line = (await trace(chat_hub, "ann", id_, who))["line"]
            assert (line["of"], line["delivered"], line["recipients"][0]["name"]) == (1, 1, "bob")
        assert "line" not in await trace(chat_hub, "ann", id_, "eve")


async def test_who_has_left_a_group_learns_nothing_more_of_it(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = (await ann.ask("group_create", name="club", members=["bob"]))["data"]["group"]
        await bob.line()
        id_ = bob.ids()
        await bob.chat(group, "and goodbye", seq_id=id_)
        assert (await trace(chat_hub, "bob", id_, "bob"))["line"]["recipients"][0]["name"] == "ann"
        await bob.ask("group_leave", group=group)
        left = await trace(chat_hub, "bob", id_, "bob")
        assert left["state"] == "done"
        assert "line" not in left
