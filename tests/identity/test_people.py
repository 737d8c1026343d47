"""People: registering, logging in, several sessions, logging out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from duly.core.operations import PutItem
from duly.core.units import MINUTE
from duly.errors import Conflict, Malformed, NotAllowed, NotAuthenticated, Overloaded, TooManyLogins
from duly.identity.accounts import FORMER, Accounts, Role
from duly.identity.login_guard import LoginGuard
from duly.identity.people import SESSIONS_KEPT, People
from duly.storage import open_ledger
from duly.storage.memory import MemoryLedger
from duly.testing.clocks import ManualClock

PASSWORD = "correct horse"


async def people_of(ledger: Any, *, open_: bool = True) -> People:
    accounts = Accounts(ledger)
    await accounts.refresh()
    return People(ledger, accounts, LoginGuard(), open_=open_)


@pytest.fixture
async def people() -> AsyncIterator[People]:
    made = await people_of(MemoryLedger(ManualClock(10**15)))
    yield made
    made.close()


async def test_a_person_registers_logs_in_and_is_recognised(people: People) -> None:
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
    assert isinstance(people._ledger, MemoryLedger)
    buckets = people._ledger.disk.buckets
    stored = b"".join(body + name.encode() for items in buckets.values() for name, body in items.items())
    assert b"$argon2id$" in stored
    assert PASSWORD.encode() not in stored
    assert token.partition(":")[2].encode() not in stored


async def test_several_sessions_end_one_by_one_or_all_at_once(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    tokens = [await people.log_in("ann", PASSWORD, "here") for _ in range(3)]
    known = [await people.recognise(token) for token in tokens]
    devices = {who.device for who in known if who is not None}
    assert len(devices) == 3
    assert await people.log_out(tokens[0])
    assert await people.recognise(tokens[0]) is None
    assert await people.recognise(tokens[1]) is not None
    assert await people.log_out_everywhere("ann") == 2
    assert [await people.recognise(token) for token in tokens] == [None] * 3


@pytest.mark.parametrize("end", ["another password", "log out", "log out everywhere"])
async def test_a_network_is_known_after_its_sessions_have_ended_and_after_a_restart(
    people: People, end: str
) -> None:
    """Guesses from elsewhere do not lock out a person who is at home."""
    await people.register("ann", PASSWORD, "here")
    token = await people.log_in("ann", PASSWORD, "home")
    password = PASSWORD
    if end == "another password":
        password = "battery staple"
        await people.change_password("ann", PASSWORD, password, "home")
    elif end == "log out":
        await people.log_out(token)
    else:
        await people.log_out_everywhere("ann")
    again = await people_of(people._ledger)
    try:
        for n in range(12):
            with pytest.raises((NotAuthenticated, TooManyLogins)):
                await again.log_in("ann", "a guess", f"elsewhere {n % 3}")
        with pytest.raises(TooManyLogins):
            await again.log_in("ann", password, "elsewhere 4")
        assert await again.log_in("ann", password, "home")
    finally:
        again.close()


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
async def test_a_name_that_is_or_was_a_persons_is_not_given_away(people: People, name: str) -> None:
    await people.register("ann", PASSWORD, "here")
    await people._ledger.write(PutItem(FORMER, "ghost", b""))
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


def wrong(people: People, name: str, address: str) -> Any:
    return people.log_in(name, "wrong wrong", address)


async def test_a_burst_of_guesses_is_counted_before_it_is_judged(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    ended: list[Any] = []
    for _ in range(3):
        guesses = [wrong(people, "ann", "192.0.2.7") for _ in range(64)]
        ended += await asyncio.gather(*guesses, return_exceptions=True)
    judged = [end for end in ended if type(end) is NotAuthenticated]
    assert len(judged) == 5
    assert {type(end) for end in ended} <= {NotAuthenticated, TooManyLogins, Overloaded}
    with pytest.raises(TooManyLogins) as refused:
        await people.log_in("ann", PASSWORD, "192.0.2.7")
    assert 0 < refused.value.wait <= MINUTE


async def test_an_account_that_strangers_guess_at_is_open_to_its_owner(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    await people.log_in("ann", PASSWORD, "198.51.100.1")
    for n in range(200):
        with pytest.raises(NotAuthenticated):
            await wrong(people, "ann", f"192.0.2.{n}")
    with pytest.raises(TooManyLogins):
        await people.log_in("ann", PASSWORD, "203.0.113.9")  # never seen here: slowed down like the others
    await people.log_in("ann", PASSWORD, "198.51.100.1")
    people._guard._known.clear()  # another hub, or this one after a restart, finds it in the ledger
    await people.log_in("ann", PASSWORD, "198.51.100.1")


async def test_an_address_that_guesses_stays_out_however_many_others_come(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    await people.register("bob", PASSWORD, "here")
    for _ in range(5):
        with pytest.raises(NotAuthenticated):
            await wrong(people, "ann", "192.0.2.7")
    for n in range(10_100):
        people._guard.begin(f"user{n}", f"10.{n >> 8}.{n & 255}.1", people._now())
    with pytest.raises(TooManyLogins):
        await people.log_in("ann", PASSWORD, "192.0.2.7")


async def test_the_addresses_of_one_ipv6_network_are_one(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    for n in range(5):
        with pytest.raises(NotAuthenticated):
            await wrong(people, "ann", f"2001:db8::{n}")
    with pytest.raises(TooManyLogins):
        await people.log_in("ann", PASSWORD, "2001:db8::ffff")
    await people.log_in("ann", PASSWORD, "2001:db8:0:1::1")


async def test_those_who_mistype_and_then_remember_are_not_counted(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    for _ in range(30):
        for _ in range(4):
            with pytest.raises(NotAuthenticated):
                await wrong(people, "ann", "192.0.2.7")
        await people.log_in("ann", PASSWORD, "192.0.2.7")
        assert isinstance(people._ledger.clock, ManualClock)
        people._ledger.clock.advance(5 * MINUTE)


async def test_strangers_register_only_so_often(people: People) -> None:
    for n in range(10):
        await people.register(f"user{n}", PASSWORD, "a busy one")
    with pytest.raises(TooManyLogins):
        await people.register("user10", PASSWORD, "a busy one")
    await people.register("user10", PASSWORD, "another")


async def test_a_flood_of_strangers_costs_those_who_were_here_one_hash() -> None:
    """With real hashes, and far more of them than can be worked out."""
    ledger = MemoryLedger()
    accounts = Accounts(ledger)
    people = People(ledger, accounts, LoginGuard(), open_=True)
    await people.register("ann", PASSWORD, "here")
    await people.log_in("ann", PASSWORD, "198.51.100.1")
    flood = [asyncio.create_task(wrong(people, f"u{n}", f"192.0.{n % 100}.1")) for n in range(300)]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    login = asyncio.create_task(people.log_in("ann", PASSWORD, "198.51.100.1"))
    while not login.done():
        await asyncio.sleep(0)
        now = loop.time()
        longest, last = max(longest, now - last), now
    assert (await people.recognise(await login)) is not None
    assert sum(task.done() and isinstance(task.exception(), NotAuthenticated) for task in flood) < 20
    assert longest < 0.5, "hashing does not stop the loop"
    for task in flood:
        task.cancel()
    ended = await asyncio.gather(*flood, return_exceptions=True)
    assert any(isinstance(end, Overloaded) and end.wait for end in ended)
    people.close()


async def test_a_password_that_is_changed_while_it_is_checked_lets_no_caller_in(people: People) -> None:
    await people.register("ann", PASSWORD, "here")
    right = people._hashing.run

    async def slow(work: Any, network: str, *, first: bool = False) -> Any:
        judged = await right(work, network, first=first)
        people._hashing.run = right  # type: ignore[method-assign]  # while it hashes
        await people.change_password("ann", PASSWORD, "battery staple", "here")
        return judged

    people._hashing.run = slow  # type: ignore[method-assign]  # while it hashes
    with pytest.raises(NotAuthenticated):
        await people.log_in("ann", PASSWORD, "here")
    assert await people._ledger.bucket("sessions/ann") == {}


async def test_a_session_made_by_another_process_is_found_and_its_end_noticed(postgres_server: Any) -> None:
    url = postgres_server.create_database()
    async with await open_ledger(url) as one, await open_ledger(url) as other:
        here, there = await people_of(one), await people_of(other)
        await here.register("ann", PASSWORD, "here")
        token = await here.log_in("ann", PASSWORD, "here")
        assert await there.recognise(token) is not None
        await here.log_out_everywhere("ann")
        assert {who.name for who in await there.refresh()} == {"ann"}
        assert await there.recognise(token) is None
        here.close()
        there.close()
