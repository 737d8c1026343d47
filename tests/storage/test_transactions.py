"""The caller's SQL and the ledger's memory in one transaction: both or neither, in both SQL ledgers."""

# ruff: noqa: PT012 - what must fail is a whole transaction

from __future__ import annotations

import asyncio

import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Verdict, VerdictKind
from duly.errors import ProgramError, Stopped
from duly.storage.ledger import Ledger
from tests.storage.conftest import Store
from tests.storage.making import admit, message

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    ledger = await store.open()
    async with ledger.transaction() as tx:
        await tx.execute("CREATE TABLE doors (name TEXT PRIMARY KEY)")
    return ledger


async def doors(ledger: Ledger) -> list[str]:
    async with ledger.transaction() as tx:
        return [name for (name,) in await tx.fetch("SELECT name FROM doors ORDER BY name")]


async def test_it_commits_the_callers_sql_together_with_the_writes(ledger: Ledger, store: Store) -> None:
    m = message()
    place = "?" if store.kind == "sqlite" else "$1"
    async with ledger.transaction() as tx:
        assert (await tx.write(admit(m))).values[0].fresh
        await tx.execute(f"INSERT INTO doors VALUES ({place})", "front")
        assert await tx.fetch("SELECT name FROM doors") == [("front",)]
        assert (await tx.write(w.Advance(m.key, State.DONE, 5))).values == [w.Advanced(True, State.DONE)]
    assert await doors(ledger) == ["front"]
    assert (await ledger.admit(m)).state is State.DONE
    ledger = await store.reopen()
    assert (await ledger.admit(m)).state is State.DONE


async def test_an_exception_rolls_both_back_and_leaves_no_trace_in_memory(ledger: Ledger) -> None:
    m = message()
    with pytest.raises(ZeroDivisionError):
        async with ledger.transaction() as tx:
            await tx.write(admit(m), w.AppendEntry("log", b"x", 1))
            await tx.execute("INSERT INTO doors VALUES ('front')")
            _ = 1 / 0
    assert await doors(ledger) == []
    assert (await ledger.admit(m)).fresh
    assert (await ledger.write(w.AppendEntry("log", b"x", 1))).values == [1]


async def test_bad_sql_says_so_in_the_databases_own_words_and_rolls_back(ledger: Ledger) -> None:
    with pytest.raises(Exception, match="nowhere") as caught:
        async with ledger.transaction() as tx:
            await tx.write(admit(message()))
            await tx.execute("INSERT INTO nowhere VALUES (1)")
    assert type(caught.value).__module__.startswith(("apsw", "asyncpg"))
    assert (await ledger.admit(message())).fresh


async def test_an_error_that_was_caught_still_rolls_everything_back_and_says_so(ledger: Ledger) -> None:
    with pytest.raises(ProgramError, match="rolled back"):
        async with ledger.transaction() as tx:
            await tx.execute("INSERT INTO doors VALUES ('front')")
            with pytest.raises(Exception, match=r"(?i)unique"):
                await tx.execute("INSERT INTO doors VALUES ('front')")
    assert await doors(ledger) == []


async def test_sql_that_ends_the_transaction_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ProgramError, match="leave BEGIN, COMMIT and ROLLBACK out"):
        async with ledger.transaction() as tx:
            await tx.execute("ROLLBACK")
    assert (await ledger.admit(message())).fresh


@pytest.mark.parametrize("ending", ["COMMIT", " end", "BEGIN", "rollback"])
async def test_sql_that_would_end_the_transaction_commits_nothing(ledger: Ledger, ending: str) -> None:
    with pytest.raises(ProgramError, match="leave BEGIN, COMMIT and ROLLBACK out"):
        async with ledger.transaction() as tx:
            await tx.write(admit(message()))
            await tx.execute("INSERT INTO doors VALUES ('front')")
            await tx.execute(ending)
    assert await doors(ledger) == []
    assert (await ledger.admit(message())).fresh


async def test_a_caller_may_use_savepoints(ledger: Ledger) -> None:
    async with ledger.transaction() as tx:
        await tx.execute("SAVEPOINT a")
        await tx.execute("INSERT INTO doors VALUES ('front')")
        await tx.execute("ROLLBACK TO a")
        await tx.execute("INSERT INTO doors VALUES ('back')")
    assert await doors(ledger) == ["back"]


async def test_using_the_ledger_or_a_second_transaction_inside_is_a_program_error(ledger: Ledger) -> None:
    async with ledger.transaction() as tx:
        with pytest.raises(ProgramError, match="write through it"):
            await ledger.admit(message())
        with pytest.raises(ProgramError, match="write through it"):
            async with ledger.transaction():
                pass
        with pytest.raises(ProgramError, match="write through it"):
            await ledger.close()
        assert await ledger.find(message().key) is None, "reading is harmless"
        await tx.write(admit(message()))
    assert (await ledger.admit(message())).kind is VerdictKind.DUPLICATE


async def test_a_task_started_inside_may_use_the_ledger_afterwards(ledger: Ledger) -> None:
    ended = asyncio.Event()

    async def later() -> bool:
        await ended.wait()
        return (await ledger.admit(message())).fresh

    async with ledger.transaction():
        task = asyncio.ensure_future(later())
        await asyncio.sleep(0)
    ended.set()
    assert await task


