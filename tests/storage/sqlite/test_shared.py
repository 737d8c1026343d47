"""A SQLite ledger that several processes write. The contract of all ledgers is in tests/storage; here is what
only the sharing of a file brings."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import duly
from duly.core.messages import Message, VerdictKind
from duly.core.operations import Admit
from duly.core.units import FOREVER
from duly.errors import LedgerDamaged, LedgerInUse, LedgerUnavailable, Malformed
from duly.storage import open_ledger
from duly.storage.ledger import Ledger
from duly.storage.sqlite import shared
from tests.guard import GUARD

WRITER = """
import asyncio, sys
from duly.core.messages import Message
from duly.storage import open_ledger
from duly.core.operations import Admit

async def main(url, count):
    ledger = await open_ledger(url)
    async def one(n):
        verdict = await ledger.apply(Admit(Message("s", f"id-{n}", "k", "r"), 1 << 61, 1))
        return verdict.fresh
    print(sum(await asyncio.gather(*(one(n) for n in range(count)))))
    await ledger.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def message(n: int = 1) -> Message:
    return Message("s", f"id-{n}", "k", "r")


async def admit(ledger: Ledger, n: int = 1) -> VerdictKind:
    return (await ledger.apply(Admit(message(n), FOREVER, 1))).kind


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db?mode=shared"


async def test_of_many_processes_that_admit_the_same_ids_one_gets_each(url: str) -> None:
    count = 300
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, url, str(count), stdout=-1)
        for _ in range(4)
    ]
    fresh = [int((await process.communicate())[0]) for process in processes]
    assert sum(fresh) == count
    async with await open_ledger(url) as ledger:
        assert (await ledger.size()).messages == count


async def test_two_ledgers_of_one_process_see_what_the_other_writes(url: str) -> None:
    async with await open_ledger(url) as one, await open_ledger(url) as two:
        assert await admit(one) is VerdictKind.FRESH
        assert await admit(two) is VerdictKind.DUPLICATE
    async with await open_ledger(url) as again:
        assert await admit(again) is VerdictKind.DUPLICATE


async def test_what_an_owner_has_left_is_there_and_the_other_way_round(url: str, tmp_path: Path) -> None:
    owned = f"sqlite:///{tmp_path}/app.db"
    for n, place in enumerate((owned, url, owned, url)):
        async with await open_ledger(place) as ledger:
            assert [await admit(ledger, k) for k in range(n + 1)] == [VerdictKind.DUPLICATE] * n + [
                VerdictKind.FRESH
            ]


async def test_what_an_owner_had_committed_when_it_was_killed_is_there(url: str, tmp_path: Path) -> None:
    program = WRITER.replace("await ledger.close()", "import os; os._exit(9)")
    owned = f"sqlite:///{tmp_path}/app.db"
    died = await asyncio.create_subprocess_exec(sys.executable, "-c", program, owned, "20")
    assert await died.wait() == 9
    async with await open_ledger(url) as ledger:
        assert {await admit(ledger, n) for n in range(20)} == {VerdictKind.DUPLICATE}


