"""A flush in one statement: what it needs, what it verifies, and that it never tells from the locked one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import FORGOTTEN, FRESH, Answer, Message, Verdict, VerdictKind
from duly.core.trusted_time import AHEAD, Floor
from duly.core.units import DAY, HOUR
from duly.storage.memory import MemoryLedger
from duly.storage.postgres.ledger import PostgresLedger
from duly.testing import ManualClock
from tests import servers
from tests.guard import GUARD
from tests.storage.making import message

Hubs = tuple[PostgresLedger, PostgresLedger]
GRANT = w.CheckItem("grants", "app-1/lock-1")
LANE = "lane"


@pytest.fixture
def url(postgres_server: servers.Postgres) -> str:
    return postgres_server.create_database()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def hubs(url: str, clock: ManualClock) -> AsyncIterator[Hubs]:
    """Two hubs that have carried a command out each: they know the grant, the lane and the floor."""
    async with await PostgresLedger.open(url, clock) as one, await PostgresLedger.open(url, clock) as two:
        await one.write(w.PutItem(GRANT.bucket, GRANT.name, b"granted"))
        for n, hub in enumerate((one, two)):
            await hub.write(*command(clock, n))
        yield one, two


def ref_of(m: Message) -> w.DeliveryRef:
    return w.DeliveryRef(m.key, "device", m.recipient)


def command(clock: ManualClock, n: int, **more: Any) -> w.Group:
    """What a hub commits when an app sends a command."""
    m = message(n)
    launch = w.Deliver(ref_of(m), 50, 0, 1, "hub")
    late = w.Advance(m.key, State.SUPERSEDED, 1, Answer(4))
    raised = w.RaiseMark(LANE, n, n, (launch,), (late,))
    admit = w.Admit(m, clock.now() + more.pop("lasts", DAY), clock.now(), State.SENT, (raised,), **more)
    return (w.CheckItem(GRANT.bucket, GRANT.name, None, (admit,), (w.Recall(m, FORGOTTEN, 1),)),)


def answered(n: int) -> w.Group:
    """What a hub commits when the device has answered."""
    m = message(n)
    return (w.Finish(ref_of(m), None, State.DONE, "", (w.Advance(m.key, State.DONE, 9, Answer(0)),)),)


class Asked:
    """The statements that the flushes of a hub have sent; not those by which the driver learns of types."""

    def __init__(self, hub: PostgresLedger) -> None:
        self.statements: list[str] = []
        hub._flusher.line.add_query_logger(self._note)

    def _note(self, record: Any) -> None:
        if "typeinfo" not in record.query and "'jit'" not in record.query:
            self.statements.append(record.query)

    @property
    def once(self) -> bool:
        """Whether there was nothing but flushes of one statement."""
        return bool(self.statements) and all("duly_flush" in each for each in self.statements)


# ── one statement ────────────────────────────────────────────────────────────────────────────────


async def test_a_command_and_its_answer_are_one_statement_each(hubs: Hubs, clock: ManualClock) -> None:
    asked = Asked(hubs[1])
    sent = await hubs[1].commit([command(clock, n) for n in range(2, 22)])
    assert {results.values[1] for results in sent} == {FRESH}
    ended = await hubs[1].commit([answered(n) for n in range(2, 22)])
    assert all(results.values == [True, w.Advanced(True, State.DONE, Answer(0))] for results in ended)
    assert len(asked.statements) == 2
    assert asked.once
    record = await hubs[0].find(message(21).key)
    assert record is not None
    assert (record.state, record.answer) == (State.DONE, Answer(0))
    (delivery,) = await hubs[0].deliveries(message(21).key)
    assert (delivery.state, delivery.attempt) == (State.DONE, 1)
    assert (await hubs[0].marks())[LANE] == (21, 21)


async def test_a_ledger_that_has_just_been_opened_admits_with_one_statement(
    url: str, hubs: Hubs, clock: ManualClock
) -> None:
    async with await PostgresLedger.open(url, clock) as fresh:
        await fresh._flusher.get()
        asked = Asked(fresh)
        assert (await fresh.admit(message(7))).fresh
        assert asked.once


async def test_rows_are_found_by_their_keys_whatever_the_tables_held_when_plans_were_made(
    hubs: Hubs, clock: ManualClock
) -> None:
    await hubs[0].commit([command(clock, n) for n in range(2, 400)])
    connection = hubs[0]._flusher.line
    plans: list[str] = []
    connection.add_log_listener(lambda _, told: plans.append(str(told)))
    await connection.execute(
        "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET client_min_messages = log; "
        "SET auto_explain.log_nested_statements = on"
    )
    await hubs[0].commit([command(clock, 400), answered(399)])
    plan = "\n".join(plans)
    for index in ("duly_messages_pkey", "duly_deliveries_pkey", "duly_marks_pkey", "duly_items_pkey"):
        assert index in plan, plan
    assert "Seq Scan" not in plan, plan


# ── what is not as expected ──────────────────────────────────────────────────────────────────────


async def test_an_id_that_the_other_hub_has_admitted_is_a_duplicate(hubs: Hubs, clock: ManualClock) -> None:
    await hubs[0].write(*command(clock, 2))
    results = await hubs[1].commit([command(clock, 3), command(clock, 2), command(clock, 4)])
    told = [each.values[1] for each in results]
    assert told == [FRESH, Verdict(VerdictKind.DUPLICATE, State.SENT), FRESH]
    assert [len(await hubs[0].deliveries(message(n).key)) for n in (2, 3, 4)] == [1, 1, 1]


async def test_an_end_that_the_other_hub_has_stored_stands(hubs: Hubs, clock: ManualClock) -> None:
    await hubs[0].write(*command(clock, 2), *command(clock, 3))
    await hubs[1].write(w.Advance(message(2).key, State.CANCELLED, 5, Answer(7)))
    await hubs[1].write(w.Finish(ref_of(message(3)), None, State.FAILED))
    results = await hubs[0].commit([answered(2), answered(3)])
    assert results[0].values == [True, w.Advanced(False, State.CANCELLED, Answer(7))]
    assert results[1].values == [False]


async def test_an_attempt_that_the_other_hub_has_taken_over_is_fenced(hubs: Hubs, clock: ManualClock) -> None:
    await hubs[0].write(*command(clock, 2))
    assert await hubs[1].apply(w.Take(ref_of(message(2)), 1, "other", 90))
    assert not await hubs[0].apply(w.Renew(ref_of(message(2)), 1, 70))
    (delivery,) = await hubs[0].deliveries(message(2).key)
    assert (delivery.attempt, delivery.worker, delivery.due) == (2, "other", 90)


async def test_a_mark_that_the_other_hub_has_raised_makes_a_command_late(
    hubs: Hubs, clock: ManualClock
) -> None:
    await hubs[0].write(*command(clock, 2))
    await hubs[1].write(*command(clock, 9))
    results = await hubs[0].write(*command(clock, 5))
    assert results.values[1:3] == [FRESH, False]
    record = await hubs[1].find(message(5).key)
    assert record is not None
    assert record.state is State.SUPERSEDED


@pytest.mark.parametrize(
    "then", [w.DropItem("grants", "app-1/lock-1"), w.PutItem("grants", "app-1/lock-1", b"")]
)
async def test_an_item_that_the_other_hub_is_changing_is_waited_for(
    hubs: Hubs, url: str, clock: ManualClock, then: w.Write
) -> None:
    observer = await asyncpg.connect(url)
    pid = hubs[1]._flusher.line.get_server_pid()
    async with hubs[0].transaction() as tx:
        await tx.write(then)
        waiting = asyncio.ensure_future(hubs[1].commit([command(clock, 2)]))
        async with asyncio.timeout(GUARD):
            while not await observer.fetchval(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = $1", pid
            ):
                pass
    (results,) = await waiting
    assert results.values[0] is isinstance(then, w.PutItem)
    assert (await hubs[0].find(message(2).key) is None) is isinstance(then, w.DropItem)
    await observer.close()


async def test_two_hubs_that_check_the_same_item_do_not_wait_for_each_other(
    hubs: Hubs, url: str, clock: ManualClock
) -> None:
    other = await asyncpg.connect(url)
    async with other.transaction():
        await other.fetch("SELECT 1 FROM duly_items WHERE bucket = 'grants' FOR SHARE")
        asked = Asked(hubs[1])
        async with asyncio.timeout(GUARD):
            assert (await hubs[1].write(*command(clock, 2))).values[1] == FRESH
        assert asked.once
    await other.close()


async def test_an_id_below_a_floor_that_was_raised_meanwhile_is_forgotten(
    hubs: Hubs, clock: ManualClock
) -> None:
    await hubs[1].write(*command(clock, 2, lasts=HOUR))
    await hubs[1].write(*answered(2))
    await hubs[0].set_floor(Floor(clock.now() + 2 * HOUR, clock.now()))
    results = await hubs[1].write(*command(clock, 3, lasts=HOUR))
    assert results.values[1] == AHEAD
    assert (await hubs[1].write(*command(clock, 4, lasts=3 * HOUR))).values[1] == FRESH


async def test_a_floor_that_was_mended_is_obeyed_with_one_statement(hubs: Hubs, clock: ManualClock) -> None:
    made = message().made
    await hubs[0].set_floor(Floor(mended=made, barrier=clock.now() + 2 * HOUR))
    assert (await hubs[1].write(*command(clock, 2, lasts=HOUR))).values[1] == AHEAD
    asked = Asked(hubs[1])
    assert (await hubs[1].write(*command(clock, 3, lasts=3 * HOUR))).values[1] == FRESH
    assert asked.once


async def test_a_flush_that_is_refused_leaves_nothing_behind(
    hubs: Hubs, clock: ManualClock, url: str
) -> None:
    asked = Asked(hubs[1])
    await hubs[0].write(w.DropItem(GRANT.bucket, GRANT.name))
    results = await hubs[1].commit([command(clock, n) for n in range(2, 6)])
    assert [each.values for each in results] == [[False, FORGOTTEN]] * 4
    assert "duly_flush" in asked.statements[0], "it was tried"
    assert not asked.once, "and then done with locks"
    assert (await hubs[0].size()).messages == 2


# ── the same as with locks ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(8))
async def test_two_hubs_in_turns_do_what_one_ledger_in_memory_does(
    hubs: Hubs, url: str, clock: ManualClock, seed: int
) -> None:
    model = MemoryLedger(clock)
    await model.write(w.PutItem(GRANT.bucket, GRANT.name, b"granted"))
    for n in range(2):
        await model.write(*command(clock, n))
    asked = [Asked(hub) for hub in hubs]
    rng = random.Random(seed)
    for step in range(150):
        groups = [some_group(rng, clock, step) for _ in range(rng.randint(1, 2))]
        assert await rng.choice(hubs).commit(groups) == await model.commit(groups)
    for n in range(80):
        assert await hubs[0].find(message(n).key) == await model.find(message(n).key)
        assert await hubs[0].deliveries(message(n).key) == await model.deliveries(message(n).key)
    assert await hubs[0].marks() == await model.marks()
    assert await hubs[0].refusals(1000) == await model.refusals(1000)
    statements = [statement for each in asked for statement in each.statements]
    assert sum("duly_flush" in each for each in statements) > 10, "some were tried with one statement"
    assert sum(each.startswith("BEGIN") for each in statements) > 10, "and some needed locks"


def some_group(rng: random.Random, clock: ManualClock, step: int) -> w.Group:
    """What hubs commit for commands, on few rows at a time, so that they meet."""
    n, due = step // 2 + rng.randrange(4), rng.randrange(100)
    ref, attempt = ref_of(message(n)), rng.randrange(3)
    granted = w.PutItem(GRANT.bucket, GRANT.name, b"%d" % due)
    grants: list[w.Write] = [granted, granted, granted, w.DropItem(GRANT.bucket, GRANT.name)]
    make: list[Callable[[], w.Group]] = [
        *[lambda: command(clock, n)] * 6,
        *[lambda: answered(n)] * 6,
        lambda: (w.Take(ref, attempt, "t", due),),
        lambda: (w.Renew(ref, attempt, due),),
        lambda: (w.Postpone(ref, attempt, due, "later", in_doubt=True),),
        lambda: (w.Advance(message(n).key, rng.choice(list(State)), due, Answer(due)),),
        lambda: (w.RaiseMark(LANE, n, n),),
        lambda: (w.Withdraw(message(n).key),),
        lambda: (rng.choice(grants),),
    ]
    return rng.choice(make)()
