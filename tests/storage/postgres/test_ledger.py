"""Many hubs on one PostgreSQL: what only shows when two write at once, or the server goes away."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, VerdictKind
from duly.core.trusted_time import AHEAD
from duly.core.units import HOUR
from duly.errors import LedgerError, LedgerTooNew, LedgerUnavailable, Malformed, MissingExtra, Stopped
from duly.storage import open_ledger, sql
from duly.storage.postgres.ledger import PostgresLedger
from duly.testing import ManualClock
from tests import servers
from tests.guard import GUARD
from tests.storage.making import admit, message, until


@pytest.fixture
def url(postgres_server: servers.Postgres) -> str:
    return postgres_server.create_database()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def hubs(url: str, clock: ManualClock) -> AsyncIterator[tuple[PostgresLedger, PostgresLedger]]:
    async with await PostgresLedger.open(url, clock) as one, await PostgresLedger.open(url, clock) as two:
        yield one, two


Hubs = tuple[PostgresLedger, PostgresLedger]


async def until_blocked(observer: asyncpg.Connection[Any], hub: PostgresLedger) -> int:
    """Come back when the hub's flush waits for a lock; the number of its server process."""
    pid: int = hub._flusher.line.get_server_pid()
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = $1"
    async with asyncio.timeout(GUARD):
        while not await observer.fetchval(waits, pid):
            pass
    return pid


# ── two at once ──────────────────────────────────────────────────────────────────────────────────


async def test_two_processes_opening_at_once_migrate_once(url: str, clock: ManualClock) -> None:
    ledgers = await asyncio.gather(*(PostgresLedger.open(url, clock) for _ in range(4)))
    connection = await asyncpg.connect(url)
    assert await connection.fetchval("SELECT count(*) FROM duly_schema WHERE number = 1") == 1
    await connection.close()
    assert [(await ledger.admit(message())).fresh for ledger in ledgers] == [True, False, False, False]
    for ledger in ledgers:
        await ledger.close()


FIRST_COLUMNS = (
    "key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body"
)


class LockingLedger(PostgresLedger):
    """A hub of before the flush in one statement."""

    async def _verify(self, groups: list[w.Group]) -> list[w.Results] | None:
        return None


