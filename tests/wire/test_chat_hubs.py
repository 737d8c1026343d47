"""Two hubs on one PostgreSQL: the truth is in the ledger, and a hint is enough to find it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.wire.conftest import Town

_numbers = itertools.count()


@pytest.fixture
async def towns(postgres_server: Any, tmp_path: Path) -> AsyncIterator[tuple[Town, Town]]:
    url = postgres_server.create_database(f"hubs_{next(_numbers)}")
    here, there = (Town(tmp_path / name, {"ledger": url}) for name in ("here", "there"))
    for town in (here, there):
        await town.start()
    await here.settle("ann", "bob", "cid")
    await there.hub.accounts.refresh()
    there.tokens = here.tokens
    yield here, there
    for town in (here, there):
        await town.hub.stop()


async def test_what_is_said_on_one_hub_is_told_on_the_other_once_it_looks(towns: tuple[Town, Town]) -> None:
    here, there = towns
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        for i in range(3):
            await ann.chat("bob", f"from here {i}")
        there.hub.chat.audience.look("ann+bob")
        assert await bob.texts(3) == [f"from here {i}" for i in range(3)]
        assert (await bob.chat("ann", "from there"))["n"] == 4
        here.hub.chat.audience.look("ann+bob")
        assert await ann.texts(1) == ["from there"]
        # Without any hint, the next line brings what was missed.
        await bob.chat("ann", "unheard")
        assert (await ann.chat("bob", "and you?"))["n"] == 6
        assert [line["n"] for line in await ann.lines(2)] == [5, 6]


async def test_a_repeat_on_another_hub_gets_the_number_of_the_first(towns: tuple[Town, Town]) -> None:
    here, there = towns
    async with here.enter("ann") as ann, there.enter("ann") as elsewhere:
        seq_id = ann.ids()
        first = await ann.chat("bob", "once", seq_id=seq_id)
        again = await elsewhere.chat("bob", "once", seq_id=seq_id)
        assert (first["code"], first["n"], again["code"], again["n"]) == (0, 1, 5, 1)


async def test_who_is_removed_on_one_hub_gets_and_says_nothing_on_the_other(towns: tuple[Town, Town]) -> None:
    here, there = towns
    async with here.enter("ann") as ann, there.enter("bob") as bob:
        group = (await ann.ask("group_create", name="club", members=["bob"]))["data"]["group"]
        await there.hub.chat.audience.look_up("bob")
        assert (await bob.line())["type"] == "group_create"
        await ann.ask("group_remove", group=group, user="bob")
        await ann.chat(group, "without bob")
        # The other hub has not heard of it; the ledger has.
        assert (await bob.chat(group, "still here"))["error"] == "not_allowed"
        there.hub.chat.audience.look(group)
        assert (await bob.line())["type"] == "group_remove"
        assert await bob.no_line()


async def test_somebody_who_has_just_registered_is_known_everywhere(towns: tuple[Town, Town]) -> None:
    here, there = towns
    await here.hub.people.register("zoe", "correct horse", "here")
    there.tokens["zoe"] = await here.hub.people.log_in("zoe", "correct horse", "here")
    async with there.enter("zoe") as zoe, there.enter("ann") as ann:
        assert (await ann.chat("zoe", "welcome"))["code"] == 0
        assert await zoe.texts(1) == ["welcome"]
