"""What is not acknowledged is told again: from whichever hub it was said, and after coming back."""

from __future__ import annotations

import asyncio

import pytest

from duly.apps.chat import subscriptions
from duly.core.retry import RetryPolicy
from duly.core.units import MS
from tests.end_to_end.conftest import HubWithPeople
from tests.end_to_end.people import Person
from tests.end_to_end.raw import Json
from tests.guard import GUARD

SOON = RetryPolicy.exponential(300 * MS, 600 * MS, jitter=0.0)


def hurry(*chat_hubs: HubWithPeople) -> None:
    """Tell again after 0.3 s instead of 5."""
    for chat_hub in chat_hubs:
        chat_hub.hub.chat.subscriptions._again = SOON


async def told(person: Person, n: int, times: int) -> list[int]:
    """The attempts with which a line is told, the first so many."""
    attempts: list[int] = []
    while len(attempts) < times:
        line = await person.line(10)
        if line["n"] == n:
            attempts.append(line.get("attempt", 1))
    return attempts


async def receipts(person: Person, conv: str, n: int) -> Json:
    answer: Json = (await person.ask("receipts", conv=conv, n=n))["data"]
    return answer


async def test_a_line_from_another_hub_is_told_again_until_it_is_acknowledged(
    chat_hubs: tuple[HubWithPeople, HubWithPeople],
) -> None:
    here, there = chat_hubs
    hurry(*chat_hubs)
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        bob.acking = False
        assert (await ann.chat("bob", "hello"))["n"] == 1
        assert await told(bob, 1, 3) == [1, 2, 3], "nobody has come or gone meanwhile"
        await bob.say("ack", conv="ann+bob", n=1)
        assert (await ann.receipt("delivered"))["n"] == 1
        assert await bob.no_line(1.5)


async def test_what_a_person_missed_is_sent_again_after_they_came_back(chat_hub: HubWithPeople) -> None:
    """They read on from the ledger, which ends after the engine has heard of their coming."""
    hurry(chat_hub)
    async with chat_hub.enter("ann") as ann:
        await ann.chat("bob", "hello")
        async with chat_hub.enter("bob") as bob:
            bob.acking = False
            assert await told(bob, 1, 3) == [1, 2, 3]


async def test_receipts_do_not_count_what_was_sent_to_the_authors_own_devices(
    chat_hub: HubWithPeople,
) -> None:
    """Only attempts to recipients count: bob was never connected."""
    async with chat_hub.enter("ann") as phone, chat_hub.enter("ann") as desk:
        desk.acking = False
        assert (await phone.chat("bob", "hello"))["n"] == 1
        assert (await desk.line())["n"] == 1
        assert (await receipts(phone, "ann+bob", 1))["attempts"] == 0


async def test_receipts_count_the_attempts_of_another_hub(
    chat_hubs: tuple[HubWithPeople, HubWithPeople], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "NOTED_AFTER", 100 * MS)
    here, there = chat_hubs
    hurry(*chat_hubs)
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        bob.acking = False
        await ann.chat("bob", "hello")
        await told(bob, 1, 1)
        async with asyncio.timeout(GUARD):
            while (await receipts(ann, "ann+bob", 1))["attempts"] == 0:
                await asyncio.sleep(0.02)
        await told(bob, 1, 2)
        async with asyncio.timeout(GUARD):
            while (found := await receipts(ann, "ann+bob", 1))["attempts"] < 3:
                await asyncio.sleep(0.02)
        assert (found["state"], found["delivered"]) == ("accepted", 0)
        await bob.say("ack", conv="ann+bob", n=1)
        await ann.receipt("delivered")
        found = await receipts(ann, "ann+bob", 1)
        assert (found["state"], found["attempts"]) == ("delivered", 0)


async def test_the_attempts_are_known_after_a_restart(
    chat_hubs: tuple[HubWithPeople, HubWithPeople], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "NOTED_AFTER", 50 * MS)
    here, there = chat_hubs
    hurry(*chat_hubs)
    async with there.enter("bob") as bob, here.enter("ann") as ann:
        bob.acking = False
        await ann.chat("bob", "hello")
        await told(bob, 1, 2)
        async with asyncio.timeout(GUARD):
            while (await receipts(ann, "ann+bob", 1))["attempts"] == 0:
                await asyncio.sleep(0.02)
    await there.restart()
    async with there.enter("ann") as ann:
        assert (await receipts(ann, "ann+bob", 1))["attempts"] != 0
