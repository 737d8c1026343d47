"""Groups and friends as a plain WebSocket client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.people import Person
from tests.end_to_end.raw import Json


async def make(who: Person, *members: str, **more: Any) -> str:
    ack = await who.ask("group_create", name="club", members=list(members), **more)
    assert ack["code"] == 0, ack
    return str(ack["data"]["group"])


def refused(ack: Json) -> bool:
    return (ack["code"], ack["error"]) == (3, "not_allowed")


# ── groups ───────────────────────────────────────────────────────────────────────────────────────


async def test_everybody_in_a_group_sees_the_same_lines_in_the_same_order(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob, chat_hub.enter("cid") as cid:
        group = await make(ann, "bob", "cid")
        people = (ann, bob, cid)

        async def talk(who: Person) -> list[tuple[int, str]]:
            acks = [await who.chat(group, f"{i}") for i in range(10)]
            own = [(ack["n"], f"{i}") for i, ack in enumerate(acks)]
            return sorted(own + [(f["n"], f["data"]["text"]) for f in await who.lines(20)])

        for who in (bob, cid):
            assert (await who.line())["type"] == "group_create"
        views = await asyncio.gather(*map(talk, people))
        assert views[0] == views[1] == views[2]
        assert [n for n, _ in views[0]] == list(range(2, 32))
        assert (await cid.history(group))["lines"][0]["data"] == {
            "name": "club",
            "count": 3,
            "members": ["ann", "bob", "cid"],
        }
        info = (await bob.ask("group_info", group=group))["data"]
        assert info["members"] == {"ann": "owner", "bob": "member", "cid": "member"}


async def test_making_a_group_twice_makes_one(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        seq_id = ann.ids()
        first = await ann.ask("group_create", name="club", members=["bob"], seq_id=seq_id)
        again = await ann.ask("group_create", name="club", members=["bob"], seq_id=seq_id)
        assert (again["code"], again["n"], again["data"]) == (5, 1, first["data"])
        assert (await bob.line())["type"] == "group_create"
        assert await bob.no_line()
        assert len((await bob.ask("conversations"))["data"]["conversations"]) == 1


@pytest.mark.parametrize(("history", "seen"), [("all", ["before", "between"]), ("joined", [])])
async def test_who_joins_sees_what_the_group_allows(
    chat_hub: HubWithPeople, history: str, seen: list[str]
) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = await make(ann, history=history)
        await ann.chat(group, "before")
        assert refused(await bob.ask("group_join", group=group))
        assert (await ann.ask("group_invite", group=group, user="bob"))["code"] == 0
        invitation = await bob.line()
        assert (invitation["type"], invitation["conv"], invitation["data"]["group"]) == (
            "group_invite", "~bob", group,
        )  # fmt: skip
        await ann.chat(group, "between")
        joined = await bob.ask("group_join", group=group)
        assert (joined["code"], joined["n"]) == (0, 4)
        await ann.chat(group, "after")
        assert (await bob.line())["data"] == {"text": "after"}
        page = await bob.history(group)
        texts = [f["data"]["text"] for f in page["lines"] if f["type"] == "group_chat"]
        assert texts == [*seen, "after"]
        assert page["first"] == (1 if seen else 4)
    async with chat_hub.enter("bob", {group: 0}) as bob:
        # A cursor of his own does not bring back what he may not see.
        lines = [await bob.line() for _ in range(5 if seen else 1)]
        assert [f["n"] for f in lines] == ([1, 2, 3, 4, 5] if seen else [5])


async def test_a_removed_member_is_still_told_what_is_for_them_alone(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = await make(ann, "bob")
        assert (await ann.ask("group_remove", group=group, user="bob"))["code"] == 0
        for type_, data in (("group_invite", {"group": group}), ("friend_ask", {})):
            assert (await ann.ask(type_, user="bob", **data))["code"] == 0
        notes = [line for line in await bob.lines(5) if line["conv"] == "~bob"]
        assert [line["type"] for line in notes] == ["group_remove", "group_invite", "friend_ask"]


async def test_a_removed_member_gets_nothing_after(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob, chat_hub.enter("cid") as cid:
        group = await make(ann, "bob", "cid")
        await cid.line()
        assert refused(await bob.ask("group_remove", group=group, user="cid"))
        ack = await ann.ask("group_remove", group=group, user="cid")
        assert (ack["code"], ack["n"]) == (0, 2)
        await ann.chat(group, "without cid")
        told = await cid.lines(2)
        assert sorted((f["type"], f["conv"]) for f in told) == sorted(
            [("group_remove", group), ("group_remove", "~cid")]
        )
        assert await cid.no_line()
        for ack in (
            await cid.chat(group, "still here?"),
            await cid.ask("history", conv=group),
            await cid.ask("group_info", group=group),
            await cid.ask("receipts", conv=group, n=1),
            await cid.ask("group_leave", group=group),
        ):
            assert refused(ack)
        assert [f["n"] for f in await bob.lines(3)] == [1, 2, 3]
    async with chat_hub.enter("cid", {group: 0}) as cid:
        assert group not in cid.welcome["cursors"]
        assert await cid.no_line()


async def test_a_repeat_of_what_was_said_before_the_removal_gets_its_number(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = await make(ann, "bob")
        seq_id = bob.ids()
        await bob.chat(group, "said in time", seq_id=seq_id)
        await ann.ask("group_remove", group=group, user="bob")
        await chat_hub.restart()
    async with chat_hub.enter("bob") as bob:
        again = await bob.chat(group, "said in time", seq_id=seq_id)
        assert (again["code"], again["n"]) == (5, 2)


async def test_ranks_decide_who_may_remove_whom(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob, chat_hub.enter("cid") as cid:
        group = await make(ann, "bob", "cid", "eve")
        assert refused(await bob.ask("group_role", group=group, user="bob", role="owner"))
        assert (await ann.ask("group_role", group=group, user="bob", role="admin"))["code"] == 0
        assert refused(await bob.ask("group_remove", group=group, user="ann"))
        assert (await bob.ask("group_remove", group=group, user="cid"))["code"] == 0
        assert refused(await cid.ask("group_remove", group=group, user="eve"))
        assert (await ann.ask("group_leave", group=group))["error"] == "last_owner"
        assert (await ann.ask("group_role", group=group, user="bob", role="owner"))["code"] == 0
        assert (await ann.ask("group_leave", group=group))["code"] == 0
        info = (await bob.ask("group_info", group=group))["data"]
        assert info["members"] == {"bob": "owner", "eve": "member"}


async def test_an_admin_may_delete_any_line_and_a_member_only_their_own(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = await make(ann, "bob")
        await bob.chat(group, "rude")
        await ann.chat(group, "polite")
        assert refused(await bob.ask("delete", conv=group, n=3))
        assert (await ann.ask("delete", conv=group, n=2))["code"] == 0
        assert [f["type"] for f in (await bob.history(group))["lines"]] == [
            "group_create", "deleted", "group_chat", "delete",
        ]  # fmt: skip


async def test_an_open_group_is_joined_without_an_invitation(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = await make(ann, open=True)
        assert (await bob.ask("group_join", group=group))["code"] == 0
        assert (await bob.ask("group_join", group=group))["error"] == "already"
        await bob.chat(group, "hello all")
        assert [f["type"] for f in await ann.lines(2)] == ["group_join", "group_chat"]


async def test_a_large_group_costs_one_row_a_line(chat_hub: HubWithPeople) -> None:
    names = [f"user{i}" for i in range(3_000)]
    for name in names:
        await chat_hub.hub.ledger.write(_user(name))
    await chat_hub.hub.accounts.refresh()
    async with chat_hub.enter("ann") as ann:
        group = await make(ann, *names)
        size = await chat_hub.hub.ledger.size()
        extent = await chat_hub.hub.ledger.extent(f"chat/{group}")
        for i in range(5):
            await ann.chat(group, str(i))
        after = await chat_hub.hub.ledger.size()
        assert after.messages - size.messages == 5
        assert (await chat_hub.hub.ledger.extent(f"chat/{group}")).last - extent.last == 5
        receipts = (await ann.ask("receipts", conv=group, n=6))["data"]
        assert (receipts["of"], receipts["delivered"]) == (3_000, 0)


def _user(name: str) -> Any:
    from duly.core.operations import PutItem

    return PutItem("principals", name, b'{"role":"user","token":"","created":0}')


# ── friends ──────────────────────────────────────────────────────────────────────────────────────


async def test_friends_ask_accept_and_part(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        ack = await ann.ask("friend_ask", user="bob")
        assert ack["code"] == 0
        assert "n" not in ack  # what bob was told before is not ann's to count
        assert (await ann.ask("friend_ask", user="bob"))["error"] == "already"
        async with chat_hub.enter("bob") as bob:
            note = await bob.line()
            assert (note["type"], note["from"], note["conv"]) == ("friend_ask", "ann", "~bob")
            assert (await bob.ask("friends"))["data"]["asking"] == ["ann"]
            assert refused(await bob.ask("friend_accept", user="cid"))
            assert (await bob.ask("friend_accept", user="ann"))["code"] == 0
            assert (await ann.line())["type"] == "friend_accept"
            for who, other in ((ann, "bob"), (bob, "ann")):
                assert (await who.ask("friends"))["data"]["friends"] == [other]
            await bob.ask("friend_remove", user="ann")
            assert (await ann.ask("friends"))["data"]["friends"] == []


async def test_a_blocked_person_cannot_tell_it_from_an_unknown_name(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("eve") as eve:
        await eve.chat("ann", "hello")
        await ann.ask("block", user="eve")
        await eve.ask("block", user="ann")
        nobody = await eve.chat("nobody", "hello?")
        blocked = await eve.chat("ann", "hello?")
        assert {k: v for k, v in blocked.items() if k != "seq_id"} == {
            k: v for k, v in nobody.items() if k != "seq_id"
        }
        for verb in ("friend_ask", "friend_accept"):
            assert refused(await eve.ask(verb, user="ann"))
        assert refused(await eve.ask("group_create", name="trap", members=["ann"]))
        await ann.ask("unblock", user="eve")
        assert refused(await eve.chat("ann", "and now?"))  # eve has blocked ann, too
        await eve.ask("unblock", user="ann")
        assert (await eve.chat("ann", "and now?"))["code"] == 0


async def test_where_only_friends_may_talk_others_may_not(
    open_chat_hub: Callable[..., Awaitable[HubWithPeople]],
) -> None:
    chat_hub = await open_chat_hub(friends_only=True)
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        assert refused(await ann.chat("bob", "hi"))
        await ann.ask("friend_ask", user="bob")
        await bob.ask("friend_accept", user="ann")
        assert (await ann.chat("bob", "hi"))["code"] == 0
        await bob.ask("friend_remove", user="ann")
        assert refused(await ann.chat("bob", "hi again"))
        assert refused(await ann.ask("group_create", name="club", members=["bob"]))
