"""Lines that other hubs have stored: read together, sent once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import Raw

from duly.apps.chat import conversations as c
from duly.apps.chat.new_entries import CONVS, NEW_ENTRIES
from duly.core.operations import AppendEntry
from duly.identity.accounts import Principal, Role
from duly.storage.ledger import StreamEntry
from duly.wire.outgoing import LineFrame, encode
from tests.apps.chat.test_subscriptions import CONV, Room, Socket


@pytest.fixture
async def room() -> Room:
    room = Room()
    await room.begin()
    return room


@pytest.fixture
def queries(room: Room, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many streams new lines were read, by query; reading one stream alone counts as well."""
    found: list[int] = []
    one = room.ledger.entries

    async def read_many(places: Sequence[tuple[str, int]], limit: int = 100) -> list[list[StreamEntry]]:
        found.append(len(places))
        await asyncio.sleep(0)
        return [await one(stream, after, limit) for stream, after in places]

    async def read_one(stream: str, after: int = 0, limit: int = 100) -> list[StreamEntry]:
        found.append(1)
        return await one(stream, after, limit)

    monkeypatch.setattr(room.ledger, "entries_after", read_many)
    monkeypatch.setattr(room.ledger, "entries", read_one)
    return found


async def said_elsewhere(room: Room, conv: str, *lines: LineFrame) -> None:
    """Stores lines as another hub does."""
    now = room.clock.now()
    await room.ledger.write(*(AppendEntry(c.stream(conv), encode(line), now) for line in lines))


async def test_lines_of_other_hubs_share_a_query(room: Room, queries: list[int]) -> None:
    convs = [f"ann{i}+bob" for i in range(200)]
    for conv in convs:
        await said_elsewhere(room, conv, LineFrame("one_chat", "1_1", conv.partition("+")[0]))
        room.subscriptions.refresh(conv)
    await room.settle()
    assert sorted(room.bob.told) == [(1, 1)] * 200
    assert len(queries) == -(-200 // CONVS)


async def test_a_line_that_is_hinted_while_another_is_read_is_sent(room: Room, queries: list[int]) -> None:
    line = LineFrame("one_chat", "1_1", "ann")
    await said_elsewhere(room, CONV, line)
    room.subscriptions.refresh(CONV)
    while not queries:  # the query is under way
        await asyncio.sleep(0)
    await said_elsewhere(room, CONV, line)
    room.subscriptions.refresh(CONV)
    await room.settle()
    assert room.bob.told == [(1, 1), (2, 1)]


async def test_a_line_that_is_told_here_while_it_is_read_is_sent_once(room: Room, queries: list[int]) -> None:
    await said_elsewhere(room, CONV, LineFrame("one_chat", "1_1", "ann"))
    room.subscriptions.refresh(CONV)
    while not queries:
        await asyncio.sleep(0)
    line = LineFrame("one_chat", "1_1", "ann")
    room.subscriptions.tell(CONV, 1, c.show(CONV, 1, line, room.clock.now()), Socket(), room.clock.now())
    await room.settle()
    assert room.bob.told == [(1, 1)]


async def test_many_new_entries_of_one_conversation_are_all_sent(room: Room) -> None:
    lines = [LineFrame("one_chat", f"1_{n}", "ann") for n in range(3 * NEW_ENTRIES)]
    await said_elsewhere(room, CONV, *lines)
    room.subscriptions.refresh(CONV)
    await room.settle()
    assert room.bob.told == [(n + 1, 1) for n in range(3 * NEW_ENTRIES)]


async def test_a_connection_that_is_behind_reads_up_to_the_new_line(room: Room) -> None:
    second = Socket()
    behind = room.connections.add(second, Principal("bob", Role.USER))
    await room.subscriptions.load_subscriptions(behind, None)
    await room.say()  # the second connection still waits for its welcome
    room.subscriptions.begin(behind)
    await room.settle()
    behind.subscriptions[CONV].told = 0
    await said_elsewhere(room, CONV, LineFrame("one_chat", "1_2", "ann"))
    second.told.clear()
    room.subscriptions.refresh(CONV)
    await room.settle()
    assert room.bob.told == [(1, 1), (2, 1)]
    assert second.told == [(1, 1), (2, 1)]


async def test_a_person_removed_at_another_hub_gets_the_line_that_says_so_and_no_later_one(
    room: Room,
) -> None:
    room.connections.subscribe(room.subscriber, "#g", 0, 0)
    said = LineFrame("group_chat", "1_1", "ann")
    removed = LineFrame("group_remove", "1_2", "ann", Raw(b'{"group":"#g","user":"bob"}'))
    await said_elsewhere(room, "#g", said, removed, said)
    room.subscriptions.refresh("#g")
    await room.settle()
    assert room.bob.told == [(1, 1), (2, 1)]
    assert "#g" not in room.subscriber.subscriptions
