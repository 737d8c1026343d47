"""Somebody's account is removed: they leave what they were in, others see it, and nobody inherits it."""

from __future__ import annotations

import asyncio

import pytest

from duly.apps.chat import account_removal
from duly.errors import Conflict
from duly.identity.accounts import FORMER, LEAVING, Accounts, Principal, Role
from duly.storage import open_ledger
from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.people import Person
from tests.end_to_end.raw import Json, curl


async def make(who: Person, name: str, *members: str) -> str:
    return str((await who.ask("group_create", name=name, members=list(members)))["data"]["group"])


async def befriend(one: Person, other: Person) -> None:
    me, them = one.welcome["you"], other.welcome["you"]
    assert (await one.ask("friend_ask", user=them))["code"] == 0
    assert (await other.ask("friend_accept", user=me))["code"] == 0


async def until(who: Person, type: str, conv: str) -> Json:
    """The next line of this type in this conversation; what comes before it is acknowledged."""
    while True:
        line = await who.line()
        if (line["type"], line["conv"]) == (type, conv):
            return line


async def remove(chat_hub: HubWithPeople, name: str) -> None:
    await chat_hub.hub.admin.run(Principal("root", Role.ADMIN), "remove", {"name": name})


async def members(who: Person, group: str) -> dict[str, str]:
    found: dict[str, str] = (await who.ask("group_info", group=group))["data"]["members"]
    return found


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────