async def test_several_tasks_may_use_one_transaction(ledger: Ledger) -> None:
    async with ledger.transaction() as tx:
        results = await asyncio.gather(*(tx.write(w.AppendEntry("log", b"x", 1)) for _ in range(5)))
    assert [each.values for each in results] == [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize("call", ["execute", "fetch"])
async def test_a_statement_that_is_not_awaited_is_told_and_undoes_the_rest(ledger: Ledger, call: str) -> None:
    with pytest.raises(ProgramError, match="was not awaited"):
        async with ledger.transaction() as tx:
            await tx.execute("INSERT INTO doors VALUES ('front')")
            getattr(tx, call)("INSERT INTO doors VALUES ('back')")
    assert await doors(ledger) == []


async def test_a_transaction_that_has_ended_cannot_be_used(ledger: Ledger) -> None:
    async with ledger.transaction() as tx:
        pass
    with pytest.raises(ProgramError, match="has ended"):
        await tx.execute("INSERT INTO doors VALUES ('front')")


async def test_cancellation_rolls_back_and_the_ledger_goes_on(ledger: Ledger) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with ledger.transaction() as tx:
            await tx.write(admit(message()))
            await tx.execute("INSERT INTO doors VALUES ('front')")
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await doors(ledger) == []
    assert (await ledger.admit(message())).fresh


async def test_cancellation_before_it_began_leaves_nothing_behind(ledger: Ledger) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with ledger.transaction():
            inside.set()
            await leave.wait()

    async def queue() -> None:
        async with ledger.transaction() as tx:
            await tx.execute("INSERT INTO doors VALUES ('front')")
            raise AssertionError("cancelled before it was its turn")

    holding = asyncio.ensure_future(hold())
    await inside.wait()
    queued = asyncio.ensure_future(queue())
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    leave.set()
    await holding
    assert await doors(ledger) == []
    assert (await ledger.admit(message())).fresh


async def test_cancellation_during_the_commit_leaves_memory_and_truth_agreed(ledger: Ledger) -> None:
    for n in range(20):
        m = message(n)
        await ledger.admit(m)
        await ledger.admit(m)  # now memory knows it
        done = asyncio.Event()

        async def work(key: bytes = m.key, done: asyncio.Event = done) -> None:
            async with ledger.transaction() as tx:
                await tx.write(w.Advance(key, State.DONE, 5))
                done.set()

        task = asyncio.ensure_future(work())
        await done.wait()
        for _ in range(n):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await ledger.write(w.AppendEntry("log", b"the next flush: whatever was under way is over", 1))
        record = await ledger.find(m.key)
        assert record is not None
        assert (await ledger.admit(m)).state is record.state


async def test_what_was_handed_over_is_finished_by_closing_and_then_nothing_is_taken(
    ledger: Ledger, store: Store
) -> None:
    handed = [asyncio.ensure_future(ledger.admit(message(n))) for n in range(50)]
    await asyncio.sleep(0)
    handed[7].cancel()
    await asyncio.gather(ledger.close(), ledger.close())
    verdicts = await asyncio.gather(*handed, return_exceptions=True)
    assert isinstance(verdicts.pop(7), asyncio.CancelledError)
    assert all(isinstance(v, Verdict) and v.fresh for v in verdicts)
    for refused in (ledger.admit(message(99)), ledger.find(message(0).key), ledger.prune()):
        with pytest.raises(Stopped):
            await refused
    again = await store.open()
    assert [v.kind for v in await again.admit_many([message(n) for n in range(50)])] == [
        VerdictKind.DUPLICATE
    ] * 50


async def test_a_caller_that_waits_when_the_ledger_is_closed_hears_it(ledger: Ledger) -> None:
    await ledger.admit(message())
    waiting = asyncio.ensure_future(ledger.wait(message().key))
    with ledger.watch(message().key):  # others wait as well
        await ledger.find(message().key)
    await ledger.close()
    with pytest.raises(Stopped):
        await waiting


async def test_one_callers_impossible_write_does_not_hurt_the_others(ledger: Ledger) -> None:
    good = [ledger.write(admit(message(n)), w.AppendEntry("log", b"x", 1)) for n in range(5)]
    bad = ledger.write(admit(message(9)), w.AppendEntry("log", b"x", at=1 << 70))
    *written, trouble = await asyncio.gather(*good, bad, return_exceptions=True)
    assert isinstance(trouble, ProgramError)
    assert {r.values[1] for r in written if isinstance(r, w.Results)} == {1, 2, 3, 4, 5}
    assert await ledger.find(message(9).key) is None


async def test_text_that_strangers_wrote_never_makes_a_commit_fail(ledger: Ledger) -> None:
    ref = w.DeliveryRef(message().key, "c", "r")
    await ledger.write(
        w.RecordRefusal("a\0b", "\ud800", "malformed", "it said \0", 1),
        admit(message(), then=(w.Deliver(ref, 1), w.Postpone(ref, 0, 2, "\ud800\0"))),
    )
    assert [r.scope for r in await ledger.refusals()] == ["a\ufffdb"]
    assert [d.error for d in await ledger.deliveries(ref.key)] == ["?\ufffd"]
