"""What `duly.once` promises, on every ledger. Crashes are real: a child process, killed with SIGKILL, whose
effects are lines it appended to a file."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import msgspec
import pytest

import duly
from duly.core.lifecycle import State
from duly.core.messages import NAME_LIMIT, key_of
from duly.core.operations import Delivery, Finish, Group, Results
from duly.core.units import SECOND
from duly.errors import LedgerUnavailable, Malformed, ProgramError, TooLarge
from duly.storage.ledger import Ledger, Transaction
from tests.guard import GUARD
from tests.storage import conftest as ledgers

if TYPE_CHECKING:
    from nowhere import OnlyForTheTypeChecker  # type: ignore[import-not-found]  # it exists nowhere

Store = ledgers.Store
store = ledgers.store
ledger = ledgers.ledger

on_disk = pytest.mark.parametrize("store", ["sqlite", "shared", "postgres"], indirect=True)
embedded = pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
shared = pytest.mark.parametrize("store", ["shared", "postgres"], indirect=True)
either_effect = pytest.mark.parametrize("effect", ["at_most_once", "at_least_once"])

KEY = key_of("shop", "o-1")


class Shop:
    """A function under `once`, what it did, and handles to hold it in the middle or let it fail."""

    def __init__(self, ledger: Ledger, **options: Any) -> None:
        self.runs: list[tuple[str, int]] = []
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None  # of the run that comes next to its end

        once: Any = duly.once(ledger, scope="shop", key=lambda order, amount=1: order, **options)
        self.charge: Callable[..., Awaitable[str]] = once(self._charge)

    async def _charge(self, order: str, amount: int = 1) -> str:
        self.runs.append((order, amount))
        self.begun.set()
        await self.gate.wait()
        error, self.error = self.error, None
        if error is not None:
            raise error
        return f"paid {order}"

    async def hold(self) -> asyncio.Task[str]:
        """A call that is in the middle of its run."""
        self.gate.clear()
        task = asyncio.ensure_future(self.charge("o-1"))
        await self.begun.wait()
        return task


async def until(true: Callable[[], bool | Awaitable[bool]]) -> None:
    """Come back as soon as something that nobody announces is so."""
    async with asyncio.timeout(GUARD):
        while not (so if isinstance(so := true(), bool) else await so):
            await asyncio.sleep(0.001)


async def are_waiting(ledger: Ledger, *repeats: asyncio.Task[Any]) -> None:
    """Come back once these wait for news of the key."""
    await until(lambda: len(ledger._waiters.by_key.get(KEY, ())) == len(repeats))


# ── the first call and its repeats ───────────────────────────────────────────────────────────────


async def test_the_first_call_runs_and_its_result_is_stored(ledger: Ledger) -> None:
    shop = Shop(ledger)
    assert await shop.charge("o-1") == "paid o-1"
    record = await ledger.outcome("shop", "o-1")
    assert record is not None
    assert record.answer is not None
    assert (record.state, record.answer.data) == (State.DONE, b'"paid o-1"')


async def test_it_is_stored_as_begun_before_it_runs(ledger: Ledger) -> None:
    shop = Shop(ledger)
    first = await shop.hold()
    record = await ledger.outcome("shop", "o-1")
    assert record is not None
    assert record.state is State.SENT
    shop.gate.set()
    await first


async def test_a_repeat_gets_the_stored_result_and_nothing_runs(ledger: Ledger) -> None:
    shop = Shop(ledger)
    assert [await shop.charge("o-1") for _ in range(3)] == ["paid o-1"] * 3
    assert shop.runs == [("o-1", 1)]


async def test_a_repeat_gets_the_stored_result_after_a_restart(store: Store) -> None:
    await Shop(await store.open()).charge("o-1")
    again = Shop(await store.reopen())
    assert await again.charge("o-1") == "paid o-1"
    assert again.runs == []


async def test_another_key_or_another_scope_is_another_call(ledger: Ledger) -> None:
    shop = Shop(ledger)
    await shop.charge("o-1")
    await shop.charge("o-2")
    assert shop.runs == [("o-1", 1), ("o-2", 1)]

    @duly.once(ledger, scope="other", key=lambda order: order)
    async def charge(order: str) -> str:
        return "paid remote"

    assert await charge("o-1") == "paid remote"


@embedded
@pytest.mark.parametrize("key", [7, UUID(int=7), ("a", 7), Decimal("7.0")])
async def test_a_key_may_be_anything_with_a_text_of_its_own(ledger: Ledger, key: object) -> None:
    @duly.once(ledger, scope="shop", key=lambda: key)
    async def charge() -> int:
        return 1

    assert await charge() == 1
    assert await ledger.outcome("shop", str(key)) is not None


async def test_an_argument_by_position_or_by_name_is_the_same_call(ledger: Ledger) -> None:
    shop = Shop(ledger)
    await shop.charge("o-1", 5)
    assert await shop.charge(order="o-1", amount=5) == await shop.charge("o-1", amount=5) == "paid o-1"
    assert len(shop.runs) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(("o-1",), {}), (("o-1", 5), {}), (("o-1",), {"tags": ["new"]}), (("o-1", 5, ["new"]), {"gift": False})],
)
async def test_an_argument_that_is_its_default_is_the_same_call_as_one_that_is_left_out(
    ledger: Ledger, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    runs: list[str] = []

    @duly.once(ledger, scope="shop", key=lambda order, *_, **__: order)
    async def charge(order: str, amount: int = 5, tags: list[str] = ["new"], *, gift: bool = False) -> str:  # noqa: B006
        runs.append(order)
        return f"paid {order}"

    await charge("o-1")
    assert await charge(*args, **kwargs) == "paid o-1"
    assert runs == ["o-1"]
    others: tuple[dict[str, Any], ...] = ({"amount": 5.0}, {"amount": "5"}, {"tags": ("new",)}, {"gift": 0})
    for other in others:  # equal to a default, or written alike, and of another type
        with pytest.raises(duly.Conflict):
            await charge("o-1", **other)


async def test_one_key_with_other_arguments_is_a_conflict_that_is_recorded_and_never_run(
    ledger: Ledger,
) -> None:
    shop = Shop(ledger)
    await shop.charge("o-1", 5)
    for _ in range(2):
        with pytest.raises(duly.Conflict, match="shop/o-1"):
            await shop.charge("o-1", 6)
    assert shop.runs == [("o-1", 5)]
    assert [(r.id, r.word) for r in await ledger.refusals()] == [("o-1", "conflict")] * 2


async def test_other_arguments_are_a_conflict_while_the_first_is_running_too(ledger: Ledger) -> None:
    shop = Shop(ledger)
    first = await shop.hold()
    with pytest.raises(duly.Conflict):
        await shop.charge("o-1", 6)
    shop.gate.set()
    assert await first == "paid o-1"


async def test_meaning_says_which_arguments_must_be_the_same(ledger: Ledger) -> None:
    shop = Shop(ledger, meaning=lambda order, amount=1: order)
    await shop.charge("o-1", 5)
    assert await shop.charge("o-1", 6) == "paid o-1"
    assert shop.runs == [("o-1", 5)]


# ── repeats while the first is running ───────────────────────────────────────────────────────────


async def test_a_repeat_waits_for_the_first_and_gets_its_result(ledger: Ledger) -> None:
    shop = Shop(ledger)
    first = await shop.hold()
    repeat = asyncio.ensure_future(shop.charge("o-1"))
    await are_waiting(ledger, repeat)
    shop.gate.set()
    assert [await first, await repeat] == ["paid o-1"] * 2
    assert len(shop.runs) == 1


@either_effect
async def test_a_hundred_callers_at_once_are_one_run(ledger: Ledger, effect: str) -> None:
    shop = Shop(ledger, effect=effect)
    assert set(await asyncio.gather(*(shop.charge("o-1") for _ in range(100)))) == {"paid o-1"}
    assert len(shop.runs) == 1


@shared
@either_effect
async def test_a_repeat_waits_for_a_first_on_another_server(store: Store, effect: str) -> None:
    here, there = Shop(await store.open(), effect=effect), Shop(other := await store.open(), effect=effect)
    first = await here.hold()
    repeat = asyncio.ensure_future(there.charge("o-1"))
    await are_waiting(other, repeat)
    here.gate.set()
    async with asyncio.timeout(10):  # well before the lease of 30 s: the news travels
        assert [await first, await repeat] == ["paid o-1"] * 2
    assert there.runs == []


@shared
async def test_a_first_that_fails_on_another_server_lets_the_waiting_repeat_run(store: Store) -> None:
    here, there = Shop(await store.open()), Shop(other := await store.open())
    first = await here.hold()
    repeat = asyncio.ensure_future(there.charge("o-1"))
    await are_waiting(other, repeat)
    here.error = OSError("no")
    here.gate.set()
    with pytest.raises(OSError, match="no"):
        await first
    async with asyncio.timeout(GUARD):
        assert await repeat == "paid o-1"
    assert len(there.runs) == 1


@shared
async def test_a_first_that_is_cancelled_on_another_server_lets_the_waiting_repeat_run(store: Store) -> None:
    here = Shop(await store.open(), effect="at_least_once", lease=0.5)
    there = Shop(other := await store.open(), effect="at_least_once", lease=0.5)
    first = await here.hold()
    repeat = asyncio.ensure_future(there.charge("o-1"))
    await are_waiting(other, repeat)
    first.cancel()
    async with asyncio.timeout(GUARD):
        assert await repeat == "paid o-1"
    assert len(there.runs) == 1


@shared
async def test_a_hundred_callers_on_two_servers_are_one_run(store: Store) -> None:
    shops = [Shop(await store.open()), Shop(await store.open())]
    async with asyncio.timeout(GUARD):
        results = await asyncio.gather(*(shop.charge("o-1") for shop in shops for _ in range(50)))
    assert set(results) == {"paid o-1"}
    assert sum(len(shop.runs) for shop in shops) == 1


# ── crashes: kill -9 of a real process ───────────────────────────────────────────────────────────


class Child:
    """The same function in another process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def says(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def kill(self) -> None:
        self._process.kill()
        await self._process.communicate()


@asynccontextmanager
async def child(
    store: Store, log: Path, *, effect: str = "at_most_once", lease: float = 30
) -> AsyncIterator[Child]:
    args = ["-m", "tests.once_process", store.url, effect, str(log), str(lease)]
    process = await asyncio.create_subprocess_exec(sys.executable, *args, stdin=PIPE, stdout=PIPE)
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the child's effects are."""
    return tmp_path / "effects"


def effects(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def let_leases_run_out(store: Store, lease: float = 30) -> None:
    store.clock.set(time.time_ns() // 1_000 + round(lease * SECOND))


@on_disk
async def test_a_repeat_in_another_process_gets_the_stored_result(store: Store, log: Path) -> None:
    await Shop(await store.open()).charge("o-1")
    await store.close()
    async with child(store, log) as other:
        assert await other.says() == "paid o-1"
    assert effects(log) == []


@on_disk
@pytest.mark.parametrize("effect", ["at_most_once", "at_least_once"])
async def test_what_was_returned_survives_kill_9(store: Store, log: Path, effect: str) -> None:
    async with child(store, log, effect=effect) as first:
        assert await first.says() == "begun"
        first.go_on()
        assert await first.says() == "paid o-1"
        await first.kill()
    shop = Shop(await store.open(), effect=effect)
    assert await shop.charge("o-1") == "paid o-1"
    assert (effects(log), shop.runs) == (["o-1"], [])


@on_disk
async def test_at_most_once_killed_in_the_middle_is_unknown_for_ever(store: Store, log: Path) -> None:
    async with child(store, log) as first:
        assert await first.says() == "begun"
        await first.kill()
    let_leases_run_out(store)
    for _ in range(2):
        shop = Shop(await store.reopen())
        for _ in range(2):
            with pytest.raises(duly.Unknown, match="shop/o-1"):
                await shop.charge("o-1")
        assert shop.runs == []
    assert effects(log) == ["o-1"]


@on_disk
async def test_at_least_once_killed_in_the_middle_runs_again_with_the_same_key(
    store: Store, log: Path
) -> None:
    async with child(store, log, effect="at_least_once") as first:
        assert await first.says() == "begun"
        await first.kill()
    let_leases_run_out(store)
    shop = Shop(await store.open(), effect="at_least_once")
    assert await asyncio.gather(*(shop.charge("o-1") for _ in range(5))) == ["paid o-1"] * 5
    assert (effects(log), shop.runs) == (["o-1"], [("o-1", 1)])


@shared
@pytest.mark.parametrize(("effect", "runs"), [("at_most_once", []), ("at_least_once", [("o-1", 1)])])
async def test_on_a_shared_ledger_a_dead_process_blocks_its_key_until_its_lease_or_its_lock_says_so(
    store: Store, log: Path, effect: str, runs: list[Any]
) -> None:
    async with child(store, log, effect=effect, lease=1) as first:
        assert await first.says() == "begun"
        began = time.monotonic()
        await first.kill()
    async with await duly.open_ledger(store.url) as ledger:  # on the real clock
        shop = Shop(ledger, effect=effect)
        (end,) = await asyncio.gather(shop.charge("o-1"), return_exceptions=True)
        tells = ledger.is_gone("1-0+")
    assert isinstance(end, duly.Unknown) if effect == "at_most_once" else end == "paid o-1"
    assert shop.runs == runs
    if not tells:  # a ledger that has nothing but leases to tell by
        assert time.monotonic() - began > 0.5


# ── leases, on a ledger that several servers write ───────────────────────────────────────────────


@shared
@either_effect
async def test_a_run_longer_than_its_lease_keeps_it_by_renewal(store: Store, effect: str) -> None:
    here = Shop(ledger := await store.open(), effect=effect, lease=0.1)
    there = Shop(other := await store.open(), effect=effect, lease=0.1)
    first = await here.hold()

    async def renewed() -> bool:
        return (await ledger.deliveries(KEY))[0].due == store.clock.now() + SECOND // 10

    for _ in range(3):
        store.clock.advance(0.09)
        await until(renewed)
    repeat = asyncio.ensure_future(there.charge("o-1"))
    await are_waiting(other, repeat)
    here.gate.set()
    assert [await first, await repeat] == ["paid o-1"] * 2
    assert there.runs == []


@shared
async def test_at_most_once_that_lost_its_lease_cannot_overwrite_the_outcome(store: Store) -> None:
    here, there = Shop(await store.open()), Shop(await store.open())
    first = await here.hold()
    store.clock.advance(31)  # asleep: nothing was renewed meanwhile
    with pytest.raises(duly.Unknown):
        await there.charge("o-1")
    here.gate.set()
    with pytest.raises(duly.Unknown):
        await first
    for shop in (here, there):
        with pytest.raises(duly.Unknown):
            await shop.charge("o-1")
    assert (len(here.runs), len(there.runs)) == (1, 0)


@shared
async def test_at_least_once_that_lost_its_lease_gets_the_outcome_of_the_run_that_took_over(
    store: Store,
) -> None:
    here = Shop(await store.open(), effect="at_least_once")
    first = await here.hold()
    store.clock.advance(31)

    @duly.once(await store.open(), scope="shop", key=lambda order: order, effect="at_least_once")
    async def charge(order: str) -> str:
        return "paid by the other"

    assert await charge("o-1") == "paid by the other"
    here.gate.set()
    assert await first == await charge("o-1") == await here.charge("o-1") == "paid by the other"


@shared
async def test_a_late_result_does_not_end_the_run_that_took_over(store: Store) -> None:
    here = Shop(ledger := await store.open(), effect="at_least_once")
    there = Shop(await store.open(), effect="at_least_once")
    late = await here.hold()
    store.clock.advance(31)
    second = await there.hold()
    here.gate.set()
    await are_waiting(ledger, late)
    there.error = OSError("no")
    there.gate.set()
    with pytest.raises(OSError, match="no"):
        await second
    with pytest.raises(duly.Unknown, match="ended without an outcome"):
        await late


@shared
async def test_a_late_failure_does_not_free_a_key_that_was_taken_over(store: Store) -> None:
    here = Shop(await store.open(), effect="at_least_once")
    there = Shop(await store.open(), effect="at_least_once")
    late = await here.hold()
    store.clock.advance(31)
    second = await there.hold()
    here.error = OSError("timed out")
    here.gate.set()
    with pytest.raises(OSError, match="timed out"):
        await late
    there.gate.set()
    assert await second == await there.charge("o-1") == "paid o-1"
    assert len(there.runs) == 1


# ── cancellation ─────────────────────────────────────────────────────────────────────────────────


async def test_at_most_once_cancelled_in_the_middle_is_unknown_for_ever(store: Store) -> None:
    shop = Shop(ledger := await store.open())
    first = await shop.hold()
    repeat = asyncio.ensure_future(shop.charge("o-1"))
    await are_waiting(ledger, repeat)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(duly.Unknown, match="cancelled"):
        await repeat
    again = Shop(await store.reopen())
    with pytest.raises(duly.Unknown, match="cancelled"):
        await again.charge("o-1")
    assert (len(shop.runs), len(again.runs)) == (1, 0)


async def test_at_least_once_cancelled_in_the_middle_is_run_by_the_repeat_that_waits(ledger: Ledger) -> None:
    shop = Shop(ledger, effect="at_least_once")
    first = await shop.hold()
    repeat = asyncio.ensure_future(shop.charge("o-1"))
    await are_waiting(ledger, repeat)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    shop.gate.set()
    assert await repeat == "paid o-1"
    assert shop.runs == [("o-1", 1)] * 2


async def test_a_repeat_that_stops_waiting_leaves_the_first_alone(ledger: Ledger) -> None:
    shop = Shop(ledger)
    first = await shop.hold()
    repeat = asyncio.ensure_future(shop.charge("o-1"))
    await are_waiting(ledger, repeat)
    repeat.cancel()
    with pytest.raises(asyncio.CancelledError):
        await repeat
    shop.gate.set()
    assert await first == "paid o-1"


@either_effect
async def test_a_call_cancelled_before_it_began_leaves_its_key_free(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    shop = Shop(ledger, effect=effect)
    commit, handed_over, through = ledger.commit, asyncio.Event(), asyncio.Event()

    async def slow(groups: Sequence[Group]) -> list[Results]:
        handed_over.set()
        results = await commit(groups)
        await through.wait()
        return results

    monkeypatch.setattr(ledger, "commit", slow)
    call = asyncio.ensure_future(shop.charge("o-1"))
    await handed_over.wait()
    call.cancel()
    through.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert shop.runs == []
    assert await ledger.outcome("shop", "o-1") is None
    assert await shop.charge("o-1") == "paid o-1"


async def test_a_run_that_is_thrown_away_does_not_hang_its_repeats(ledger: Ledger) -> None:
    @duly.once(ledger, scope="shop", key=lambda: "o-1")
    async def charge() -> None:
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()
    run: Any = charge()
    while not begun.is_set():  # driven by hand, up to the middle
        wanted = run.send(None)
        if wanted is not None and not begun.is_set():
            wanted._asyncio_future_blocking = False
            await asyncio.wait([wanted])
    run.close()
    with pytest.raises(duly.Unknown):
        await charge()


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────


@either_effect
async def test_an_exception_is_passed_on_and_frees_the_key(ledger: Ledger, effect: str) -> None:
    shop = Shop(ledger, effect=effect)
    shop.error = OSError("the bank is closed")
    with pytest.raises(OSError, match="the bank is closed"):
        await shop.charge("o-1")
    assert await ledger.outcome("shop", "o-1") is None
    assert await shop.charge("o-1", 2) == "paid o-1"
    assert shop.runs == [("o-1", 1), ("o-1", 2)]


async def test_after_an_exception_one_of_the_waiting_repeats_runs(ledger: Ledger) -> None:
    shop = Shop(ledger)
    first = await shop.hold()
    repeats = [asyncio.ensure_future(shop.charge("o-1")) for _ in range(3)]
    await are_waiting(ledger, *repeats)
    shop.error = OSError("once only")
    shop.gate.set()
    with pytest.raises(OSError, match="once only"):
        await first
    assert await asyncio.gather(*repeats) == ["paid o-1"] * 3
    assert len(shop.runs) == 2


@either_effect
async def test_a_repeat_that_looked_before_the_key_was_freed_does_not_disturb_the_next_run(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    shop = Shop(ledger, effect=effect)
    first = await shop.hold()
    look, looked, go_on = ledger.deliveries, asyncio.Event(), asyncio.Event()

    async def slow(key: bytes) -> list[Delivery]:
        found = await look(key)
        looked.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(ledger, "deliveries", slow)
    late = asyncio.ensure_future(shop.charge("o-1"))
    await looked.wait()
    monkeypatch.undo()
    shop.error = OSError("no")
    shop.gate.set()
    with pytest.raises(OSError, match="no"):
        await first
    shop.begun.clear()
    second = await shop.hold()
    again = asyncio.Event()

    async def noticed(key: bytes) -> list[Delivery]:
        again.set()
        return await look(key)

    monkeypatch.setattr(ledger, "deliveries", noticed)
    go_on.set()
    async with asyncio.timeout(GUARD):
        await again.wait()  # its claim on the first run came to nothing, and it looks again
    shop.gate.set()
    assert [await second, await late] == ["paid o-1"] * 2
    assert len(shop.runs) == 2


async def test_a_stored_exception_is_the_outcome_and_repeats_raise_failed(store: Store) -> None:
    shop = Shop(await store.open(), errors="store")
    shop.error = OSError("the bank is closed")
    with pytest.raises(OSError, match="the bank is closed"):
        await shop.charge("o-1")
    for _ in range(2):
        again = Shop(await store.reopen(), errors="store")
        for _ in range(2):
            with pytest.raises(duly.Failed) as caught:
                await again.charge("o-1")
            assert (caught.value.kind, caught.value.detail) == ("OSError", "the bank is closed")
        assert again.runs == []


async def test_a_repeat_that_waits_raises_the_stored_exception(ledger: Ledger) -> None:
    shop = Shop(ledger, errors="store")
    first = await shop.hold()
    repeat = asyncio.ensure_future(shop.charge("o-1"))
    await are_waiting(ledger, repeat)
    shop.error = OSError("the bank is closed")
    shop.gate.set()
    with pytest.raises(OSError, match="the bank is closed"):
        await first
    with pytest.raises(duly.Failed, match="OSError: the bank is closed"):
        await repeat


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize("errors", ["retry", "store"])
@pytest.mark.parametrize(
    "error",
    [OSError("no such file: \udcff\0"), ValueError("x" * 3_000_000), Speechless()],
    ids=lambda e: type(e).__name__,
)
async def test_whatever_an_exception_says_the_key_does_not_hang(
    ledger: Ledger, error: Exception, errors: str
) -> None:
    shop = Shop(ledger, errors=errors)
    for _ in range(2):
        shop.error = error
        with pytest.raises((type(error), duly.Failed)):
            await shop.charge("o-1")
    assert len(shop.runs) == (2 if errors == "retry" else 1)


@either_effect
async def test_a_beginning_that_could_not_be_stored_for_certain_is_run_by_the_repeat(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    shop = Shop(ledger, effect=effect)
    commit = ledger.commit

    async def lost_answer(groups: Sequence[Group]) -> list[Results]:
        await commit(groups)
        raise LedgerUnavailable("the connection was lost; it may or may not be stored")

    monkeypatch.setattr(ledger, "commit", lost_answer)
    with pytest.raises(LedgerUnavailable):
        await shop.charge("o-1")
    monkeypatch.undo()
    assert shop.runs == []
    assert await asyncio.gather(*(shop.charge("o-1") for _ in range(3))) == ["paid o-1"] * 3
    assert len(shop.runs) == 1


@pytest.mark.parametrize(("effect", "runs"), [("at_most_once", 1), ("at_least_once", 2)])
async def test_an_end_that_could_not_be_stored_does_not_hang_its_repeats(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, effect: str, runs: int
) -> None:
    shop = Shop(ledger, effect=effect)
    commit = ledger.commit

    async def full_disk(groups: Sequence[Group]) -> list[Results]:
        if any(isinstance(write, Finish) for group in groups for write in group):
            raise LedgerUnavailable("the disk is full; nothing was stored")
        return await commit(groups)

    monkeypatch.setattr(ledger, "commit", full_disk)
    with pytest.raises(LedgerUnavailable):
        await shop.charge("o-1")
    monkeypatch.undo()
    (end,) = await asyncio.gather(shop.charge("o-1"), return_exceptions=True)
    assert isinstance(end, duly.Unknown) if effect == "at_most_once" else end == "paid o-1"
    assert len(shop.runs) == runs


# ── exactly once: the caller's SQL and the memory of the call are one ────────────────────────────


class Till:
    """A function that works inside the ledger's transaction."""

    def __init__(self, ledger: Ledger, **options: Any) -> None:
        self.ledger = ledger
        self.error: Exception | None = None
        self.result: object = "paid"
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        options |= {"effect": "exactly_once"}
        once: Any = duly.once(ledger, scope="shop", key=lambda order, amount=1: order, **options)
        self.charge: Callable[..., Awaitable[Any]] = once(self._charge)

    async def _charge(self, tx: Transaction, order: str, amount: int = 1) -> Any:
        await tx.execute(f"INSERT INTO paid VALUES ('{order}')")
        self.begun.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.result

    async def paid(self) -> list[str]:
        async with self.ledger.transaction() as tx:
            return [row[0] for row in await tx.fetch("SELECT id FROM paid")]


@pytest.fixture
async def till(store: Store) -> Till:
    ledger = await store.open()
    async with ledger.transaction() as tx:
        await tx.execute("CREATE TABLE paid (id TEXT NOT NULL)")
    return Till(ledger)


@on_disk
async def test_exactly_once_the_sql_commits_with_the_memory_of_the_call(till: Till, store: Store) -> None:
    assert [await till.charge("o-1"), await till.charge("o-1")] == ["paid", "paid"]
    assert await till.paid() == ["o-1"]
    again = Till(await store.reopen())
    assert await again.charge("o-1") == "paid"
    assert await again.paid() == ["o-1"]


@on_disk
async def test_exactly_once_an_exception_undoes_both(till: Till) -> None:
    till.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        await till.charge("o-1")
    assert await till.paid() == []
    assert await till.ledger.outcome("shop", "o-1") is None
    till.error = None
    assert await till.charge("o-1") == "paid"
    assert await till.paid() == ["o-1"]


@on_disk
@pytest.mark.parametrize("error", [OSError("no"), duly.Conflict("of another call")])
async def test_exactly_once_a_stored_exception_undoes_the_sql_and_is_the_outcome(
    till: Till, error: Exception
) -> None:
    storing = Till(till.ledger, errors="store")
    storing.error = error
    with pytest.raises(type(error)):
        await storing.charge("o-1")
    with pytest.raises(duly.Failed, match=str(error)):
        await storing.charge("o-1")
    assert await till.paid() == []


@on_disk
async def test_exactly_once_cancelled_in_the_middle_undoes_both(till: Till) -> None:
    till.gate.clear()
    first = asyncio.ensure_future(till.charge("o-1"))
    await till.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await till.paid() == []
    till.gate.set()
    assert await till.charge("o-1") == "paid"


@on_disk
async def test_exactly_once_killed_in_the_middle_leaves_neither(till: Till, store: Store, log: Path) -> None:
    await store.close()
    async with child(store, log, effect="exactly_once") as first:
        assert await first.says() == "begun"
        await first.kill()
    again = Till(await store.open())
    assert await again.paid() == []
    assert await again.charge("o-1") == "paid"
    assert await again.paid() == ["o-1"]


@on_disk
async def test_exactly_once_what_was_returned_survives_kill_9(till: Till, store: Store, log: Path) -> None:
    await store.close()
    async with child(store, log, effect="exactly_once") as first:
        assert await first.says() == "begun"
        first.go_on()
        assert await first.says() == "paid o-1"
        await first.kill()
    again = Till(await store.open())
    assert await again.charge("o-1") == "paid o-1"
    assert await again.paid() == ["o-1"]


@on_disk
async def test_exactly_once_fifty_callers_at_once_are_one_run(till: Till) -> None:
    assert set(await asyncio.gather(*(till.charge("o-1") for _ in range(50)))) == {"paid"}
    assert await till.paid() == ["o-1"]


@shared
async def test_exactly_once_callers_on_two_servers_are_one_run(till: Till, store: Store) -> None:
    there = Till(await store.open())
    results = await asyncio.gather(*(t.charge("o-1") for t in (till, there) for _ in range(10)))
    assert set(results) == {"paid"}
    assert await there.paid() == ["o-1"]


@on_disk
async def test_exactly_once_other_arguments_are_a_conflict_that_is_recorded(till: Till) -> None:
    await till.charge("o-1")
    with pytest.raises(duly.Conflict):
        await till.charge("o-1", 6)
    assert [r.word for r in await till.ledger.refusals()] == ["conflict"]
    assert await till.paid() == ["o-1"]


@on_disk
async def test_exactly_once_a_result_that_cannot_be_stored_undoes_everything(till: Till) -> None:
    till.result = object()
    with pytest.raises(duly.Unstorable):
        await till.charge("o-1")
    assert await till.paid() == []
    till.result = "paid"
    assert await till.charge("o-1") == "paid"


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("errors", ["retry", "store"])
async def test_exactly_once_needs_a_ledger_with_sql(ledger: Ledger, errors: str) -> None:
    with pytest.raises(ProgramError, match="no SQL"):
        await Till(ledger, errors=errors).charge("o-1")
    assert (await ledger.size()).messages == 0


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Receipt:
    order: str
    amounts: list[Decimal]


@dataclass
class Unreadable:
    parts: list[Unreadable]
    lock: asyncio.Lock


class Ticket(msgspec.Struct, frozen=True):
    number: int
    paid: bool = True


async def a_dataclass() -> Receipt:
    return Receipt("o-1", [Decimal("1.10")])


async def a_struct() -> Ticket:
    return Ticket(7)


async def a_list() -> list[int]:
    return [1, 2]


async def a_tuple() -> tuple[int, str]:
    return 1, "a"


async def nothing() -> None:
    return None


async def not_annotated():  # type: ignore[no-untyped-def]  # that is the point  # noqa: ANN202, RUF100
    return {"a": [1, None]}


async def arguments_only_for_the_type_checker(order: OnlyForTheTypeChecker | None = None) -> set[int]:
    return {1}


@pytest.mark.parametrize(
    "function",
    [a_dataclass, a_struct, a_list, a_tuple, nothing, not_annotated, arguments_only_for_the_type_checker],
    ids=lambda f: f.__name__,
)
async def test_a_repeat_gets_a_result_of_the_annotated_type(
    store: Store, function: Callable[[], Awaitable[Any]]
) -> None:
    for _ in range(2):
        ledger = await store.reopen()
        result: Any = await duly.once(ledger, scope="shop", key=lambda: "o-1")(cast("Any", function))()
        assert result == await function()
        assert type(result) is type(await function())


@pytest.mark.parametrize(
    "result",
    [object(), "x" * (1024 * 1024), "\udcff"],
    ids=["object", "large", "surrogate"],
)
async def test_a_result_that_cannot_be_stored_is_unstorable_for_the_first_and_for_repeats(
    ledger: Ledger, result: object
) -> None:
    runs: list[int] = []

    @duly.once(ledger, scope="shop", key=lambda: "o-1")
    async def charge() -> Any:
        runs.append(1)
        return result

    for _ in range(2):
        with pytest.raises(duly.Unstorable, match="it ran"):
            await charge()
    assert len(runs) == 1


async def test_a_result_that_is_not_what_the_annotation_says_is_unstorable_for_the_first_already(
    ledger: Ledger,
) -> None:
    @duly.once(ledger, scope="shop", key=lambda: "o-1")
    async def charge() -> int:
        return "seven"  # type: ignore[return-value]  # the mistake

    for _ in range(2):
        with pytest.raises(duly.Unstorable, match="int"):
            await charge()


async def test_a_stored_result_that_no_longer_fits_the_annotation_says_so(ledger: Ledger) -> None:
    await Shop(ledger).charge("o-1")

    @duly.once(ledger, scope="shop", key=lambda order: order)
    async def charge(order: str) -> int:
        raise AssertionError

    with pytest.raises(duly.Unstorable, match="does not fit"):
        await charge("o-1")


# ── what is refused, before anything runs or is stored ───────────────────────────────────────────


def lock() -> Callable[[], Any]:
    async def function() -> asyncio.Lock:
        raise AssertionError

    return function


def nested() -> Callable[[], Any]:
    async def function() -> dict[str, Unreadable | None]:
        raise AssertionError

    return function


def misspelt() -> Callable[[], Any]:
    async def function() -> Reciept:  # type: ignore[name-defined]  # the mistake  # noqa: F821
        raise AssertionError

    return function


@embedded
@pytest.mark.parametrize("make", [lock, nested, misspelt])
async def test_a_return_annotation_that_cannot_be_read_back_is_a_bug(
    ledger: Ledger, make: Callable[[], Callable[[], Any]]
) -> None:
    charge = duly.once(ledger, scope="shop", key=lambda: "o-1")(make())
    with pytest.raises(ProgramError, match="annotate"):
        await charge()
    assert (await ledger.size()).messages == 0


@embedded
@pytest.mark.parametrize("argument", [object(), "\udcff"], ids=["object", "surrogate"])
async def test_arguments_that_cannot_be_compared_ask_for_meaning(ledger: Ledger, argument: object) -> None:
    shop = Shop(ledger)
    with pytest.raises(Malformed, match="meaning="):
        await shop.charge("o-1", argument)
    assert shop.runs == []
    assert (await ledger.size()).messages == 0


@embedded
@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("", Malformed),
        ("a\0b", Malformed),
        ("\udcff", Malformed),
        ("x" * (NAME_LIMIT + 1), TooLarge),
        ("é" * (NAME_LIMIT // 2 + 1), TooLarge),
        (None, Malformed),
        (object(), Malformed),
        (len, Malformed),
        (lambda: "order-1", Malformed),
        (iter(["order-1"]), Malformed),
    ],
    ids=[
        "empty",
        "nul",
        "surrogate",
        "oversized",
        "oversized in bytes",
        "none",
        "an address in memory",
        "a function",
        "a lambda",
        "an iterator",
    ],
)
async def test_a_bad_key_is_refused_and_nothing_is_stored(
    ledger: Ledger, key: object, error: type[Exception]
) -> None:
    @duly.once(ledger, scope="shop", key=lambda: key)
    async def charge() -> None:
        raise AssertionError

    with pytest.raises(error):
        await charge()
    assert (await ledger.size()).messages == 0


async def test_the_longest_key_is_taken(ledger: Ledger) -> None:
    assert await Shop(ledger).charge("x" * NAME_LIMIT) == "paid " + "x" * NAME_LIMIT


@pytest.mark.parametrize(
    "options",
    [
        {"effect": "sometimes"},
        {"errors": "ignore"},
        {"lease": 0},
        {"lease": -1},
        {"lease": float("nan")},
        {"lease": float("inf")},
        {"keep": 0},
        {"keep": -1},
        {"keep": float("nan")},
        {"keep": float("inf")},
        {"scope": ""},
        {"scope": "a\0b"},
    ],
    ids=str,
)
@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_bad_options_are_refused_when_decorating(ledger: Ledger, options: dict[str, Any]) -> None:
    valid: dict[str, Any] = {"scope": "shop", "key": str}
    with pytest.raises(Malformed):
        duly.once(ledger, **(valid | options))


@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_a_sync_function_is_refused_when_decorating(ledger: Ledger) -> None:
    with pytest.raises(ProgramError, match="async"):

        @duly.once(ledger, scope="shop", key=str)
        def charge(order: str) -> None: ...


@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_the_function_keeps_its_name_and_its_doc(ledger: Ledger) -> None:
    @duly.once(ledger, scope="shop", key=str)
    async def charge(order: str) -> None:
        """Take the money."""

    assert (charge.__name__, charge.__doc__) == ("charge", "Take the money.")


# ── forgetting ───────────────────────────────────────────────────────────────────────────────────


async def trusted(ledger: Ledger, store: Store) -> None:
    """A new ledger trusts its clock after an hour."""
    store.clock.advance(3_600)
    await ledger.prune()


async def test_a_key_is_kept_for_ever_by_default(ledger: Ledger, store: Store) -> None:
    shop = Shop(ledger)
    await shop.charge("o-1")
    store.clock.advance(50 * 365 * 86_400)
    assert await ledger.prune() == 0
    await shop.charge("o-1")
    assert len(shop.runs) == 1


async def test_a_key_is_kept_as_long_as_told_then_forgotten_and_the_same_call_runs_again(
    ledger: Ledger, store: Store
) -> None:
    await trusted(ledger, store)
    shop = Shop(ledger, keep=60)
    await shop.charge("o-1")
    store.clock.advance(59)
    assert await ledger.prune() == 0
    store.clock.advance(1)
    assert await ledger.prune() == 1
    assert await shop.charge("o-1") == "paid o-1"
    assert len(shop.runs) == 2


async def test_a_repeat_does_not_make_a_key_be_remembered_longer(store: Store) -> None:
    await trusted(await store.open(), store)
    await Shop(await store.reopen(), keep=60).charge("o-1")
    shop = Shop(ledger := await store.reopen(), keep=60)
    store.clock.advance(59)
    await shop.charge("o-1")
    assert shop.runs == []
    store.clock.advance(1)
    assert await ledger.prune() == 1
    await shop.charge("o-1")
    assert len(shop.runs) == 1


async def test_a_run_under_way_is_not_forgotten(ledger: Ledger, store: Store) -> None:
    shop = Shop(ledger, keep=60)
    first = await shop.hold()
    store.clock.advance(61)
    assert await ledger.prune() == 0
    shop.gate.set()
    assert await first == "paid o-1"
