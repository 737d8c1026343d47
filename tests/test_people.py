"""People: registering, logging in, several sessions, logging out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from argon2 import PasswordHasher

from duly.auth import FORMER, Accounts, LoginGuard, Role
from duly.core.writes import Put
from duly.errors import Conflict, Malformed, NotAllowed, NotAuthenticated, Overloaded, TooManyLogins
from duly.ledgers import open_ledger
from duly.ledgers.memory import MemoryLedger
from duly.people import SESSIONS_KEPT, WAITING, People
from duly.testing.clocks import ManualClock

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
PASSWORD = "correct horse"


async def people_of(ledger: Any, *, open_: bool = True) -> People:
    accounts = Accounts(ledger)
    await accounts.refresh()
    return People(ledger, accounts, LoginGuard(), open_=open_, hasher=CHEAP)


@pytest.fixture
async def people() -> AsyncIterator[People]:
    made = await people_of(MemoryLedger(ManualClock(10**15)))
    yield made
    made.close()


async def test_somebody_registers_logs_in_and_is_recognised(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    token = await people.log_in("ann", PASSWORD, "here", "phone")
    who = await people.recognise(token)
    assert who is not None
    assert (who.name, who.role) == ("ann", Role.USER)
    assert await people.recognise(token + "x") is None
    assert await people.recognise("duly_ann:guess") is None
    assert await people.recognise("duly_something") is None


async def test_neither_password_nor_token_is_in_the_ledger(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    token = await people.log_in("ann", PASSWORD, "here")
    shelves = people._ledger.disk.shelves  # type: ignore[attr-defined]
    stored = b"".join(body + name.encode() for items in shelves.values() for name, body in items.items())
    assert b"$argon2id$" in stored
    assert PASSWORD.encode() not in stored
    assert token.partition(":")[2].encode() not in stored


async def test_several_sessions_end_one_by_one_or_all_at_once(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    tokens = [await people.log_in("ann", PASSWORD, "here") for _ in range(3)]
    devices = {(await people.recognise(token)).device for token in tokens}  # type: ignore[union-attr]
    assert len(devices) == 3
    assert await people.log_out(tokens[0])
    assert await people.recognise(tokens[0]) is None
    assert await people.recognise(tokens[1]) is not None
    assert await people.log_out_everywhere("ann") == 2
    assert [await people.recognise(token) for token in tokens] == [None] * 3


async def test_the_oldest_login_ends_when_there_are_too_many(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    clock = people._ledger.clock
    assert isinstance(clock, ManualClock)
    tokens = []
    for _ in range(SESSIONS_KEPT + 2):
        clock.advance(1)
        tokens.append(await people.log_in("ann", PASSWORD, "here"))
    known = [await people.recognise(token) is not None for token in tokens]
    assert known == [False] * 2 + [True] * SESSIONS_KEPT


async def test_another_password_ends_all_sessions(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    token = await people.log_in("ann", PASSWORD, "here")
    with pytest.raises(NotAuthenticated):
        await people.change_password("ann", "wrong wrong", "another one", "here")
    await people.change_password("ann", PASSWORD, "another one", "here")
    assert await people.recognise(token) is None
    with pytest.raises(NotAuthenticated):
        await people.log_in("ann", PASSWORD, "here")
    assert await people.log_in("ann", "another one", "here")


@pytest.mark.parametrize("name", ["ann", "ghost"])
async def test_a_name_that_is_or_was_somebodys_is_not_given_away(people: People, name: str) -> None:
    await people.register("ann", PASSWORD, "here")
    await people._ledger.write(Put(FORMER, "ghost", b""))
    with pytest.raises(Conflict, match="taken"):
        await people.register(name, PASSWORD, "there")


async def test_bad_names_and_passwords_are_refused(people: People) -> None:
    for name in ("", "a b", "a+b", "#a", "~a", "hub", "a/b", "' OR 1=1 --"):
        with pytest.raises(Malformed):
            await people.register(name, PASSWORD, "here")
    for password in ("short", "x" * 2_000):
        with pytest.raises(Malformed):
            await people.register("ann", password, "here")


async def test_where_registration_is_closed_only_an_admin_registers() -> None:
    people = await people_of(MemoryLedger(ManualClock(10**15)), open_=False)
    with pytest.raises(NotAllowed):
        await people.register("ann", PASSWORD, "here")
    await people.register("ann", PASSWORD, "here", trusted=True)
    assert await people.log_in("ann", PASSWORD, "here")
    people.close()


async def test_guessing_is_slowed_down_by_name_and_by_address(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    for i in range(6):
        with pytest.raises(NotAuthenticated):
            await people.log_in("ann", "wrong wrong", f"address {i}")
    with pytest.raises(TooManyLogins):
        await people.log_in("ann", PASSWORD, "elsewhere")
    for i in range(6):
        with pytest.raises(NotAuthenticated):
            await people.log_in(f"nobody{i}", "wrong wrong", "one place")
    with pytest.raises(TooManyLogins):
        await people.log_in("bob", PASSWORD, "one place")
    for i in range(6):
        await people.register(f"user{i}", PASSWORD, "a busy one")
    with pytest.raises(TooManyLogins):
        await people.register("user9", PASSWORD, "a busy one")


async def test_hashing_does_not_stop_the_loop_and_a_crowd_is_told_to_wait() -> None:
    ledger = MemoryLedger()
    accounts = Accounts(ledger)
    people = People(ledger, accounts, LoginGuard(free=10_000), open_=True)
    await people.register("ann", PASSWORD, "here")
    logins = [asyncio.create_task(people.log_in("ann", PASSWORD, "here")) for _ in range(WAITING + 8)]
    longest, last = 0.0, time.perf_counter()
    while not any(task.done() for task in logins[:1]):
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    for task in logins[1:]:
        task.cancel()
    ended = await asyncio.gather(*logins, return_exceptions=True)
    assert any(isinstance(end, Overloaded) for end in ended)
    assert longest < 0.5
    people.close()


async def test_a_session_made_by_another_process_is_found_and_its_end_noticed(postgres_server: Any) -> None:
    url = postgres_server.create_database("people")
    async with await open_ledger(url) as one, await open_ledger(url) as other:
        here, there = await people_of(one), await people_of(other)
        await here.register("ann", PASSWORD, "here")
        token = await here.log_in("ann", PASSWORD, "here")
        assert await there.recognise(token) is not None
        await here.log_out_everywhere("ann")
        assert await there.refresh() == {"ann"}
        assert await there.recognise(token) is None
        here.close()
        there.close()