async def test_a_ledger_of_the_first_schema_is_upgraded_with_its_data_kept(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor = "SELECT until, 0, 0, 0, 0 FROM duly_floor"  # all that the first one knew of it
    monkeypatch.setitem(sql.queries("postgres"), "floor", floor)
    admit = sql.queries("postgres")["admit"]  # and it listed nothing
    admit = admit.replace("body, listed)", "body)").replace("SELECT *", f"SELECT {FIRST_COLUMNS}")
    admit = admit.replace("\nON CONFLICT", f" AS new ({FIRST_COLUMNS}, listed)\nON CONFLICT")
    monkeypatch.setitem(sql.queries("postgres"), "admit", admit)
    with monkeypatch.context() as first:
        only = sql.migrations("postgres")[:1]
        first.setattr(sql, "migrations", lambda dialect: only)
        old = await LockingLedger.open(url, clock)
    await old.admit_many([message(0), message(1)])
    await old.write(w.Advance(message(0).key, State.DONE, 1), w.AppendEntry("log", b"x", 1))
    async with await PostgresLedger.open(url, clock) as new:
        assert (await old.admit(message(2))).fresh, "a hub that runs on goes on during the upgrade"
        repeats = await new.admit_many([message(n) for n in range(3)])
        assert [v.state for v in repeats] == [State.DONE, State.ACCEPTED, State.ACCEPTED]
        assert [e.body for e in await new.entries("log")] == [b"x"]
        await new.write(w.PutItem("users", "eve", b"1"))
        assert await new.bucket("users") == {"eve": b"1"}
    await old.close()


async def test_a_new_name_that_both_hubs_want_is_given_once(hubs: Hubs) -> None:
    names = [f"n{i}" for i in range(40)]

    async def want(hub: PostgresLedger, names: list[str]) -> list[str]:
        body = hub.worker.encode()
        return [name for name in names if await hub.apply(w.PutNewItem("users", name, body))]

    asked = [want(hub, order) for order in (names, names[::-1]) for hub in hubs]
    got = await asyncio.gather(*asked)
    assert sorted(name for one in got for name in one) == sorted(names)
    stands = await hubs[0].bucket("users")
    for hub, won in zip(hubs * 2, got, strict=True):
        assert {stands[name] for name in won} <= {hub.worker.encode()}


async def test_a_new_name_whose_other_taker_is_in_the_middle_of_it_is_waited_for(
    hubs: Hubs, url: str
) -> None:
    await hubs[1].write(w.AppendEntry("log", b"so that it is connected", 1))
    observer = await asyncpg.connect(url)
    for name, commits in (("eve", True), ("bob", False)):
        with contextlib.suppress(ZeroDivisionError):
            async with hubs[0].transaction() as tx:
                assert (await tx.write(w.PutNewItem("users", name, b"first"))).values == [True]
                second = asyncio.ensure_future(hubs[1].write(w.PutNewItem("users", name, b"second")))
                await until_blocked(observer, hubs[1])
                if not commits:
                    raise ZeroDivisionError
        assert (await second).values == [not commits]
    assert await hubs[0].bucket("users") == {"bob": b"second", "eve": b"first"}
    await observer.close()


@pytest.mark.parametrize(
    ("first", "second", "finds"),
    [
        (w.DropItem("users", "eve"), w.DropItem("users", "eve"), False),
        (w.DropItem("users", "eve"), w.PutItem("users", "eve", b"2"), True),
        (w.DropItem("users", "eve"), w.PutNewItem("users", "eve", b"2"), True),
        (w.PutItem("users", "eve", b"1"), w.DropItem("users", "eve"), True),
    ],
)
async def test_an_item_that_another_hub_is_changing_is_waited_for(
    hubs: Hubs, url: str, first: w.Write, second: w.Write, finds: bool
) -> None:
    await hubs[1].write(w.PutItem("users", "eve", b"0"))
    observer = await asyncpg.connect(url)
    async with hubs[0].transaction() as tx:
        await tx.write(first)
        waiting = asyncio.ensure_future(hubs[1].write(second))
        await until_blocked(observer, hubs[1])
    assert (await waiting).values == [finds]
    left = {} if isinstance(second, w.DropItem) else {"eve": b"2"}
    assert await hubs[0].bucket("users") == left
    await observer.close()


async def test_an_id_sent_to_both_hubs_is_fresh_once(hubs: Hubs) -> None:
    messages = [message(n) for n in range(200)]
    sent = [hub.admit(m) for m in messages for hub in hubs]
    backwards = [hub.admit_many(messages[::-1]) for hub in hubs]
    verdicts = await asyncio.gather(*sent)
    for batch in await asyncio.gather(*backwards):
        verdicts += batch
    assert [v.kind for v in verdicts].count(VerdictKind.FRESH) == 200
    assert {v.kind for v in verdicts} == {VerdictKind.FRESH, VerdictKind.DUPLICATE}


async def test_numbers_have_no_gaps_when_both_append(hubs: Hubs) -> None:
    async def talk(hub: PostgresLedger, who: int) -> list[int]:
        return [await hub.apply(w.AppendEntry("conv", b"%d" % who, 1)) for _ in range(15)]

    numbers = await asyncio.gather(*(talk(hub, who) for who in range(5) for hub in hubs))
    assert sorted(n for one in numbers for n in one) == list(range(1, 151))
    assert all(one == sorted(one) for one in numbers)


async def test_claims_of_both_hubs_are_disjoint_and_complete(hubs: Hubs) -> None:
    refs = [w.DeliveryRef(message(n).key, "mail", "eve") for n in range(60)]
    await hubs[0].commit([(w.Deliver(ref, 1),) for ref in refs])

    async def work(hub: PostgresLedger) -> list[w.DeliveryRef]:
        mine: list[w.DeliveryRef] = []
        while taken := await hub.apply(w.Claim("mail", hub.worker, now=5, due=100, limit=7)):
            mine += [d.ref for d in taken]
        return mine

    taken = await asyncio.gather(*(work(hub) for hub in hubs))
    # What one hub had locked, the other passed over: ask once more.
    rest = await work(hubs[0])
    assert sorted([*taken[0], *taken[1], *rest], key=lambda r: r.key) == sorted(refs, key=lambda r: r.key)


async def test_of_the_ends_that_both_hubs_want_one_stands(hubs: Hubs) -> None:
    m = message()
    await hubs[0].admit(m)
    ends = [State.DONE, State.FAILED] * 10
    moved = await asyncio.gather(
        *(hub.apply(w.Advance(m.key, to, 1)) for to, hub in zip(ends, hubs * 10, strict=True))
    )
    assert sum(result.moved for result in moved) == 1


async def test_a_mark_is_raised_by_one_hub_at_a_time(hubs: Hubs) -> None:
    async def climb(hub: PostgresLedger) -> list[int]:
        return [n for n in range(1, 40) if await hub.apply(w.RaiseMark("lane", n, 1))]

    raised = await asyncio.gather(*(climb(hub) for hub in hubs))
    assert sorted(raised[0] + raised[1]) == list(range(1, 40))


async def test_hubs_that_touch_the_same_rows_in_opposite_order_both_get_through(hubs: Hubs) -> None:
    keys = [message(n).key for n in range(10)]

    def group(order: list[bytes]) -> w.Group:
        return tuple(
            write
            for key in order
            for write in (
                w.AppendEntry(key.hex(), b"x", 1),
                w.RaiseMark(key.hex(), 1, 1),
                w.Deliver(w.DeliveryRef(key, "c", "r"), 1),
                w.Finish(w.DeliveryRef(key, "c", "r"), None, State.DONE),
                w.MoveCursor(key.hex(), "eve", 1),
                w.PutItem("bucket", key.hex(), b"x"),
                w.DropItem("bucket", key.hex()),
            )
        )

    async with hubs[0].transaction() as tx:
        await tx.write(*group(keys))
        other = asyncio.ensure_future(hubs[1].commit([group(keys[::-1])]))
        await tx.write(*group(keys[::-1]))
    await other
    await asyncio.gather(*(hub.write(*group(keys[::step])) for step in (1, -1) for hub in hubs * 5))
    assert {(await hubs[0].extent(key.hex())).last for key in keys} == {23}


# ── forgetting, waiting ──────────────────────────────────────────────────────────────────────────


async def test_a_floor_raised_by_one_hub_is_seen_by_the_other(hubs: Hubs, clock: ManualClock) -> None:
    m = message()
    await hubs[0].admit(m)
    await hubs[0].write(w.Advance(m.key, State.DONE, 1))
    clock.advance(25 * 3600)
    assert await hubs[0].prune() == 1
    clock.advance(-25 * 3600)
    assert (await hubs[1].admit(m)).kind is VerdictKind.STALE
    assert await hubs[1].find(m.key) is None


async def test_an_id_forgotten_while_its_repeat_is_being_admitted_is_stale(
    hubs: Hubs, url: str, clock: ManualClock
) -> None:
    m = message()
    repeat = w.Admit(m, clock.now() + HOUR, clock.now())
    await hubs[0].write(repeat, w.Advance(m.key, State.DONE, 1))
    await hubs[1].write(w.AppendEntry("log", b"so that it is connected", 1))
    pruner, observer = await asyncpg.connect(url), await asyncpg.connect(url)
    pruning = pruner.transaction()
    await pruning.start()
    await pruner.execute("UPDATE duly_floor SET until = $1", clock.now() + 2 * HOUR)
    await pruner.execute("DELETE FROM duly_messages WHERE key = $1", m.key)
    admission = asyncio.ensure_future(hubs[1].apply(repeat))
    await until_blocked(observer, hubs[1])
    await pruning.commit()
    assert await admission == AHEAD
    assert await hubs[0].find(m.key) is None
    await pruner.close()
    await observer.close()


async def test_waiting_on_one_hub_is_woken_by_an_end_on_the_other(hubs: Hubs) -> None:
    ended, withdrawn, running = message(0), message(1), message(2)
    for m in (ended, withdrawn, running):
        await hubs[0].admit(m)
    waiting = [asyncio.ensure_future(hubs[1].wait(m.key, 20)) for m in (ended, withdrawn)]
    still = asyncio.ensure_future(hubs[1].wait(running.key))
    await hubs[0].write(w.Advance(ended.key, State.DONE, 2, Answer(7)), w.Withdraw(withdrawn.key))
    record, gone = await asyncio.gather(*waiting)
    assert record is not None
    assert record.answer == Answer(7)
    assert gone is None
    assert not still.done()
    still.cancel()
    await asyncio.wait([still])


async def test_waiting_callers_hear_of_the_closing_even_if_it_takes_long(url: str) -> None:
    ledger = await PostgresLedger.open(url)
    await ledger.write(admit(message()))
    waiting = asyncio.ensure_future(ledger.wait(message().key))
    await until(lambda: bool(ledger._waiters.by_key))
    still = asyncio.Event()

    async def look() -> None:
        await still.wait()

    ledger._tasks.do("a look that is under way", look())
    closing = asyncio.ensure_future(ledger.close())
    with pytest.raises(Stopped):
        await asyncio.wait_for(waiting, GUARD)
    still.set()
    await closing


# ── a server that goes away ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def mortal() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server


async def test_a_server_killed_under_load_loses_nothing_it_acknowledged(
    mortal: servers.Postgres, clock: ManualClock
) -> None:
    ledger = await PostgresLedger.open(mortal.create_database(), clock)
    acknowledged: list[Message] = []
    refused: list[LedgerUnavailable] = []
    enough = asyncio.Event()

    async def send(who: int) -> None:
        n = 0
        while True:
            m = Message(f"app-{who}", f"opaque-{n}", "k", "r")
            n += 1
            try:
                verdict = await ledger.admit(m)
            except LedgerUnavailable as error:
                refused.append(error)
                return
            assert verdict.fresh
            acknowledged.append(m)
            if len(acknowledged) >= 2_000:
                enough.set()

    senders = [asyncio.ensure_future(send(who)) for who in range(50)]
    await enough.wait()
    await asyncio.to_thread(mortal.stop, signal.SIGKILL)
    await asyncio.gather(*senders)
    assert len(refused) == 50
    assert all(error.retry and "stored" in str(error) for error in refused)
    with pytest.raises(LedgerUnavailable, match="nothing was stored"):
        await ledger.admit(message())
    with pytest.raises(LedgerUnavailable):
        await ledger.find(message().key)
    with pytest.raises(LedgerUnavailable):
        await ledger.prune()

    await asyncio.to_thread(mortal.start)
    repeated = await ledger.admit_many(acknowledged)
    assert {v.kind for v in repeated} == {VerdictKind.DUPLICATE}
    assert (await ledger.admit(message())).fresh
    async with ledger.transaction() as tx:
        assert await tx.fetch("SELECT 1") == [(1,)]
    await ledger.close()


async def test_waiting_outlives_a_restart_of_the_server(mortal: servers.Postgres) -> None:
    url = mortal.create_database()
    async with await PostgresLedger.open(url) as ledger, await PostgresLedger.open(url) as other:
        await ledger.write(admit(message()))
        waiting = asyncio.ensure_future(ledger.wait(message().key, 20))
        await until(
            lambda: bool(ledger._waiters.by_key) and ledger._pool.get_idle_size() == ledger._pool.get_size()
        )
        await asyncio.to_thread(mortal.stop)
        await asyncio.to_thread(mortal.start)
        await other.write(w.Advance(message().key, State.DONE, 2))
        record = await waiting
        assert record is not None
        assert record.state is State.DONE


async def test_a_connection_lost_in_the_commit_is_told_as_what_it_is(hubs: Hubs, url: str) -> None:
    ledger = hubs[0]
    await ledger.admit(message(0))
    admin = await asyncpg.connect(url)
    # The server waits in its COMMIT for a check that somebody else holds up, and is cut off there.
    await admin.execute(
        "CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$; "
        "CREATE CONSTRAINT TRIGGER hold_up AFTER INSERT ON duly_messages DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION hold_up()"
    )
    await admin.execute("SELECT pg_advisory_lock(7)")
    admission = asyncio.ensure_future(ledger.admit(message(1)))
    pid = await until_blocked(admin, ledger)
    await admin.execute("SELECT pg_terminate_backend($1)", pid)
    with pytest.raises(LedgerUnavailable, match="may or may not be stored") as caught:
        await admission
    assert "same ids" in str(caught.value)
    await admin.execute("SELECT pg_advisory_unlock(7)")
    await admin.close()
    assert (await ledger.admit(message(1))).kind in (VerdictKind.FRESH, VerdictKind.DUPLICATE)


# ── opening ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_newer_schema_is_refused(url: str) -> None:
    await (await PostgresLedger.open(url)).close()
    connection = await asyncpg.connect(url)
    await connection.execute("INSERT INTO duly_schema (number, name) VALUES (99, 'later')")
    await connection.close()
    with pytest.raises(LedgerTooNew, match="upgrade duly"):
        await open_ledger(url)


async def test_no_server_there_is_unavailable() -> None:
    with pytest.raises(LedgerUnavailable, match="cannot be used now"):
        await open_ledger(f"postgresql://duly@127.0.0.1:{servers.free_port()}/x")


async def test_a_database_that_is_closed_for_maintenance_is_unavailable_until_it_is_open(url: str) -> None:
    """`ALTER DATABASE … ALLOW_CONNECTIONS false` was taken for a bug: clients got no answer at all."""
    name = f"closed_{secrets.token_hex(4)}"
    operator = await asyncpg.connect(url)
    await operator.execute(f"CREATE DATABASE {name}")
    ledger = await open_ledger(url.partition("/postgres?")[0] + f"/{name}")
    try:
        await operator.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await operator.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1", name
        )
        for _ in range(2):  # the first may still find a connection that was cut
            with pytest.raises(LedgerUnavailable, match="cannot be used now"):
                await ledger.write(w.PutItem("bucket", "item", b"1"))
            with pytest.raises(LedgerUnavailable, match="cannot be used now"):
                await ledger.items([("bucket", "item")])
        await operator.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await ledger.write(w.PutItem("bucket", "item", b"2"))
        assert await ledger.items([("bucket", "item")]) == [b"2"]
    finally:
        await ledger.close()
        await operator.execute(f"DROP DATABASE {name}")
        await operator.close()


