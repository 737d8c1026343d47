"""Many groups at once mean what each of them means alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import FRESH, Answer, Message, Verdict, VerdictKind
from duly.errors import LedgerDamaged, LedgerUnavailable
from duly.storage.memory import MemoryLedger
from duly.storage.sqlite.cached_rows import CachedRows
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.writer import SqliteWriter
from tests.guard import GUARD

AT = 1_700_000_000_000_000
UNTIL = AT * 2
FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def message(n: int, body: bytes = b"") -> Message:
    return Message("app", f"{AT // 1000 + n}_{n}", "lock_control", "lock", body)


def ref(n: int) -> w.DeliveryRef:
    return w.DeliveryRef(message(n).key, "device", "lock")


def launch(n: int, *, mark: str = "m", body: bytes = b"", until: int = UNTIL) -> w.Group:
    """A command that is admitted and handed over at once."""
    late = w.Advance(message(n).key, State.SUPERSEDED, AT, Answer(4, b"", "late"))
    raised = w.RaiseMark(mark, n, AT // 1000 + n, (w.Deliver(ref(n), AT + 3, 0, 1, "hub"),), (late,))
    return (w.Admit(message(n, body), until, AT, State.SENT, (raised,)),)


def end(n: int, attempt: int | None = None, state: State = State.DONE, kept: bool = True) -> w.Group:
    last = w.Advance(message(n).key, state, AT + 9, Answer(0, b"{}"))
    return (w.Finish(ref(n), attempt, state, "", (last,), kept=kept),)


def receipt(n: int) -> w.Group:
    return (w.Advance(message(n).key, State.DELIVERED, AT + 5),)


def again(n: int) -> w.Group:
    return (w.Take(ref(n), 1, "hub", AT + 6),)


def say(n: int, conv: str = "c", body: bytes = b"", role: bytes | None = None) -> w.Group:
    """A line of a conversation, guarded by who may and by who may not."""
    m = message(n, body)
    line = w.Admit(m, UNTIL, AT, then=(w.AppendEntry(conv, body, AT, m.key, ends=True),))
    refused = w.Recall(m, REFUSED, AT)
    allowed = w.CheckItem("members", conv, role, (line,), (refused,))
    return (w.CheckItem("barred", conv, None, (refused,), (allowed,)),)


def reach(n: int, conv: str = "c", reader: str = "ann") -> w.Group:
    return (w.MoveCursor(conv, reader, n),)


REFUSED = Verdict(VerdictKind.REFUSED, reason="not here", cause="not_allowed")
convs = st.sampled_from(["c", "d"])
numbers = st.integers(0, 7)
groups = st.one_of(
    st.builds(launch, numbers, mark=st.sampled_from(["m", "other"]), body=st.sampled_from([b"", b"other"])),
    st.builds(
        end,
        numbers,
        st.sampled_from([None, 1, 2]),
        st.sampled_from([State.DONE, State.UNKNOWN]),
        st.booleans(),
    ),
    st.builds(lambda n: (w.Deliver(ref(n), AT + 7, 0, 1, "again"),), numbers),
    st.builds(receipt, numbers),
    st.builds(again, numbers),
    st.builds(say, numbers, convs, st.sampled_from([b"", b"other"]), st.sampled_from([None, b"owner", b"x"])),
    st.builds(reach, numbers, convs, st.sampled_from(["ann", "bob"])),
    st.builds(lambda conv: (w.AppendEntry(conv, b"push", AT),), convs),
    st.builds(
        lambda bucket, conv: (w.PutItem(bucket, conv, b"owner"),),
        st.sampled_from(["members", "barred"]),
        convs,
    ),
    st.builds(lambda conv: (w.DropItem("barred", conv),), convs),
)


async def settled(ledger: MemoryLedger | SqliteLedger) -> list[object]:
    """Everything that a ledger holds of these messages."""
    found = [[await ledger.find(message(n).key), await ledger.deliveries(message(n).key)] for n in range(8)]
    said = [[await ledger.entries(c), await ledger.cursors(c), await ledger.extent(c)] for c in ("c", "d")]
    return [found, said, await ledger.marks(), [r.reason for r in await ledger.refusals()]]


@FEW
@given(flushes=st.lists(st.lists(groups, min_size=1, max_size=12), min_size=1, max_size=4))
async def test_a_flush_does_what_its_writes_do_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, flushes: Sequence[Sequence[w.Group]]
) -> None:
    model = MemoryLedger()
    async with await SqliteLedger.open(tmp_path_factory.mktemp("flushes") / "ledger.db") as ledger:
        for flush in [[(w.PutItem("members", "c", b"owner"),)], *flushes]:
            assert await ledger.commit(flush) == await model.commit(flush)
            for n in range(8):
                assert ledger.recall(message(n), AT) == model.recall(message(n), AT)
        assert await settled(ledger) == await settled(model)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16, 63, 64, 65, 200])
async def test_any_number_of_rows_is_carried_out(tmp_path: Path, count: int) -> None:
    async with await SqliteLedger.open(tmp_path / "ledger.db") as ledger:
        started = await ledger.commit([launch(n) for n in range(count)])
        assert [each.values for each in started] == [[FRESH, True, True]] * count
        ended = await ledger.commit([end(n) for n in range(count)])
        assert {results.values[0] for results in ended} == {True}
        assert (await ledger.size()).messages == (await ledger.size()).deliveries == count
        assert await ledger.open_deliveries("device") == []
        assert await ledger.marks() == {"m": (count - 1, AT // 1000 + count - 1)}


async def test_questions_during_a_flush_that_fails_are_answered_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await SqliteLedger.open(tmp_path / "ledger.db") as ledger:
        await ledger.commit([launch(1)])
        with monkeypatch.context() as full:

            def fail(writer: SqliteWriter, bodies: Sequence[bytes]) -> None:
                raise apsw.FullError("planted")

            full.setattr(SqliteWriter, "add_to_journal", fail)
            failing = ledger.commit([launch(2), end(1)])
            await asyncio.sleep(0)  # now it is under way
            asked = asyncio.gather(
                ledger.find(message(1).key), ledger.find(message(2).key), ledger.size(), ledger.entries("c")
            )
            with pytest.raises(LedgerUnavailable, match="is full"):
                await failing
            first, second, size, _ = await asked
        assert first is not None
        assert (first.state, second, size.messages) == (State.SENT, None, 1)
        assert ledger.recall(message(2), AT) is None
        results = await ledger.commit([launch(2), end(1)])
        assert [r.values[0] for r in results] == [FRESH, True]


async def test_a_repeat_is_not_recalled_before_the_first_is_on_the_disk(tmp_path: Path) -> None:
    async with await SqliteLedger.open(tmp_path / "ledger.db") as ledger:
        first = ledger.commit([launch(1)])
        await asyncio.sleep(0)
        assert ledger.recall(message(1), AT) is None
        await first
        assert ledger.recall(message(1), AT) == Verdict(VerdictKind.DUPLICATE, State.SENT)


async def test_ids_that_are_not_in_memory_are_looked_up_together(tmp_path: Path) -> None:
    def nameless(numbers: Sequence[int]) -> list[Message]:
        """Messages whose ids carry no time, so that each may have been stored before."""
        return [Message("app", f"order-{n:03}", "pay", "shop") for n in numbers]

    def admitted(some: Sequence[Message]) -> list[w.Group]:
        taken = (w.Deliver(w.DeliveryRef(m.key, "once", "run"), AT, 0, 1, "me") for m in some)
        return [
            (w.Admit(m, UNTIL, AT, State.SENT, (deliver,)),) for m, deliver in zip(some, taken, strict=True)
        ]

    def trace(_: object, statement: str, __: object) -> bool:
        asked.append(statement)
        return True

    path = tmp_path / "app.db"
    asked: list[str] = []
    ledger = await SqliteLedger.open(path)
    await ledger.commit(admitted(nameless(range(0, 200, 2))))
    await ledger.close()
    ledger = await SqliteLedger.open(path)
    assert ledger._flushes is not None
    ledger._flushes._db.exec_trace = trace
    known = [found.values for found in await ledger.commit(admitted(nameless(range(50))))]
    one_by_one = len(asked)
    asked.clear()
    more = [found.values for found in await ledger.commit(admitted(nameless(range(50, 150))))]
    verdicts = [values[0].kind for values in known + more]
    stored = await ledger.deliveries(nameless([120])[0].key)
    await ledger.close()

    assert verdicts == [VerdictKind.DUPLICATE, VerdictKind.FRESH] * 75
    assert [delivery.worker for delivery in stored] == ["me"]
    assert one_by_one >= 50
    assert len(asked) < 10, "the second flush knew that it would have to look up many"


async def test_an_entry_is_rewritten_that_was_asked_for_before_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedRows, "rows_kept", 0)
    ledger = await SqliteLedger.open(tmp_path / "app.db")
    for n in (9, 8, 7, 1):
        assert not await ledger.apply(w.RewriteEntry("log", n, b"new"))
    await ledger.apply(w.AppendEntry("log", b"old", AT))
    assert ledger._flushes is not None
    await ledger._flushes.settled()  # the tables have it, and memory forgets the end of the stream
    rewritten = await ledger.apply(w.RewriteEntry("log", 1, b"new"))
    entries = await ledger.entries("log")
    await ledger.close()

    assert rewritten
    assert [entry.body for entry in entries] == [b"new"]


async def test_a_query_that_fails_during_a_flush_fails_its_caller_alone(tmp_path: Path) -> None:
    """The callers of the flush still get their results, and later flushes go on."""

    def damaged(_: CachedRows) -> None:
        raise apsw.CorruptError("database disk image is malformed")

    ledger = await SqliteLedger.open(tmp_path / "ledger.db")
    flushes = ledger._flushes
    assert flushes is not None
    try:
        async with asyncio.timeout(GUARD):
            writing = asyncio.ensure_future(ledger.write(w.PutItem("b", "a", b"1")))
            while not flushes._in_flight:
                assert not writing.done(), "it was not asked in time"
                await asyncio.sleep(0)
            asked = [asyncio.ensure_future(flushes.ask(question)) for question in (damaged, lambda _: 7)]
            await writing
            with pytest.raises(LedgerDamaged):
                await asked[0]
            assert await asked[1] == 7
            await ledger.write(w.PutItem("b", "a", b"2"))
            with pytest.raises(LedgerDamaged):
                await flushes.ask(damaged)
            assert await ledger.item("b", "a") == b"2"
    finally:
        await ledger.close()