async def test_an_owner_and_sharers_exclude_each_other(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PATIENCE", 0.05)
    owned = f"sqlite:///{tmp_path}/app.db"
    async with await open_ledger(owned):
        with pytest.raises(LedgerInUse, match=r"\?mode=shared"):
            await open_ledger(url)
    async with await open_ledger(url):
        with pytest.raises(LedgerInUse):
            await open_ledger(owned)
    await (await open_ledger(owned)).close()


async def test_another_process_hears_of_an_end(url: str) -> None:
    from duly.core.lifecycle import State
    from duly.core.operations import Advance

    async with await open_ledger(url) as one, await open_ledger(url) as two:
        await admit(one)
        waiting = asyncio.create_task(two.wait(message().key, 20))
        await one.write(Advance(message().key, State.DONE, 2))
        record = await waiting
        assert record is not None
        assert record.state is State.DONE


async def test_a_ledger_goes_on_after_a_fork_and_the_child_opens_its_own(url: str) -> None:
    async with await open_ledger(url) as ledger:
        assert await admit(ledger, 1) is VerdictKind.FRESH
        here, there = multiprocessing.Pipe()
        pid = os.fork()
        if not pid:
            try:
                there.send(asyncio.new_event_loop().run_until_complete(_in_child(url)))
            finally:
                os._exit(0)
        assert here.poll(20)
        assert here.recv() == ["duplicate", "fresh"]
        await asyncio.to_thread(os.waitpid, pid, 0)
        assert [await admit(ledger, n) for n in (1, 2, 3)] == [
            VerdictKind.DUPLICATE,
            VerdictKind.DUPLICATE,
            VerdictKind.FRESH,
        ]


async def _in_child(url: str) -> list[str]:
    async with await open_ledger(url) as ledger:
        return [(await admit(ledger, n)).value for n in (1, 2)]


async def test_a_file_that_is_replaced_under_a_ledger_is_noticed(url: str, tmp_path: Path) -> None:
    async with await open_ledger(url) as ledger:
        await admit(ledger)
        (tmp_path / "app.db").rename(tmp_path / "moved.db")
        with pytest.raises(LedgerDamaged, match="was removed"):
            await admit(ledger, 2)
        with pytest.raises(LedgerDamaged):
            ledger.check()
        (tmp_path / "moved.db").rename(tmp_path / "app.db")
        assert await admit(ledger, 2) is VerdictKind.FRESH


async def test_a_cancelled_transaction_leaves_nothing_and_lets_others_write(url: str) -> None:
    async with await open_ledger(url) as ledger, await open_ledger(url) as other:
        begun = asyncio.Event()

        async def hang() -> None:
            async with ledger.transaction() as tx:
                await tx.write(Admit(message(1), FOREVER, 1))
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hang())
        await begun.wait()
        next_one = asyncio.create_task(hang())  # waits for its turn
        await asyncio.sleep(0)
        next_one.cancel()
        task.cancel()
        await asyncio.gather(task, next_one, return_exceptions=True)
        assert await admit(other, 1) is VerdictKind.FRESH
        assert await admit(ledger, 2) is VerdictKind.FRESH


async def test_a_missing_folder_and_an_unknown_mode_are_told(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="create it first"):
        await open_ledger(f"sqlite:///{tmp_path}/none/app.db?mode=shared")
    with pytest.raises(Malformed, match="mode=shared"):
        await open_ledger(f"sqlite:///{tmp_path}/app.db?mode=rwx")


# ── who is alive ─────────────────────────────────────────────────────────────────────────────────

ALIVE = """
import asyncio, os, sys, time
import duly

async def main(url):
    ledger = await duly.open_ledger(url)
    if "fork" in sys.argv:
        child = os.fork()
        if not child:
            sys.stdin.readline()  # it outlives its parent
            os._exit(0)
    print(ledger.worker, flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="presence locks are Linux's")
@pytest.mark.parametrize("more", [[], ["fork"]])
async def test_a_worker_is_gone_when_its_process_is_and_no_sooner(url: str, more: list[str]) -> None:
    ledger = await open_ledger(url)
    command = [sys.executable, "-W", "ignore", "-c", ALIVE, url, *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = process.stdout.readline().decode().strip()
        assert worker.endswith("+")
        assert not ledger.is_gone(worker)
        process.kill()
        process.wait(GUARD)
        async with asyncio.timeout(
            GUARD
        ):  # what it has forked closes its copy of the lock when it first runs
            while not ledger.is_gone(worker):
                await asyncio.sleep(0.01)
    assert not ledger.is_gone(worker[:-1]), "one that holds no lock may be alive"
    await ledger.close()


async def test_a_run_whose_process_was_killed_is_taken_over_at_once(url: str, tmp_path: Path) -> None:
    hour, log = "3600", str(tmp_path / "log")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.once_process", url, "at_least_once", log, hour, stdin=-1, stdout=-1
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    ledger = await open_ledger(url)

    @duly.once(ledger, scope="shop", key=str, effect="at_least_once", lease=float(hour))
    async def pay(order: str, amount: int = 1) -> str:
        return "taken over"

    waiting = asyncio.create_task(pay("o-1"))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    process.kill()
    await process.communicate()
    assert await asyncio.wait_for(waiting, GUARD) == "taken over"
    await ledger.close()


async def test_a_run_that_has_ended_leaves_no_delivery_behind(url: str) -> None:
    @duly.once(url, scope="payments", key=lambda order: order)
    async def charge(order: int) -> int:
        return order

    assert [await charge(n) for n in (*range(5), *range(5))] == [*range(5), *range(5)]
    async with await open_ledger(url) as ledger:
        size = await ledger.size()
    assert (size.messages, size.deliveries) == (5, 0)
