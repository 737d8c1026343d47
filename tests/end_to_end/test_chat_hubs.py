"""Two hubs on one PostgreSQL: the truth is in the ledger, and hints only make it fast."""

from __future__ import annotations

import pytest

from duly.apps.chat import remote_hubs as remote
from duly.cluster.notifier import Notifier
from tests.end_to_end.conftest import HubWithPeople


async def test_what_is_said_on_one_hub_is_told_on_the_other(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        for i in range(3):
            await ann.chat("bob", f"from here {i}")
        assert await bob.texts(3) == [f"from here {i}" for i in range(3)]
        assert (await ann.receipt("delivered"))["from"] == "bob"
        assert (await bob.chat("ann", "from there"))["n"] == 4
        assert await ann.texts(1) == ["from there"]
        await ann.say("read", conv="ann+bob", n=4)
        assert (await bob.receipt("read"))["n"] == 4


async def test_without_any_hint_it_is_told_a_little_later(
    chat_hubs: tuple[HubWithPeople, HubWithPeople], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Notifier, "hint", lambda self, about, name="": None)
    here, there = chat_hubs
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        await ann.chat("bob", "the first, in a new conversation")
        assert (await bob.line(20))["n"] == 1
        await ann.chat("bob", "the second")
        assert (await bob.line(20))["n"] == 2
        group = (await ann.ask("group_create", name="club", members=["bob"]))["data"]["group"]
        await ann.chat(group, "hello club")
        assert [line["type"] for line in (await bob.line(20), await bob.line(20))] == [
            "group_create",
            "group_chat",
        ]


async def test_typing_and_presence_pass_from_hub_to_hub(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    async with here.enter("ann") as ann:
        async with there.enter("bob") as bob:
            await ann.ask("friend_ask", user="bob")
            await bob.ask("friend_accept", user="ann")
            await ann.chat("bob", "hello")
            while (await bob.line())["conv"] != "ann+bob":
                pass  # a note that ann asks
            await bob.say("typing", conv="ann+bob")
            assert (await ann.first(lambda f: f["type"] == "typing"))["from"] == "bob"
            await ann.say("presence", data={"online": True, "status": "away"})
            away = await bob.first(lambda f: f["type"] == "presence" and "status" in f["data"])
            assert away["from"] == "ann"
        gone = await ann.first(lambda f: f["type"] == "presence" and f["data"] == {"online": False})
        assert gone["from"] == "bob"
        async with there.enter("bob") as bob:
            back = await ann.first(lambda f: f["type"] == "presence" and f["data"] == {"online": True})
            assert back["from"] == "bob"
            there_too = await bob.first(lambda f: f["type"] == "presence" and f["data"] == {"online": True})
            assert there_too["from"] == "ann", "who comes learns who is at another hub"


async def test_a_note_with_the_word_false_is_no_departure(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    """Ann is at both hubs: what she says of herself at one of them reaches her friend at the other."""
    here, there = chat_hubs
    async with here.enter("ann") as ann, there.enter("ann"), there.enter("bob") as bob:
        await ann.ask("friend_ask", user="bob")
        await bob.ask("friend_accept", user="ann")
        await ann.say("presence", data={"online": True, "note": "a false alarm"})
        noted = await bob.first(lambda f: f["type"] == "presence" and "note" in f["data"])
        assert (noted["from"], noted["data"]["note"]) == ("ann", "a false alarm")


async def test_a_repeat_on_another_hub_gets_the_number_of_the_first(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    async with here.enter("ann") as ann, there.enter("ann") as remote:
        seq_id = ann.ids()
        first = await ann.chat("bob", "once", seq_id=seq_id)
        again = await remote.chat("bob", "once", seq_id=seq_id)
        assert (first["code"], first["n"], again["code"], again["n"]) == (0, 1, 5, 1)


async def test_who_is_removed_on_one_hub_gets_and_says_nothing_on_the_other(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        group = (await ann.ask("group_create", name="club", members=["bob"]))["data"]["group"]
        assert (await bob.line())["type"] == "group_create"
        await ann.ask("group_remove", group=group, user="bob")
        await ann.chat(group, "without bob")
        assert (await bob.chat(group, "still here"))["error"] == "not_allowed"
        told = await bob.lines(2)
        assert {(line["type"], line["conv"]) for line in told} == {
            ("group_remove", group),
            ("group_remove", "~bob"),
        }
        assert await bob.no_line()


async def test_a_person_who_has_just_registered_is_known_everywhere(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    await here.hub.people.register("zoe", "correct horse", "here")
    there.tokens["zoe"] = await here.hub.people.log_in("zoe", "correct horse", "here")
    async with there.enter("zoe") as zoe, there.enter("ann") as ann:
        assert (await ann.chat("zoe", "welcome"))["code"] == 0
        assert await zoe.texts(1) == ["welcome"]


async def test_where_there_are_very_many_conversations_they_take_turns(
    chat_hubs: tuple[HubWithPeople, HubWithPeople], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = chat_hubs
    async with here.enter("ann") as ann, here.enter("cid") as cid, there.enter("bob") as bob:
        await ann.chat("bob", "the first")
        await cid.chat("bob", "the first")
        assert await bob.texts(2) == ["the first"] * 2
        monkeypatch.setattr(Notifier, "hint", lambda self, about, name="": None)
        monkeypatch.setattr(remote, "CONVS_PER_REFRESH", 1)
        await ann.chat("bob", "of ann")
        await cid.chat("bob", "of cid")
        assert {(await bob.line(20))["data"]["text"] for _ in range(2)} == {"of ann", "of cid"}
