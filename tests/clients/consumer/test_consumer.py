"""A consumer runs each message once, in order, and tells every delivery how it ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import duly
from duly.clients.consumer import consumer as module
from duly.core.units import MS
from duly.errors import LedgerUnavailable, Malformed, ProgramError, Stopped
from duly.storage.memory import Disk, MemoryLedger
from duly.testing import ManualClock

Message = duly.QueueMessage
wrong: Any = duly.QueueMessage
"""It is made with values of the wrong types, as programs without a type checker do."""


def ignore(message: Message) -> None: ...


class Recorder:
    """A handler that remembers what it did."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def __call__(self, message: Message) -> dict[str, object]:
        self.ran.append(message.id)
        return {"did": message.id}


def handler_of(recorder: Recorder) -> Callable[[Message], Any]:
    async def handler(message: Message) -> object:
        return await recorder(message)

    return handler


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/consumer.db"


def switch(n: int, lane: str = "lamp") -> Message:
    return Message(f"{lane}-{n}", "on" if n % 2 else "off", "remote", lane, n)


# ── once ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_repeat_gets_the_outcome_of_the_first(url: str) -> None:
    did = Recorder()
    async with duly.Consumer(url, handler_of(did)) as consumer:
        first = await consumer.handle(Message("1", b"x"))
        again = await consumer.handle(Message("1", b"x"))
    assert first == duly.Outcome("done", {"did": "1"})
    assert again == duly.Outcome("done", {"did": "1"}, repeat=True)
    assert did.ran == ["1"]
    assert first.done


async def test_deliveries_at_the_same_time_share_one_run(url: str) -> None:
    did = Recorder()
    async with duly.Consumer(url, handler_of(did)) as consumer:
        outcomes = await asyncio.gather(*(consumer.handle(Message("1")) for _ in range(5)))
    assert [outcome.result for outcome in outcomes] == [{"did": "1"}] * 5
    assert did.ran == ["1"]


async def test_the_same_id_of_two_senders_is_two_messages(url: str) -> None:
    did = Recorder()
    async with duly.Consumer(url, handler_of(did)) as consumer:
        for sender in ("a", "b", "a"):
            await consumer.handle(Message("1", sender=sender))
    assert did.ran == ["1", "1"]


async def test_other_content_under_the_same_id_is_a_conflict_and_not_run(url: str) -> None:
    did = Recorder()
    async with duly.Consumer(url, handler_of(did)) as consumer:
        await consumer.handle(Message("1", b"on"))
        outcome = await consumer.handle(Message("1", b"off"))
    assert outcome.word == "conflict"
    assert did.ran == ["1"]


async def test_two_names_on_one_ledger_each_get_every_message() -> None:
    disk, did = Disk(), Recorder()
    for name in ("mail", "stock"):
        async with duly.Consumer(MemoryLedger(disk=disk), handler_of(did), name=name) as consumer:
            assert not (await consumer.handle(Message("1"))).repeat
    assert did.ran == ["1", "1"]


async def test_a_plain_function_runs_in_a_thread(url: str) -> None:
    def handler(message: Message) -> object:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return message.json()["colour"]

    async with duly.Consumer(url, handler) as consumer:
        outcome = await consumer.handle(Message("1", '{"colour": "red"}'))
    assert outcome.result == "red"


# ── order ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("effect", ["at_most_once", "exactly_once"])
async def test_a_lane_replays_in_the_senders_order_whatever_the_order_of_arrival(
    url: str, effect: Any
) -> None:
    ran: list[str] = []

    async def handler(*args: Any) -> None:
        ran.append(args[-1].id)

    async with duly.Consumer(url, handler, effect=effect, window=30) as consumer:
        for k, order in enumerate(itertools.permutations(range(4))):
            ran.clear()
            outcomes = await asyncio.gather(
                *(consumer.handle(switch(n, f"lamp{k}")) for n in order for _ in range(3))
            )
            assert ran == [f"lamp{k}-{n}" for n in range(4)], order
            assert {outcome.word for outcome in outcomes} == {"done"}
            assert sum(outcome.repeat for outcome in outcomes) == 8


async def test_where_only_the_latest_counts_the_newest_runs_last_and_older_ones_are_superseded(
    url: str,
) -> None:
    did = Recorder()
    async with duly.Consumer(url, handler_of(did), order="latest", window=30) as consumer:
        for k, order in enumerate(itertools.permutations(range(4))):
            did.ran.clear()
            outcomes = await asyncio.gather(*(consumer.handle(switch(n, f"lamp{k}")) for n in order))
            by_number = dict(zip(order, (outcome.word for outcome in outcomes), strict=True))
            assert did.ran[-1] == f"lamp{k}-3"
            assert by_number[3] == "done"
            assert [f"lamp{k}-{n}" for n in sorted(by_number) if by_number[n] == "done"] == did.ran
            assert set(by_number.values()) <= {"done", "superseded"}


