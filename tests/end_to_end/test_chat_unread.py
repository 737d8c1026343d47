"""What is unread: what others have said since, and is still there to be read."""

from __future__ import annotations

from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.people import Person


async def unread(person: Person) -> int:
    (one,) = (await person.ask("conversations"))["data"]["conversations"]
    return int(one["unread"])


async def test_own_lines_are_not_unread(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        for i in range(3):
            await ann.chat("bob", f"hello {i}")
        assert await unread(ann) == 0
        assert await unread(bob) == 3
        await bob.chat("ann", "an answer, without having read")
        assert await unread(bob) == 3, "saying something is not reading"
        assert await unread(ann) == 1
        await bob.say("read", conv="ann+bob", n=2)
        await ann.receipt("read")
        assert await unread(bob) == 1


async def test_what_is_gone_and_what_only_tells_of_it_is_not_unread(chat_hub: HubWithPeople) -> None:
    async with chat_hub.enter("ann") as ann, chat_hub.enter("bob") as bob:
        await ann.chat("bob", "one")
        n = (await ann.chat("bob", "two"))["n"]
        await ann.ask("edit", conv="ann+bob", n=n, data={"text": "too"})
        assert await unread(bob) == 2
        await ann.ask("delete", conv="ann+bob", n=n)
        assert await unread(bob) == 1


async def test_the_edit_of_a_line_that_was_deleted_or_has_expired_tells_nothing(
    chat_hub: HubWithPeople,
) -> None:
    soon = 60_000
    async with chat_hub.enter("ann") as ann:
        exp = chat_hub.clock.now() // 1000 + soon
        n = (await ann.chat("bob", "until then", exp=exp))["n"]
        await ann.ask("edit", conv="ann+bob", n=n, data={"text": "a secret until then"})
        page = await ann.history("ann+bob")
        assert page["lines"][1]["data"] == {"n": n, "data": {"text": "a secret until then"}}
        chat_hub.clock.seconds += 61
        page = await ann.history("ann+bob")
        assert page["lines"][0]["type"] == "expired"
        assert page["lines"][1]["data"] == {"n": n}