async def test_who_is_removed_leaves_their_groups_in_sight_of_everybody(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob, chat_hub.enter("cid"):
        theirs = await make(ann, "theirs", "bob", "cid")
        his = await make(bob, "his", "ann", "cid")
        assert (await bob.ask("group_role", group=his, user="cid", role="admin"))["code"] == 0
        await remove(chat_hub, "bob")
        await bob.closed()
        assert (await until(ann, "group_leave", theirs))["from"] == "bob"
        history = [(line["type"], line["from"]) for line in (await ann.history(his))["lines"]]
        assert history[-2:] == [("group_role", "bob"), ("group_leave", "bob")]
        assert await members(ann, theirs) == {"ann": "owner", "cid": "member"}
        assert await members(ann, his) == {"ann": "member", "cid": "owner"}, "admins come first"


async def test_the_last_in_a_group_just_leaves(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("bob") as bob:
        group = await make(bob, "alone")
    await remove(chat_hub, "bob")
    assert not await chat_hub.hub.ledger.bucket(f"members/{group}")


async def test_a_removed_person_has_no_friends_and_cannot_be_written_to(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        await befriend(ann, bob)
        assert (await bob.ask("friend_ask", user="cid"))["code"] == 0
        await ann.chat("bob", "hello")
        await remove(chat_hub, "bob")
        assert (await until(ann, "friend_remove", "~ann"))["from"] == "bob"
        assert (await ann.ask("friends"))["data"]["friends"] == []
        assert (await ann.chat("bob", "are you there?"))["error"] == "not_allowed"
        assert [line["data"]["text"] for line in (await ann.history("ann+bob"))["lines"]] == ["hello"]
    async with chat_hub.enter("cid") as cid:
        assert (await cid.ask("friends"))["data"]["asking"] == []
        assert (await cid.ask("friend_accept", user="bob"))["error"] == "not_allowed"


async def test_every_login_ends_and_a_group_line_goes_to_members_only(chat_hub: HubWithPeople) -> None:
    token = await chat_hub.hub.people.let_in("bob", "phone")
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        group = await make(ann, "club", "bob")
        await remove(chat_hub, "bob")
        await bob.closed()
        assert (await ann.chat(group, "without bob"))["code"] == 0
    assert not await chat_hub.hub.ledger.bucket("sessions/bob")
    answer = await curl(f"{chat_hub.url}/v1/messages", token, body={"type": "friends", "seq_id": "1_1"})
    assert answer.status == 401


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", ["between two", "in a group"])
async def test_a_name_under_which_a_person_has_written_is_not_given_away(
    chat_hub: HubWithPeople, where: str
) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        if where == "in a group":
            await bob.chat(await make(ann, "club", "bob"), "hello")
        else:
            await ann.chat("bob", "hello")
    await remove(chat_hub, "bob")
    for role in ("user", "app"):
        with pytest.raises(Conflict, match="'bob' is the name of a removed person"):
            await chat_hub.hub.admin.run(Principal("root", Role.ADMIN), "add", {"role": role, "name": "bob"})
    body = {"name": "bob", "password": "correct horse"}
    answer = await curl(f"{chat_hub.url}/v1/people", None, body=body)
    assert (answer.status, answer.json["detail"]) == (422, "the name 'bob' is taken; choose another")
    await chat_hub.restart()
    with pytest.raises(Conflict, match="'bob' is the name of a removed person"):
        await chat_hub.hub.accounts.add(Role.USER, "bob")


async def test_a_name_that_was_only_a_mistake_is_free_at_once_and_its_tokens_are_not(
    chat_hub: HubWithPeople,
) -> None:
    token = await chat_hub.hub.people.let_in("bob", "phone")
    assert await chat_hub.hub.people.recognise(token) is not None
    await remove(chat_hub, "bob")
    await chat_hub.hub.admin.run(Principal("root", Role.ADMIN), "add", {"role": "user", "name": "bob"})
    assert await chat_hub.hub.people.recognise(token) is None


# ── crashes, and without a hub ───────────────────────────────────────────────────────────────────


async def test_who_was_removed_without_a_hub_is_seen_off_when_one_starts(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        group = await make(ann, "club", "bob")
    await chat_hub.hub.stop()
    async with await open_ledger(f"sqlite:///{chat_hub._folder}/ledger.db") as ledger:
        accounts = Accounts(ledger)
        await accounts.refresh()
        assert await accounts.remove("bob")
        with pytest.raises(Conflict, match="removed just now"):
            await accounts.add(Role.USER, "bob")
    await chat_hub.start()
    async with chat_hub.enter("ann") as ann:
        assert await members(ann, group) == {"ann": "owner"}
    assert not await chat_hub.hub.ledger.bucket(LEAVING)
    assert list(await chat_hub.hub.ledger.bucket(FORMER)) == ["bob"]


async def test_two_hubs_that_remove_a_person_from_chat_do_it_once(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        groups = [await make(who, "club", "ann", "bob", "cid") for who in (ann, bob)]
    await chat_hub.hub.accounts.remove("bob")
    ledger = chat_hub.hub.ledger
    await asyncio.gather(*(account_removal.remove_from_chat(ledger, "bob") for _ in range(3)))
    async with chat_hub.enter("ann") as ann:
        for group in groups:
            lines = (await ann.history(group))["lines"]
            assert [line["type"] for line in lines].count("group_leave") == 1
            assert await members(ann, group) == {"ann": "owner", "cid": "member"}


# ── on several hubs ──────────────────────────────────────────────────────────────────────────────


async def test_who_is_removed_on_one_hub_is_gone_from_the_others(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    async with here.enter("ann") as ann, there.enter("bob") as bob, there.enter("cid") as cid:
        await befriend(cid, bob)
        group = await make(bob, "club", "ann", "cid")
        assert (await ann.line())["type"] == "group_create"
        await remove(here, "bob")
        await bob.closed()
        for who in (ann, cid):
            assert (await until(who, "group_leave", group))["from"] == "bob"
        assert await members(cid, group) == {"ann": "owner", "cid": "member"}
        assert (await cid.ask("friends"))["data"]["friends"] == []
    with pytest.raises(Conflict):
        await there.hub.accounts.add(Role.USER, "bob")


async def _no_lapsed() -> frozenset[str]:
    return frozenset()


async def test_what_a_hub_lets_them_do_before_it_has_heard_is_ended_as_well(
    chat_hubs: tuple[HubWithPeople, HubWithPeople], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = chat_hubs
    # As an older hub on the same ledger would: it does not ask whether an account still stands, nor hears
    # that one does not.
    monkeypatch.setattr(there.hub.accounts, "proof", lambda who, device="": ())
    monkeypatch.setattr(there.hub.accounts, "catch_up", _no_lapsed)
    monkeypatch.setattr(there.hub.accounts, "refresh", _no_lapsed)
    async with there.enter("bob") as bob, here.enter("ann") as ann:
        await here.hub.accounts.remove("bob")  # no hint is sent
        await here.hub.chat.remove_from_chat()
        group = await make(bob, "late", "ann")
        assert (await ann.line())["conv"] == group
        assert list(await here.hub.ledger.bucket(LEAVING)) == ["bob"], "they are still looked after"
        await here.hub.chat.remove_from_chat()
        assert await members(ann, group) == {"ann": "owner"}
        here.clock.seconds += 20
        await here.hub.chat.remove_from_chat()
        assert not await here.hub.ledger.bucket(LEAVING)
