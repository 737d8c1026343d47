"""Who carries a flush out: the loop while that is quick, and the thread in every other case."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import apsw
import pytest

from duly.core import operations as w
from duly.errors import LedgerUnavailable
from duly.storage.sqlite.disk_pace import QUICK_SECONDS, DiskPace
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.writer import SMALL_FLUSH, SqliteWriter
from tests.guard import GUARD

LOOP, THREAD = "loop", "thread"


class Flushes:
    """Where each flush was carried out; `during` is called in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.carried_out: list[str] = []
        self.during: Callable[[], None] = lambda: None
        add = SqliteWriter.add_to_journal
        loop = threading.get_ident()

        def noted(writer: SqliteWriter, bodies: Sequence[bytes]) -> None:
            self.carried_out.append(LOOP if threading.get_ident() == loop else THREAD)
            self.during()
            add(writer, bodies)

        monkeypatch.setattr(SqliteWriter, "add_to_journal", noted)

    def taken(self) -> list[str]:
        """Where those were that came since this was last asked."""
        found, self.carried_out = self.carried_out, []
        return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is quick, whatever this machine is doing."""
    monkeypatch.setattr(DiskPace, "quick", True)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    async with await SqliteLedger.open(tmp_path / "ledger.db") as opened:
        yield opened


def put(name: str, size: int = 10) -> w.Group:
    return (w.PutItem("things", name, b"x" * size),)


async def test_the_loop_flushes_what_is_small_while_the_disk_is_quick(
    ledger: SqliteLedger, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    await ledger.commit([put("a")])
    await ledger.commit([put("b")])
    assert flushes.taken() == [LOOP, LOOP]
    assert await ledger.item("things", "b") == b"x" * 10


async def test_the_thread_flushes_what_is_large(
    ledger: SqliteLedger, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    await ledger.commit([put("a", SMALL_FLUSH)])
    assert flushes.taken() == [THREAD]


async def test_the_thread_flushes_on_a_disk_that_is_not_known_to_be_quick(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    for n in range(4):
        await ledger.commit([put(f"{n}")])
    assert flushes.taken() == [THREAD] * 4


async def test_a_flush_that_takes_long_is_noted(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[float] = []
    monkeypatch.setattr(DiskPace, "note", lambda pace, seconds: noted.append(seconds))
    times = iter((5.0, 5.0 + 3 * QUICK_SECONDS))
    monkeypatch.setattr("duly.storage.sqlite.writer.perf_counter", lambda: next(times))
    await ledger.commit([put("a")])
    assert noted == [pytest.approx(3 * QUICK_SECONDS)]


async def test_what_comes_during_a_flush_of_the_thread_is_flushed_by_the_loop_after_it(
    ledger: SqliteLedger, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    go_on = threading.Event()
    flushes.during = lambda: None if flushes.carried_out[-1] == LOOP else _wait_for(go_on)
    large = ledger.commit([put("a", SMALL_FLUSH)])
    await asyncio.sleep(0)  # it is handed to the thread, which waits
    small = [ledger.commit([put(name)]) for name in ("b", "c")]
    go_on.set()
    await asyncio.gather(large, *small)
    assert flushes.taken() == [THREAD, LOOP]
    await ledger.commit([put("d")])
    assert await ledger.items([("things", name) for name in "abcd"]) == [b"x" * SMALL_FLUSH, *[b"x" * 10] * 3]


async def test_while_the_tables_are_written_the_thread_flushes(
    ledger: SqliteLedger, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    go_on = threading.Event()
    write = SqliteWriter.write_tables

    def slowly(writer: SqliteWriter, *args: object) -> None:
        _wait_for(go_on)
        write(writer, *args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(SqliteWriter, "write_tables", slowly)
    await ledger.commit([put("a")])
    asked = asyncio.ensure_future(ledger.size())  # which has the tables written first
    await asyncio.sleep(0)
    small = ledger.commit([put("b")])
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(asked, small)
    assert flushes.taken() == [LOOP, THREAD]


async def test_a_flush_of_the_loop_that_fails_leaves_nothing(
    ledger: SqliteLedger, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.commit([put("a")])
    with monkeypatch.context() as full:
        flushes = Flushes(full)

        def fail() -> None:
            raise apsw.FullError("planted")

        flushes.during = fail
        with pytest.raises(LedgerUnavailable, match="is full"):
            await ledger.commit([put("b")])
        assert flushes.taken() == [LOOP]
    assert await ledger.item("things", "b") is None
    await ledger.commit([put("c")])
    assert await ledger.items([("things", name) for name in "abc"]) == [b"x" * 10, None, b"x" * 10]


async def test_a_log_that_grows_by_flushes_of_the_loop_is_moved_into_the_database(
    ledger: SqliteLedger, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = asyncio.Event()
    loop = asyncio.get_running_loop()
    checkpoint = SqliteWriter._checkpoint

    def noted(writer: SqliteWriter) -> None:
        checkpoint(writer)
        loop.call_soon_threadsafe(moved.set)

    monkeypatch.setattr(SqliteWriter, "_checkpoint", noted)
    monkeypatch.setattr("duly.storage.sqlite.flushes.SECONDS_BEHIND", 1_000.0)
    assert ledger._writer is not None
    ledger._writer._checkpoint_at = 4
    for n in range(10):
        await ledger.commit([put(f"{n}", 4_000)])
    await moved.wait()


def _wait_for(event: threading.Event) -> None:
    assert event.wait(GUARD)