async def test_a_gap_is_waited_for_and_then_given_up() -> None:
    did = Recorder()
    async with duly.Consumer("memory:", handler_of(did), window=0.05) as consumer:
        await consumer.handle(switch(0))
        behind = await consumer.handle(switch(2))
        late = await consumer.handle(switch(1))
    assert (behind.word, late.word) == ("done", "superseded")
    assert "before it arrived" in late.reason
    assert did.ran == ["lamp-0", "lamp-2"]


async def test_lanes_do_not_wait_for_each_other() -> None:
    free = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.lane == "blocked":
            await free.wait()

    async with duly.Consumer("memory:", handler) as consumer:
        blocked = asyncio.create_task(consumer.handle(Message("1", lane="blocked", n=0)))
        assert (await consumer.handle(Message("2", lane="other", n=0))).done
        assert not blocked.done()
        free.set()
        assert (await blocked).done


async def test_without_a_counter_the_senders_time_decides() -> None:
    did = Recorder()
    now = datetime.now(UTC)
    later = Message("later", lane="lamp", time=now)
    earlier = Message("earlier", lane="lamp", time=now - timedelta(seconds=1))
    async with duly.Consumer("memory:", handler_of(did), window=0.2) as consumer:
        await asyncio.gather(consumer.handle(later), consumer.handle(earlier))
    assert did.ran == ["earlier", "later"]


# ── age ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("made", "expires", "word"),
    [(-601, 0, "stale"), (-5, -1, "expired"), (3_600, 0, "future"), (-599, 0, "done")],
)
async def test_a_message_is_judged_by_its_age(made: float, expires: float, word: str) -> None:
    now = datetime.now(UTC).timestamp()
    message = Message("1", time=now + made, expires=now + expires if expires else 0)
    async with duly.Consumer("memory:", ignore, max_age=600) as consumer:
        outcome = await consumer.handle(message)
    assert outcome.word == word
    assert outcome.reason or word == "done"


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (Message(""), "malformed"),
        (Message("a\0b"), "malformed"),
        (Message("x" * 300), "too_large"),
        (Message("1", b"x" * 300_000), "too_large"),
        (Message("1", time=1_700_000_000_000), "malformed"),
        (Message("1", lane="lamp", n=-5), "malformed"),
    ],
)
async def test_what_a_sender_did_wrong_is_refused_and_recorded_and_need_not_come_again(
    message: Message, word: str
) -> None:
    ledger = MemoryLedger()
    async with duly.Consumer(ledger, ignore) as consumer:
        outcome = await consumer.handle(message)
        assert outcome == await consumer.accept(message)
    assert outcome.word == word
    assert outcome.reason
    assert [refusal.word for refusal in await ledger.refusals()] == [word, word]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"id": "1"}, "duly.QueueMessage, not dict"),
        (wrong("1", {"on": True}), "bytes or text, not dict"),
        (wrong(7), "id of a message must be text, not int"),
        (wrong("1", lane="lamp", n="3"), "an int, not str"),
        (Message("1", n=3), "a counter and no lane"),
        (Message("1", time=datetime(2026, 1, 1)), "has no zone"),
        (wrong("1", time="now"), "seconds since 1970 or a datetime"),
    ],
)
async def test_what_the_program_did_wrong_raises_so_that_the_queue_keeps_the_message(
    message: Any, says: str
) -> None:
    async with duly.Consumer("memory:", ignore) as consumer:
        with pytest.raises(ProgramError, match=says):
            await consumer.accept(message)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"effect": "twice"}, "use one of 'at_most_once'"),
        ({"order": "random"}, "use 'replay' or 'latest'"),
        ({"retry": duly.RetryPolicy.fixed(MS, tries=3)}, "never run twice"),
        ({"effect": "exactly_once"}, "needs an async handler"),
        ({"name": "a/b"}, "without '/'"),
        ({"name": ""}, "not a name for a consumer"),
        ({"window": -1}, "not a length of time"),
        ({"max_age": "1 day"}, "not a length of time"),
        ({"max_age": float("nan")}, "not a length of time"),
        ({"window": float("inf")}, "not a length of time"),
        ({"retry": 3, "effect": "at_least_once"}, "use duly.RetryPolicy.fixed"),
        ({"concurrency": 0}, "use 1 or more"),
        ({"concurrency": "10"}, "use 1 or more"),
    ],
)
def test_wrong_options_are_named_when_the_consumer_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises((Malformed, ProgramError), match=says):
        duly.Consumer("memory:", ignore, **options)


