"""Chat as a plain WebSocket client sees it: lines, numbers, acknowledgements, being away."""

from __future__ import annotations

import asyncio

import pytest

from duly.apps.chat import subscriptions
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.testing import ManualClock
from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.raw import curl

# ── lines ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_line_is_stored_numbered_and_told(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        ack = await ann.chat("bob", "hello")
        assert (ack["code"], ack["conv"], ack["n"]) == (0, "ann+bob", 1)
        line = await bob.line()
        assert (line["type"], line["from"], line["conv"], line["n"]) == ("one_chat", "ann", "ann+bob", 1)
        assert line["data"] == {"text": "hello"}
        assert abs(line["time"] - ann.welcome["time"]) < 60_000
        assert (await bob.chat("ann", "hi"))["n"] == 2
        assert (await ann.line())["n"] == 2
        assert await ann.no_line()  # what she said herself she knows from its server_ack


async def test_a_repeat_gets_the_conversation_and_number_of_the_first(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("ann") as tablet, chat_hub.enter("bob") as bob:
        seq_id = ann.ids()
        first = await ann.chat("bob", "once", seq_id=seq_id)
        again = [await who.chat("bob", "once", seq_id=seq_id) for who in (ann, tablet, ann)]
        assert [(f["code"], f["state"], f["conv"], f["n"]) for f in again] == [(5, "done", "ann+bob", 1)] * 3
        assert first["n"] == 1
        assert (await bob.line())["n"] == 1
        assert await bob.no_line()
        await chat_hub.restart()
    async with chat_hub.enter("ann") as ann:
        after = await ann.chat("bob", "once", seq_id=seq_id)
        assert (after["code"], after["conv"], after["n"]) == (5, "ann+bob", 1)
        other = await ann.chat("bob", "something else", seq_id=seq_id)
        assert (other["code"], other["error"]) == (2, "id_conflict")
    assert ("ann", "conflict") in await chat_hub.refused()


async def test_the_same_line_from_many_connections_at_once_is_stored_once(chat_hub: HubWithPeople) -> None:
    async with (
        chat_hub.enter("ann") as a, chat_hub.enter("ann") as b, chat_hub.enter("ann") as c,
        chat_hub.enter("bob") as bob,
    ):  # fmt: skip
        for i in range(20):
            seq_id = a.ids()
            acks = await asyncio.gather(*(who.chat("bob", f"line {i}", seq_id=seq_id) for who in (a, b, c)))
            assert [ack["n"] for ack in acks] == [i + 1] * 3
            assert sorted(ack["code"] for ack in acks) == [0, 5, 5]
        assert await bob.texts(20) == [f"line {i}" for i in range(20)]
        assert await bob.no_line()


async def test_the_senders_other_devices_see_the_line_too(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as phone, chat_hub.enter("ann") as tablet:
        await phone.chat("bob", "from the phone")
        line = await tablet.line()
        assert (line["from"], line["conv"], line["n"]) == ("ann", "ann+bob", 1)
        assert await phone.no_line()


async def test_a_line_by_http_is_told_like_any_other(chat_hub: HubWithPeople) -> None:
    frame = {"type": "one_chat", "seq_id": "1_0", "to": "bob", "data": {"text": "by curl"}}
    async with chat_hub.enter("bob") as bob:
        stale = await curl(f"{chat_hub.url}/v1/messages", chat_hub.tokens["ann"], body=frame)
        assert (stale.status, stale.json["error"]) == (400, "stale")
        frame["seq_id"] = bob.ids()
        answer = await curl(f"{chat_hub.url}/v1/messages?wait=5", chat_hub.tokens["ann"], body=frame)
        assert (answer.status, answer.json["conv"], answer.json["n"]) == (200, "ann+bob", 1)
        assert (await bob.line())["data"] == {"text": "by curl"}
        again = await curl(f"{chat_hub.url}/v1/messages", chat_hub.tokens["ann"], body=frame)
        assert (again.status, again.json["code"], again.json["n"]) == (200, 5, 1)
        question = {"type": "history", "seq_id": "q1", "data": {"conv": "ann+bob"}}
        asked = await curl(f"{chat_hub.url}/v1/messages?wait=60", chat_hub.tokens["ann"], body=question)
        assert (asked.status, asked.json["data"]["last"]) == (200, 1), "an answer is all there is"


# ── being away ───────────────────────────────────────────────────────────────────────────────────


async def test_who_was_away_finds_everything_in_order_once(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("cid") as cid:
        for i in range(30):
            await (ann if i % 3 else cid).chat("bob", str(i))
    await chat_hub.restart()
    async with chat_hub.enter("bob") as bob:
        assert bob.welcome["cursors"] == {"ann+bob": 0, "bob+cid": 0, "~bob": 0}
        lines = await bob.lines(30)
        assert await bob.no_line()
    for conv, expected in (("ann+bob", 20), ("bob+cid", 10)):
        assert [f["n"] for f in lines if f["conv"] == conv] == list(range(1, expected + 1))
    async with chat_hub.enter("bob") as bob:
        assert bob.welcome["cursors"] == {"ann+bob": 20, "bob+cid": 10, "~bob": 0}
        assert await bob.no_line()


async def test_a_client_with_its_own_cursor_goes_on_from_there(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        for i in range(5):
            await ann.chat("bob", str(i))
        await bob.lines(5)
    async with chat_hub.enter("bob", {"ann+bob": 3}) as bob:
        assert [f["n"] for f in await bob.lines(2)] == [4, 5]
        assert await bob.no_line()
    async with chat_hub.enter("bob", {"ann+bob": 99, "foreign": 7}) as bob:
        assert bob.welcome["cursors"]["ann+bob"] == 5


async def test_a_long_absence_does_not_drown_the_client(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        await asyncio.gather(*(ann.say("one_chat", seq_id=ann.ids(), to="bob", data=i) for i in range(2_500)))
        await ann.first(lambda f: f["type"] == "server_ack" and f["n"] == 2_500)
    async with chat_hub.enter("bob") as bob:
        bob.acking = False
        ahead = [await bob.line() for _ in range(1_000)]
        assert await bob.no_line()
        await bob.say("ack", conv="ann+bob", n=1_000)
        bob.acking = True
        rest = await bob.lines(1_500)
        assert [f["n"] for f in ahead + rest] == list(range(1, 2_501))
        assert [f["data"] for f in ahead + rest] == list(range(2_500))


async def test_what_is_not_acknowledged_is_told_again_ever_more_slowly(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        chat_hub.hub.chat.subscriptions._again = RetryPolicy.exponential(100 * MS, SECOND, factor=3)
        bob.acking = False
        await ann.chat("bob", "are you there?")
        assert "attempt" not in await bob.line()
        assert (await ann.ask("receipts", conv="ann+bob", n=1))["data"]["attempts"] == 1
        again = [await bob.line() for _ in range(2)]
        assert [(f["n"], f["attempt"]) for f in again] == [(1, 2), (1, 3)]
        assert (await ann.ask("receipts", conv="ann+bob", n=1))["data"]["attempts"] == 3
        await bob.say("ack", conv="ann+bob", n=1)
        await ann.receipt("delivered")
        assert (await ann.ask("receipts", conv="ann+bob", n=1))["data"]["attempts"] == 0
        assert await bob.no_line()


# ── receipts, reading, typing ────────────────────────────────────────────────────────────────────


async def test_the_sender_is_told_who_has_it_and_who_has_read_it(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        await ann.chat("bob", "one")
        await ann.chat("bob", "two")
        asked = (await ann.ask("receipts", conv="ann+bob", n=2))["data"]
        assert (asked["state"], asked["delivered"], asked["read"], asked["of"]) == ("accepted", 0, 0, 1)
        async with chat_hub.enter("bob") as bob:
            await bob.lines(2)
            receipt = await ann.first(lambda f: f["type"] == "receipt" and f["n"] == 2)
            assert (receipt["from"], receipt["conv"], receipt["data"]) == (
                "bob", "ann+bob", {"state": "delivered"},
            )  # fmt: skip
            asked = (await ann.ask("receipts", conv="ann+bob", n=2))["data"]
            assert (asked["state"], asked["delivered_to"], asked["read_by"]) == ("delivered", ["bob"], [])
            await bob.say("read", conv="ann+bob", n=2)
            assert (await ann.receipt("read"))["n"] == 2
            asked = (await ann.ask("receipts", conv="ann+bob", n=2))["data"]
            assert (asked["state"], asked["read_by"]) == ("read", ["bob"])
            shown = (await bob.ask("conversations"))["data"]["conversations"]
            assert shown == [
                {"conv": "ann+bob", "last": 2, "delivered": 2, "read": 2, "unread": 0, "with": "ann"}
            ]


async def test_typing_and_presence_are_told_to_those_who_are_there_and_kept_nowhere(
    chat_hub: HubWithPeople,
) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob, chat_hub.enter("eve") as eve:
        await ann.chat("bob", "x")
        await bob.line()
        await bob.say("typing", conv="ann+bob")
        typing = await ann.first(lambda f: f["type"] == "typing")
        assert (typing["from"], typing["conv"]) == ("bob", "ann+bob")
        await eve.say("typing", conv="ann+bob")
        assert (await eve.hear())["error"] == "not_allowed"
        await ann.ask("friend_ask", user="bob")
        await bob.ask("friend_accept", user="ann")
        async with chat_hub.enter("bob"):
            pass  # a second device comes and goes: bob is there all the time
        await ann.say("presence", data={"online": True, "status": "away"})
        # That ann came may be told late, to somebody who has become her friend since.
        seen = await bob.first(lambda f: f["type"] == "presence" and "status" in f["data"])
        assert (seen["from"], seen["data"]["status"]) == ("ann", "away")
    subscribers = chat_hub.hub.chat.connections.of_person
    await chat_hub.until(lambda: not subscribers("ann") and not subscribers("bob"))
    async with chat_hub.enter("ann") as ann:
        # That bob has left may be told late as well, to her new connection; that he came is told after it.
        async with chat_hub.enter("bob"):
            came = await ann.first(lambda f: f["type"] == "presence" and f["data"]["online"])
        # That he is there may be told twice: to her when she came, and to his friends when he did.
        left = await ann.first(lambda f: f["type"] == "presence" and not f["data"]["online"])
        assert (came["from"], left["from"], left["data"]) == ("bob", "bob", {"online": False})
        assert not any(f["type"] == "presence" for f in eve.heard)


# ── history, edit, delete, expiry, size ──────────────────────────────────────────────────────────


async def test_history_comes_by_page_oldest_first(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        for i in range(1, 121):
            await ann.chat("bob", str(i))
        newest = await ann.history("ann+bob", limit=50)
        assert [f["n"] for f in newest["lines"]] == list(range(71, 121))
        assert (newest["first"], newest["last"]) == (1, 120)
        older = await ann.history("ann+bob", before=newest["lines"][0]["n"], limit=50)
        assert [f["n"] for f in older["lines"]] == list(range(21, 71))
        oldest = await ann.history("ann+bob", before=21, limit=50)
        assert [f["data"]["text"] for f in oldest["lines"]] == [str(i) for i in range(1, 21)]
        assert (await ann.ask("history", conv="ann+bob", limit=10_000))["error"] == "malformed"


async def test_a_page_of_history_fits_into_a_frame(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        for i in range(6):
            await ann.chat("bob", f"{i}" * 60_000)
        page = await ann.history("ann+bob")
        assert [f["n"] for f in page["lines"]] == [4, 5, 6]
        page = await ann.history("ann+bob", before=4)
        assert [f["n"] for f in page["lines"]] == [1, 2, 3]


async def test_an_edit_is_a_line_of_its_own_and_changes_what_is_seen_later(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        await ann.chat("bob", "teh end")
        await bob.line()
        ack = await ann.ask("edit", conv="ann+bob", n=1, data={"text": "the end"})
        assert (ack["code"], ack["n"]) == (0, 2)
        edit = await bob.line()
        assert (edit["type"], edit["n"], edit["data"]) == ("edit", 2, {"n": 1, "data": {"text": "the end"}})
        page = (await bob.history("ann+bob"))["lines"]
        assert (page[0]["data"], page[0]["edited"]) == ({"text": "the end"}, True)
        assert page[1]["data"] == {"n": 1, "data": {"text": "the end"}}
        for refused in (
            await bob.ask("edit", conv="ann+bob", n=1, data="mine"),
            await ann.ask("edit", conv="ann+bob", n=2, data="an edit cannot be edited"),
            await ann.ask("edit", conv="ann+bob", n=7, data="not there"),
        ):
            assert (refused["code"], refused["error"]) == (3, "not_allowed")


class TickingClock(ManualClock):
    """Every look at it takes a millisecond, as storing a line may."""

    def now(self) -> int:
        self.advance(0.001)
        return super().now()


async def test_a_line_and_an_edit_have_the_same_time_when_they_come_and_in_the_history(
    chat_hub: HubWithPeople,
) -> None:
    chat_hub.hub.ledger.clock = TickingClock(chat_hub.hub.ledger.clock.now())
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        await ann.chat("bob", "teh end")
        await ann.ask("edit", conv="ann+bob", n=1, data={"text": "the end"})
        seen = [(await bob.line())["time"] for _ in range(2)]
        assert [line["time"] for line in (await bob.history("ann+bob"))["lines"]] == seen


async def test_what_is_deleted_is_gone_from_the_ledger_with_its_edits(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        await ann.chat("bob", "the secret")
        await ann.ask("edit", conv="ann+bob", n=1, data={"text": "the other secret"})
        ack = await ann.ask("delete", conv="ann+bob", n=1)
        assert (ack["code"], ack["n"]) == (0, 3)
        again = await ann.ask("edit", conv="ann+bob", n=1, data={"text": "back"})
        assert again["error"] == "not_allowed"
    async with chat_hub.enter("bob") as bob:
        lines = await bob.lines(3)
        assert [(f["type"], f.get("data")) for f in lines] == [
            ("deleted", None), ("edit", {"n": 1}), ("delete", {"conv": "ann+bob", "n": 1}),
        ]  # fmt: skip
        assert lines[0]["from"] == "ann"
    stored = b"".join(entry.body for entry in await chat_hub.hub.ledger.entries("chat/ann+bob"))
    assert b"secret" not in stored


async def test_an_expired_line_keeps_its_number_alone(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        soon = ann.welcome["time"] + 30_000
        await ann.chat("bob", "only now", exp=soon)
        await ann.chat("bob", "always")
        late = await ann.chat("bob", "too late", exp=ann.welcome["time"] - 10_000)
        assert late["error"] == "expired"
    chat_hub.clock.seconds += 60
    async with chat_hub.enter("bob") as bob:
        first, second = await bob.lines(2)
        assert (first["type"], first["n"], "data" in first) == ("expired", 1, False)
        assert second["data"] == {"text": "always"}


async def test_a_line_has_a_size_limit(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        answer = await ann.chat("bob", "x" * 70_000)
        assert (answer["code"], answer["error"]) == (2, "too_large")
    assert (await chat_hub.hub.ledger.extent("chat/ann+bob")).last == 0


@pytest.mark.parametrize("type_", ["one_chat", "group_chat"])
async def test_a_line_with_a_field_of_its_own_is_refused_and_its_id_stays_free(
    chat_hub: HubWithPeople, type_: str
) -> None:
    """Readers get `data` alone: such a field would be lost, and another one under the same id not noticed."""
    async with chat_hub.enter("ann") as ann:
        to = (await ann.ask("group_create", name="club", members=["bob"]))["data"]["group"]
        to = "bob" if type_ == "one_chat" else to
        id_ = ann.ids()
        await ann.say(type_, seq_id=id_, to=to, text="hello")
        refused = await ann.first(lambda f: f.get("seq_id") == id_)
        assert (refused["code"], refused["error"]) == (2, "malformed")
        assert refused["detail"] == f"a {type_} has no field text: put it into data"
        assert (await ann.chat(to, "hello", seq_id=id_))["code"] == 0


async def test_who_joined_later_has_no_receipt_of_a_line_they_may_not_see(chat_hub: HubWithPeople) -> None:
    """Cid was removed before he had it, and came back: his cursor is beyond the line that he never got."""
    async with chat_hub.enter("ann") as ann:
        club = await ann.ask("group_create", name="club", members=["bob", "cid"], history="joined")
        group = club["data"]["group"]
        n = (await ann.chat(group, "hello"))["n"]
        assert (await ann.ask("receipts", conv=group, n=n))["data"]["of"] == 2
        await ann.ask("group_remove", group=group, user="cid")
        await ann.ask("group_invite", group=group, user="cid")
        async with chat_hub.enter("cid") as cid:
            await cid.ask("group_join", group=group)
        of_it = (await ann.ask("receipts", conv=group, n=n))["data"]
        assert (of_it["of"], of_it["delivered"], of_it["delivered_to"]) == (1, 0, [])


async def test_a_person_in_more_groups_than_a_welcome_holds_gets_the_lines_of_all(
    chat_hub: HubWithPeople, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "WELCOMED", 3)
    async with chat_hub.enter("ann") as ann:
        made = [await ann.ask("group_create", name=f"g{i}", members=["bob"]) for i in range(6)]
        groups = [one["data"]["group"] for one in made]
        async with chat_hub.enter("bob") as bob:
            assert {line["conv"] for line in await bob.lines(6)} == set(groups)
        async with chat_hub.enter("bob") as bob:
            assert len(bob.welcome["cursors"]) == 3
            for group in groups:
                await ann.chat(group, "hello")
            lines = await bob.lines(6)
            assert [(line["conv"], line["n"]) for line in lines] == [(group, 2) for group in groups]


async def test_an_optional_field_of_a_question_may_be_null(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann:
        await ann.chat("bob", "hello")
        await ann.say("history", seq_id="q1", data={"conv": "ann+bob", "before": None, "limit": None})
        said = await ann.hear_of("q1")
        assert (said["code"], [line["n"] for line in said["data"]["lines"]]) == (0, [1])