async def test_a_user_without_the_right_to_connect_is_the_operators_to_settle(url: str) -> None:
    name = f"guarded_{secrets.token_hex(4)}"
    operator = await asyncpg.connect(url)
    try:
        await operator.execute(f"CREATE DATABASE {name}")
        await operator.execute(f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC")
        await operator.execute(f"CREATE ROLE {name} LOGIN")
        guest = url.partition("/postgres?")[0].replace("duly@", f"{name}@")
        with pytest.raises(LedgerError, match="check the user, password and database") as caught:
            await open_ledger(f"{guest}/{name}")
        assert not caught.value.retry
    finally:
        await operator.execute(f"DROP DATABASE {name}")
        await operator.execute(f"DROP ROLE {name}")
        await operator.close()


async def test_a_database_that_is_not_there_is_the_operators_to_settle(url: str) -> None:
    with pytest.raises(LedgerError, match="check the user, password and database") as caught:
        await open_ledger(url.replace("/postgres?", "/nowhere?"))
    assert not caught.value.retry


async def test_an_address_that_makes_no_sense_is_malformed() -> None:
    with pytest.raises(Malformed, match="not the address"):
        await open_ledger("postgresql://duly@localhost:notaport/x")


async def test_without_the_driver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    for module in ("postgres.ledger", "postgres.watch"):
        monkeypatch.delitem(sys.modules, f"duly.storage.{module}")
    with pytest.raises(MissingExtra, match=r"pip install 'duly\[postgres\]'"):
        await open_ledger("postgresql://duly@localhost/x")


# ── sessions of the pool ─────────────────────────────────────────────────────────────────────────


async def test_a_read_is_one_round_trip(hubs: Hubs, url: str) -> None:
    one, _ = hubs
    assert await one.item("bucket", "name") is None
    observer = await asyncpg.connect(url)
    try:
        last = await observer.fetch("SELECT query FROM pg_stat_activity WHERE application_name = 'duly'")
        assert any("duly_items" in query for (query,) in last), last
        assert not any("RESET" in query for (query,) in last), last
    finally:
        await observer.close()


async def test_what_the_sql_of_a_caller_sets_is_undone(hubs: Hubs) -> None:
    one, _ = hubs
    with contextlib.suppress(ZeroDivisionError):
        async with one.transaction() as tx:
            await tx.execute("SET work_mem = '1234kB'")
            await tx.fetch("SELECT pg_advisory_lock(7)")
            raise ZeroDivisionError
    async with one.transaction() as tx:
        await tx.execute("SET work_mem = '1234kB'")
        await tx.fetch("SELECT pg_advisory_lock(7)")
    async with one.transaction() as tx:
        assert await tx.fetch("SHOW work_mem") == [("4MB",)]
        assert await tx.fetch("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
