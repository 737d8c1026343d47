"""What people try who want in where they do not belong. Nothing leaks, and everything is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from duly.identity.accounts import Principal, Role
from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.raw import Closed, Json, curl

NASTY = [
    "' OR '1'='1", "'; DROP TABLE messages; --", "ann+bob", "#", "~ann", "../../etc/passwd", "\u202egro",
    "%s%n", "a" * 300, "\x00", "chat/ann+bob", "+", "ann+", "ann+bob+eve", "#" + "a" * 16, "🦉", "",
]  # fmt: skip


def plain(frame: Json) -> Json:
    return {key: value for key, value in frame.items() if key != "seq_id"}


async def secret(chat_hub: HubWithPeople) -> str:
    """Ann and Bob share a conversation and a group that Eve is not in."""
    async with chat_hub.enter("ann") as ann:
        await ann.chat("bob", "the secret")
        group = str((await ann.ask("group_create", name="secret", members=["bob"]))["data"]["group"])
        await ann.chat(group, "the secret")
    return group


async def test_a_foreign_conversation_looks_like_one_that_does_not_exist(chat_hub: HubWithPeople) -> None:
    group = await secret(chat_hub)
    async with chat_hub.enter("eve") as eve:
        asked: list[tuple[str, Callable[[str], Json]]] = [
            ("history", lambda conv: {"conv": conv}),
            ("receipts", lambda conv: {"conv": conv, "n": 1}),
            ("edit", lambda conv: {"conv": conv, "n": 1, "data": "x"}),
            ("delete", lambda conv: {"conv": conv, "n": 1}),
            ("group_info", lambda conv: {"group": conv}),
            ("group_join", lambda conv: {"group": conv}),
            ("group_leave", lambda conv: {"group": conv}),
            ("group_invite", lambda conv: {"group": conv, "user": "eve"}),
            ("group_remove", lambda conv: {"group": conv, "user": "ann"}),
            ("group_role", lambda conv: {"group": conv, "user": "eve", "role": "owner"}),
        ]
        for verb, of in asked:
            real = [await eve.ask(verb, **of(conv)) for conv in (group, "ann+bob", "~ann")]
            none = [await eve.ask(verb, **of(conv)) for conv in ("#aaaaaaaaaaaaaaaa", "ann+cid", "~zoe")]
            assert [plain(f) for f in real] == [plain(f) for f in none], verb
            assert {f["code"] for f in real} == {3}, verb
        for to in (group, "#aaaaaaaaaaaaaaaa"):
            answer = await eve.chat(to, "let me in")
            assert (answer["code"], answer["error"]) == (3, "not_allowed")
        for frame in ("ack", "read", "typing"):
            for conv in (group, "ann+bob", "~ann", "#aaaaaaaaaaaaaaaa"):
                await eve.say(frame, conv=conv, n=1)
                assert (await eve.hear())["error"] == "not_allowed"
        assert not any("secret" in str(f) for f in eve.heard)
        assert await eve.no_line()
    refused = await chat_hub.refused()
    assert refused.count(("eve", "not_allowed")) >= 70
    assert (await chat_hub.hub.ledger.cursors(f"chat/{group}")).keys() <= {"ann", "bob"}
    assert (await chat_hub.hub.ledger.extent(f"chat/{group}")).last == 2


async def test_eve_cannot_pass_for_ann(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("eve") as eve, chat_hub.enter("bob") as bob:
        await eve.say("one_chat", seq_id=eve.ids(), to="bob", data={"text": "hi"}, **{"from": "ann"})
        line = await bob.line()
        assert (line["from"], line["conv"]) == ("eve", "bob+eve")


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
async def test_nasty_names_are_names_of_no_account(chat_hub: HubWithPeople, name: str) -> None:
    async with chat_hub.enter("eve") as eve:
        answers = [
            await eve.chat(name, "x"),
            await eve.ask("one_chat", name, text=name),
            await eve.ask("friend_ask", user=name),
            await eve.ask("block", user=name),
            await eve.ask("history", conv=name),
            await eve.ask("group_join", group=name),
            await eve.ask("group_create", name="g", members=[name]),
        ]
        assert {f["code"] for f in answers} <= {2, 3}
        assert (await eve.chat("ann", name))["code"] == 0
    async with chat_hub.enter("ann") as ann:
        assert await ann.texts(1) == [name]


async def test_nonsense_is_refused_and_disturbs_no_other_client(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("eve") as eve, chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        for data in (
            "null",
            "[]",
            '"x"',
            "{}",
            '{"conv":1}',
            '{"conv":"ann+bob","n":"1"}',
            '{"user":[]}',
            "7",
        ):
            for type_ in (
                "edit",
                "delete",
                "history",
                "receipts",
                "friend_ask",
                "group_create",
                "group_role",
            ):
                await eve.say_text(f'{{"type":"{type_}","seq_id":"{eve.ids()}","data":{data}}}')
                assert (await eve.hear())["code"] in (2, 3)
        for conv, n in (("ann+eve", -1), ("ann+eve", 2**63), (None, 1), ("ann+eve", None)):
            await eve.say("ack", conv=conv, n=n)
            assert (await eve.hear())["code"] in (2, 3)
        await eve.say("group_chat", to="#x", data=1)
        assert (await eve.hear())["error"] == "malformed"
        assert (await ann.chat("bob", "all is well"))["code"] == 0
        assert await bob.texts(1) == ["all is well"]


async def test_an_acknowledgement_beyond_the_end_moves_no_further_than_the_end(
    chat_hub: HubWithPeople,
) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        bob.acking = False
        await ann.chat("bob", "1")
        await bob.line()
        await bob.say("ack", conv="ann+bob", n=1_000)
        await ann.receipt("delivered")
        await ann.chat("bob", "2")
        assert (await bob.line())["n"] == 2
    assert await chat_hub.hub.ledger.cursor("chat/ann+bob", "bob") == 1


async def test_apps_and_devices_do_not_chat_and_people_command_nothing(chat_hub: HubWithPeople) -> None:
    await chat_hub.people()
    async with chat_hub.join("phone") as phone, chat_hub.join("lock") as lock, chat_hub.enter("eve") as eve:
        for peer in (phone, lock):
            await peer.say("one_chat", seq_id=peer.ids(), to="ann", data="hi")
            assert (await peer.hear())["error"] == "not_allowed"
        refused = await eve.ask("lock_control", "lock", open=True)
        assert (refused["code"], refused["error"]) == (3, "not_allowed")
        assert (await eve.chat("lock", "hi"))["error"] == "not_allowed"


async def test_a_user_who_was_removed_is_hung_up_on_and_does_not_come_back(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("eve") as eve:
        await chat_hub.hub.admin.run(Principal("root", Role.ADMIN), "remove", {"name": "eve"})
        await eve.closed()
        with pytest.raises((AssertionError, Closed)):
            async with chat_hub.enter("eve"):
                pass
    frame = {"type": "one_chat", "seq_id": "1_1", "to": "ann", "data": "x"}
    answer = await curl(f"{chat_hub.url}/v1/messages", chat_hub.tokens["eve"], body=frame)
    assert answer.status == 401


# ── registering and logging in over HTTP ─────────────────────────────────────────────────────────


async def post(chat_hub: HubWithPeople, path: str, token: str | None = None, **body: Any) -> tuple[int, Any]:
    answer = await curl(f"{chat_hub.url}/v1/{path}", token, body=body)
    return answer.status, answer.json


async def test_a_person_registers_logs_in_on_two_devices_and_logs_out_everywhere(
    chat_hub: HubWithPeople,
) -> None:
    who = {"name": "zoe", "password": "correct horse"}
    assert await post(chat_hub, "people", **who) == (201, {"name": "zoe"})
    assert (await post(chat_hub, "people", **who))[0] == 422
    assert (await post(chat_hub, "login", name="zoe", password="wrong horse"))[0] == 401
    assert (await post(chat_hub, "login", name="nobody", password="wrong horse"))[0] == 401
    assert (await post(chat_hub, "login", name=7))[0] == 400
    chat_hub.tokens["zoe"] = (await post(chat_hub, "login", **who))[1]["token"]
    chat_hub.tokens["tablet"] = (await post(chat_hub, "login", **who))[1]["token"]
    async with (
        chat_hub.enter("ann") as ann,
        chat_hub.enter("zoe") as phone,
        chat_hub.enter("tablet") as tablet,
    ):
        assert phone.welcome["you"] == tablet.welcome["you"] == "zoe"
        await ann.chat("zoe", "hello")
        assert [await who.texts(1) for who in (phone, tablet)] == [["hello"]] * 2
        status, answer = await post(chat_hub, "logout", chat_hub.tokens["zoe"], everywhere=True)
        assert (status, answer) == (200, {"ended": 2})
        await asyncio.gather(phone.closed(), tablet.closed())
    assert (await post(chat_hub, "logout", chat_hub.tokens["zoe"]))[0] == 401


async def test_each_device_finds_what_it_has_not_acknowledged_itself(chat_hub: HubWithPeople) -> None:
    who = {"name": "zoe", "password": "correct horse"}
    await post(chat_hub, "people", **who)
    for device in ("zoe", "tablet"):
        chat_hub.tokens[device] = (await post(chat_hub, "login", **who))[1]["token"]
        async with chat_hub.enter("ann") as ann, chat_hub.enter(device) as here:
            await ann.chat("zoe", f"for {device}")
            await here.line()
            await ann.receipt("delivered")
    async with chat_hub.enter("zoe") as phone, chat_hub.enter("tablet") as tablet:
        assert await phone.texts(1) == ["for tablet"]
        assert await tablet.no_line()