async def without_message() -> None: ...


async def yields(message: Message) -> AsyncIterator[int]:
    yield 1


async def takes_only_message(message: Message) -> None: ...


async def takes_both(tx: object, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("handler", "effect", "says"),
    [
        ("handler", "at_most_once", "a function, not str"),
        (without_message, "at_most_once", r"called as handler\(message\)"),
        (takes_both, "at_least_once", r"called as handler\(message\): missing .* 'message'"),
        (takes_only_message, "exactly_once", r"called as handler\(tx, message\)"),
        (yields, "at_most_once", "is a generator"),
    ],
)
def test_a_handler_must_be_a_function_that_takes_a_message(handler: Any, effect: Any, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        duly.Consumer("memory:", handler, effect=effect)


@pytest.mark.parametrize("ledger", [None, "", 7, b"memory:"])
def test_a_ledger_that_names_none_is_not_a_ledger_in_memory(ledger: Any) -> None:
    with pytest.raises(ProgramError, match="a consumer's ledger is a URL"):
        duly.Consumer(ledger, ignore)


def test_a_ledger_that_cannot_be_written_is_told() -> None:
    with pytest.raises(Malformed, match="leave mode=ro out"):
        duly.Consumer("sqlite:///lamp.db?mode=ro", ignore)


async def test_a_ledger_that_was_not_awaited_is_told() -> None:
    ledger: Any = duly.open_ledger("memory:")
    with pytest.raises(ProgramError, match="was not awaited"):
        duly.Consumer(ledger, ignore)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_that_raises_has_failed_and_is_not_run_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran = []

    async def handler(message: Message) -> None:
        ran.append(message.id)
        raise ValueError("no bulb")

    async with duly.Consumer("memory:", handler) as consumer:
        outcome = await consumer.handle(Message("1"))
        again = await consumer.handle(Message("1"))
    assert outcome.word == again.word == "failed"
    assert "no bulb" in again.reason
    assert ran == ["1"]
    assert "no bulb" in caplog.text


@pytest.mark.parametrize("effect", ["at_least_once", "exactly_once"])
async def test_a_handler_that_raises_is_tried_again_as_its_policy_says(
    effect: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    attempts: list[int] = []

    async def handler(*args: Any) -> str:
        attempts.append(args[-1].attempt)
        if len(attempts) < 3:
            raise ConnectionError
        return "third time lucky"

    retry = duly.RetryPolicy.fixed(MS, tries=5)
    async with duly.Consumer(url, handler, effect=effect, retry=retry) as consumer:
        outcome = await consumer.handle(Message("1"))
    assert outcome.result == "third time lucky"
    assert attempts == [1, 2, 3]


async def test_the_last_try_that_fails_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def handler(message: Message) -> None:
        raise ConnectionError(f"attempt {message.attempt}")

    retry = duly.RetryPolicy.fixed(MS, tries=3)
    async with duly.Consumer("memory:", handler, effect="at_least_once", retry=retry) as consumer:
        outcome = await consumer.handle(Message("1"))
    assert outcome.word == "failed"
    assert "attempt 3" in outcome.reason


async def test_a_handler_fails_for_good_with_a_value_of_its_own() -> None:
    async def handler(message: Message) -> None:
        raise duly.TaskFailed({"lamp": "broken"})

    retry = duly.RetryPolicy.fixed(MS, tries=9)
    async with duly.Consumer("memory:", handler, effect="at_least_once", retry=retry) as consumer:
        outcome = await consumer.handle(Message("1"))
    assert (outcome.word, outcome.error) == ("failed", {"lamp": "broken"})


@pytest.mark.parametrize(
    "result",
    [object(), b"x" * 400_000, float("nan"), {"heat": [float("inf")]}],
    ids=["no JSON", "too large", "nan", "inf"],
)
async def test_a_result_that_cannot_be_stored_does_not_make_it_a_failure(result: object) -> None:
    async def handler(message: Message) -> object:
        return result

    async with duly.Consumer("memory:", handler) as consumer:
        outcome = await consumer.handle(Message("1"))
    assert outcome.done
    assert "done, but its result" in outcome.reason


# ── crashes and restarts ─────────────────────────────────────────────────────────────────────────


async def test_what_was_accepted_and_not_run_is_run_after_a_restart() -> None:
    disk, did, stuck = Disk(), Recorder(), asyncio.Event()

    async def hang(message: Message) -> None:
        await stuck.wait()

    first = duly.Consumer(MemoryLedger(disk=disk), hang)
    await first.start()
    for n in range(3):
        assert await first.accept(switch(n)) is None
    await crash(first)
    async with duly.Consumer(MemoryLedger(disk=disk), handler_of(did)) as second:
        outcomes = [await second.handle(switch(n)) for n in range(3)]
    assert [outcome.word for outcome in outcomes] == ["unknown", "done", "done"]
    assert did.ran == ["lamp-1", "lamp-2"]
    assert "not known" in outcomes[0].reason


@pytest.mark.parametrize("effect", ["at_least_once", "exactly_once"])
async def test_what_a_crash_cut_off_is_run_again_where_that_is_declared(effect: Any, url: str) -> None:
    attempts, begun = [], asyncio.Event()

    async def hang(*args: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def handler(*args: Any) -> None:
        attempts.append(args[-1].attempt)

    ledger = await duly.open_ledger(url)
    first = duly.Consumer(ledger, hang, effect=effect)
    await first.start()
    await first.accept(Message("1"))
    await begun.wait()
    await crash(first)
    await ledger.close()
    async with duly.Consumer(url, handler, effect=effect) as second:
        assert (await second.handle(Message("1"))).done
    assert attempts == [2]


async def crash(consumer: duly.Consumer) -> None:
    """End a consumer as a dead process does."""
    consumer._engine.kill()
    consumer.tasks.kill()
    await asyncio.sleep(0)


async def test_exactly_once_commits_the_handlers_own_writes_with_the_end(url: str) -> None:
    async def handler(tx: duly.Transaction, message: Message) -> int:
        await tx.execute("CREATE TABLE IF NOT EXISTS switched (id TEXT)")
        await tx.execute("INSERT INTO switched VALUES (?)", message.id)
        rows = await tx.fetch("SELECT count(*) FROM switched")
        if message.id == "bad":
            raise ValueError
        return int(rows[0][0])

    logging.getLogger("duly.consumer").setLevel(logging.CRITICAL)
    async with duly.Consumer(url, handler, effect="exactly_once") as consumer:
        ids = ["1", "2", "2", "bad", "3"]
        outcomes = [await consumer.handle(Message(id_)) for id_ in ids]
    assert [outcome.result for outcome in outcomes] == [1, 2, 2, None, 3]
    assert outcomes[3].word == "failed"


async def test_a_ledger_without_transactions_says_so_at_the_start() -> None:
    async def handler(tx: duly.Transaction, message: Message) -> None: ...

    with pytest.raises(ProgramError, match="has no SQL"):
        await duly.Consumer("memory:", handler, effect="exactly_once").start()


async def test_a_ledger_that_cannot_store_raises_so_that_the_queue_keeps_the_message() -> None:
    class Full(MemoryLedger):
        full = True

        async def commit(self, groups: Any) -> Any:
            if self.full:
                raise LedgerUnavailable("the disk is full")
            return await super().commit(groups)

    did = Recorder()
    ledger = Full()
    async with duly.Consumer(ledger, handler_of(did)) as consumer:
        with pytest.raises(LedgerUnavailable):
            await consumer.handle(Message("1"))
        ledger.full = False
        while True:
            try:
                outcome = await consumer.handle(Message("1"))
                break
            except LedgerUnavailable:
                await asyncio.sleep(0.01)
    assert outcome.done
    assert did.ran == ["1"]


async def test_a_stopped_consumer_says_so_to_those_who_wait_and_those_who_come() -> None:
    begun = asyncio.Event()

    async def hang(message: Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    consumer = duly.Consumer("memory:", hang)
    with pytest.raises(Stopped, match="async with"):
        await consumer.accept(Message("1"))
    await consumer.start()
    with pytest.raises(ProgramError, match="running already"):
        await consumer.start()
    waiting = asyncio.create_task(consumer.handle(Message("1")))
    await begun.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DRAIN", 0)
        await consumer.stop()
    with pytest.raises(Stopped, match="do not acknowledge"):
        await waiting
    await consumer.stop()


async def test_a_full_consumer_makes_the_queue_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG", 2)
    free = asyncio.Event()

    async def handler(message: Message) -> None:
        await free.wait()

    async with duly.Consumer("memory:", handler) as consumer:
        await consumer.accept(Message("1"))
        await consumer.accept(Message("2"))
        third = asyncio.create_task(consumer.accept(Message("3")))
        done, _ = await asyncio.wait({third}, timeout=0.05)
        assert not done
        free.set()
        await third


async def test_what_is_over_is_forgotten() -> None:
    clock = ManualClock()
    ledger = MemoryLedger(clock)
    async with duly.Consumer(ledger, ignore, max_age=60) as consumer:
        await consumer.handle(Message("1", time=clock.now() / 1e6))
        clock.advance(3_600)
        await consumer._prune()
        assert await ledger.outcome("consumer/", "1") is None
        assert (await consumer.handle(Message("1", time=clock.now() / 1e6 - 3_600))).word == "stale"
