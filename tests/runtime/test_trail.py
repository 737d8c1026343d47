"""Every hop of a message is found again, from memory and from the ledger; the trail is bounded."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.lifecycle import State
from duly.core.messages import CONFLICT, FRESH, Message, Verdict, VerdictKind
from duly.core.operations import AppendEntry, Delivery, DeliveryRef, OpenDelivery, PutNewItem
from duly.core.units import DAY, MS, SECOND
from duly.errors import LedgerUnavailable
from duly.runtime import trail as trails
from duly.runtime.hop_counts import HOP_WIDTH, LEAVING
from duly.runtime.telemetry import Telemetry
from duly.runtime.trail import HOPS_KEPT, Trail
from duly.storage.memory import MemoryLedger

BEGIN = 1_700_000_000_000


class StepClock:
    """A clock that goes on by a millisecond with every look at it."""

    def __init__(self) -> None:
        self.time = BEGIN * MS

    def now(self) -> int:
        self.time += MS
        return self.time

    def steady(self) -> int:
        return self.time


def message(n: int, kind: str = "lock_control") -> Message:
    return Message("phone", f"{BEGIN + n}_{n}", kind, "lock", b"{}")


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger(StepClock())


def counts_of(telemetry: Telemetry) -> dict[tuple[str, ...], int]:
    """Messages by kind and outcome, as far as there were any."""
    return {labels: cell.value for _, labels, cell in telemetry.cells() if len(labels) == 2 and cell.value}


def run(trail: Trail, one: Message) -> None:
    trail.said(one, FRESH)
    trail.sent(one, 1)
    trail.ended(one.key, State.DONE)


async def test_the_hops_of_a_message_come_in_order_with_reasons(ledger: MemoryLedger) -> None:
    trail, one = Trail(ledger), message(1)
    run(trail, one)
    trail.said(one, Verdict(VerdictKind.DUPLICATE, State.DONE))
    trail.said(one, CONFLICT)
    hops = await trail.of(one.key, 0)
    assert [(hop.what, hop.attempt) for hop in hops] == [
        ("fresh", 0), ("sent", 1), ("done", 0), ("duplicate", 0), ("conflict", 0),
    ]  # fmt: skip
    assert hops[-1].detail == CONFLICT.reason
    assert [hop.time for hop in hops] == sorted(hop.time for hop in hops)


async def test_all_hops_of_what_ends_with_its_verdict_are_of_one_time(ledger: MemoryLedger) -> None:
    trail, one, two = Trail(ledger), message(1), message(2)
    trail.stored(one, FRESH, State.DONE, sent=True)
    trail.stored(two, FRESH, State.DONE, told=False)
    hops = await trail.of(one.key, 0)
    assert [(hop.what, hop.attempt, hop.untold) for hop in hops] == [
        ("fresh", 0, False), ("done", 0, False), ("sent", 1, False),
    ]  # fmt: skip
    assert len({hop.time for hop in hops}) == 1
    assert [(hop.what, hop.untold) for hop in await trail.of(two.key, 0)] == [("fresh", True), ("done", True)]


async def test_several_hops_are_noted_at_once(ledger: MemoryLedger) -> None:
    trail = Trail(ledger)
    trail.note_all(b"conversation", [("delivered", 3, "ann"), ("read", 2, "bob")])
    trail.note_all(b"another", [])
    hops = await trail.of(b"conversation", 0)
    assert [(hop.what, hop.attempt, hop.detail) for hop in hops] == [
        ("delivered", 3, "ann"), ("read", 2, "bob"),
    ]  # fmt: skip
    assert await trail.of(b"another", 0) == []


async def test_hops_are_in_the_log_with_their_kind_and_whether_a_sender_was_told(
    ledger: MemoryLedger, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = message(1), message(2)
    with caplog.at_level("DEBUG", "duly.messages"):
        trail = Trail(ledger)
        trail.said(one, FRESH)
        trail.ended(one.key, State.DONE, told=False)
        trail.said(two, FRESH, told=False)
        await trail.flush()
    fresh, done, unheard = caplog.records
    assert (fresh.getMessage(), vars(fresh)["kind"]) == ("fresh", "lock_control")
    assert done.getMessage() == "done, and its sender was not there to be told"
    assert not vars(done)["kind"]
    assert unheard.getMessage() == "fresh, and its sender was not there to be told"
    assert vars(unheard)["kind"] == "lock_control"
    assert [vars(record)["to"] for record in caplog.records] == ["lock"] * 3
    assert trail._recipients == {two.key: "lock"}, "what has ended is forgotten"


async def test_a_verdict_that_its_sender_was_not_there_to_hear_is_marked(ledger: MemoryLedger) -> None:
    first, one, two = Trail(ledger, Telemetry("a")), message(1), message(2, "untold")
    first.said(one, FRESH, told=False)
    first.sent(one, 1)
    first.said(two, FRESH)
    await first.flush()
    for trail in (first, Trail(ledger, Telemetry("a"))):  # from memory, and from the ledger
        assert [(hop.what, hop.untold) for hop in await trail.of(one.key, 0)] == [
            ("fresh", True), ("sent", False),
        ]  # fmt: skip
        assert [hop.untold for hop in await trail.of(two.key, 0)] == [False]
    counted = counts_of(first._telemetry)
    assert counted == {("lock_control", "accepted"): 1, ("untold", "accepted"): 1}


def found(of: Message, accepted_at: int, attempt: int = 0) -> OpenDelivery:
    """A delivery as another hub, or a restart, finds it in the ledger."""
    delivery = Delivery(DeliveryRef(of.key, "device", of.recipient), State.SENT, attempt, 0)
    return OpenDelivery(of, State.SENT if attempt else State.ACCEPTED, delivery, accepted_at)


def test_a_message_that_another_hub_has_accepted_is_measured_from_then_on(ledger: MemoryLedger) -> None:
    telemetry = Telemetry("b")
    trail, one, two = Trail(ledger, telemetry), message(1), message(2)
    now = ledger.clock.now()
    trail.resume([found(one, now - 3 * SECOND), found(two, now - 3 * SECOND, attempt=1)])
    for each in (one, two):
        trail.sent(each, 1 if each is one else 2)
        trail.ended(each.key, State.DONE)
    trail.fold()
    assert {stage: round(cell.sum) for stage, cell in telemetry.stages.items()} == {
        "send": 3, "run": 0, "total": 6,
    }  # fmt: skip
    assert {stage: sum(cell.counts) for stage, cell in telemetry.stages.items()} == {
        "send": 1, "run": 1, "total": 2,
    }  # fmt: skip


def test_the_oldest_is_found_among_those_of_other_hubs(ledger: MemoryLedger) -> None:
    trail, now = Trail(ledger), ledger.clock.now()
    trail.resume([found(message(1), now - 5 * SECOND)])
    trail.resume([found(message(2), now - 50 * SECOND)])
    assert trail.oldest(lambda _: True) == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize("known", [True, False])
def test_a_message_that_is_settled_later_counts_by_its_kind(ledger: MemoryLedger, known: bool) -> None:
    telemetry = Telemetry("a")
    trail, one = Trail(ledger, telemetry), message(1)
    if known:  # it ended before a restart otherwise
        trail.said(one, FRESH)
        trail.ended(one.key, State.UNKNOWN)
        trail.fold()
    trail.know(one)
    trail.ended(one.key, State.FAILED)
    trail.fold()
    assert telemetry.counter("duly_messages_total", "lock_control", "failed").value == 1


async def test_hops_are_found_after_a_restart(ledger: MemoryLedger) -> None:
    first = Trail(ledger, Telemetry("a"))
    wanted = message(500)
    for n in range(1_000):
        run(first, message(n))
        if n % 50 == 0:
            await first.flush()
    await first.flush()
    second = Trail(ledger, Telemetry("a"))
    second.said(wanted, Verdict(VerdictKind.DUPLICATE, State.DONE))
    hops = await second.of(wanted.key, BEGIN * MS)
    assert [hop.what for hop in hops] == ["fresh", "sent", "done", "duplicate"]
    assert {hop.hub for hop in hops} == {""}


async def test_the_trail_of_another_hub_is_read_as_well(ledger: MemoryLedger) -> None:
    here, there, one = Trail(ledger, Telemetry("a")), Trail(ledger, Telemetry("b")), message(1)
    here.said(one, FRESH)
    there.sent(one, 1)
    there.ended(one.key, State.FAILED, "the motor is stuck")
    here.note(one.key, "failed", detail="heard from another hub")
    await here.flush()
    await there.flush()
    hops = await Trail(ledger, Telemetry("a")).of(one.key, 0)
    assert [(hop.hub, hop.what) for hop in hops] == [
        ("a", "fresh"), ("b", "sent"), ("b", "failed"), ("a", "failed"),
    ]  # fmt: skip


async def test_memory_is_bounded_and_the_ledger_has_the_rest(ledger: MemoryLedger) -> None:
    trail = Trail(ledger, Telemetry("a"))
    for n in range(HOPS_KEPT // 3 + 100):
        run(trail, message(n))
        if n % 10 == 0:
            trail.fold()
    await trail.flush()
    assert (
        HOPS_KEPT
        <= sum(len(hops) // HOP_WIDTH for noted in trail._recent for hops in noted.values())
        == trail._remembered
        < HOPS_KEPT + 50
    )
    assert [hop.what for hop in await trail.of(message(1).key, BEGIN * MS)] == ["fresh", "sent", "done"]


async def test_a_trail_without_size_writes_nothing(ledger: MemoryLedger) -> None:
    trail = Trail(ledger, Telemetry("a"), size=0)
    run(trail, message(1))
    await trail.flush()
    assert (await ledger.extent(trail.stream)).last == 0
    assert len(await trail.of(message(1).key, 0)) == 3


async def test_old_entries_are_trimmed_by_age(ledger: MemoryLedger) -> None:
    trail = Trail(ledger, Telemetry("a"), kept=DAY)
    run(trail, message(1))
    await trail.flush()
    assert isinstance(ledger.clock, StepClock)
    ledger.clock.time += 2 * DAY
    run(trail, message(2))
    await trail.flush()
    await trail.trim()
    extent = await ledger.extent(trail.stream)
    assert (extent.first, extent.last) == (2, 2)


async def test_entries_are_trimmed_by_size_also_after_a_restart(ledger: MemoryLedger) -> None:
    first = Trail(ledger, Telemetry("a"), size=10_000)
    for n in range(200):
        run(first, message(n))
        await first.flush()
    second = Trail(ledger, Telemetry("a"), size=10_000)
    run(second, message(201))
    await second.flush()
    await second.trim()
    extent = await ledger.extent(second.stream)
    kept = await ledger.entries(second.stream, extent.first - 1, 1_000)
    assert 8_000 < sum(len(entry.body) for entry in kept) <= 10_000
    assert extent.last == 201


async def test_what_could_not_be_written_is_written_later(
    ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail, one = Trail(ledger, Telemetry("a")), message(1)
    run(trail, one)
    with monkeypatch.context() as patch:

        async def fail(*_: object) -> None:
            raise LedgerUnavailable("away")

        patch.setattr(ledger, "write", fail)
        with pytest.raises(LedgerUnavailable):
            await trail.flush()
    await trail.flush()
    again = await Trail(ledger, Telemetry("a")).of(one.key, 0)
    assert [hop.what for hop in again] == ["fresh", "sent", "done"]


async def test_an_entry_that_cannot_be_read_is_passed_over(ledger: MemoryLedger) -> None:
    trail, one = Trail(ledger, Telemetry("a")), message(1)
    await trail.flush()
    run(trail, one)
    await trail.flush()
    await ledger.write(AppendEntry(trail.stream, bytes(8) + one.key, ledger.clock.now()))
    assert len(await Trail(ledger, Telemetry("a")).of(one.key, 0)) == 3


async def test_an_entry_with_numbers_for_words_is_still_read(ledger: MemoryLedger) -> None:
    trail, one = Trail(ledger, Telemetry("a")), message(1)
    await trail.flush()
    hops = msgspec.msgpack.encode(
        [BEGIN * MS, {one.key: [(5, 0, 0, ""), (7, 2, 1, ""), (9, "mine", 0, "x")]}]
    )
    await ledger.write(AppendEntry(trail.stream, bytes(8) + hops, ledger.clock.now()))
    await ledger.write(PutNewItem(trails.HUBS, "a", b""))
    found = await Trail(ledger, Telemetry("a")).of(one.key, 0)
    assert [(hop.what, hop.attempt, hop.detail) for hop in found] == [
        ("fresh", 0, ""), ("sent", 1, ""), ("mine", 0, "x"),
    ]  # fmt: skip


async def test_many_hops_are_written_as_several_entries(
    ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trails, "HOPS_IN_ENTRY", 4)
    trail, one = Trail(ledger, Telemetry("a")), message(1)
    run(trail, one)
    for attempt in range(2, 9):
        trail.sent(one, attempt)
    run(trail, message(2))
    await trail.flush()
    assert (await ledger.extent(trail.stream)).last == 4
    found = await Trail(ledger, Telemetry("a")).of(one.key, 0)
    assert [hop.attempt for hop in found] == [0, 1, 0, *range(2, 9)]
    assert len(await Trail(ledger, Telemetry("a")).of(message(2).key, 0)) == 3


def test_hops_are_counted_by_kind_outcome_and_stage(ledger: MemoryLedger) -> None:
    telemetry = Telemetry("a")
    trail = Trail(ledger, telemetry)
    run(trail, message(1))
    trail.sent(message(2), 2)
    trail.ended(message(2).key, State.UNKNOWN)
    trail.ended(message(2).key, State.DONE)
    trail.said(message(3), Verdict(VerdictKind.REFUSED, cause="offline"))
    trail.fold()
    counted = counts_of(telemetry)
    assert counted == {
        ("lock_control", "accepted"): 1, ("lock_control", "done"): 2, ("lock_control", "unknown"): 1,
        ("lock_control", "refused"): 1,
    }  # fmt: skip
    assert telemetry.retries.value == 1
    assert {stage: sum(cell.counts) for stage, cell in telemetry.stages.items()} == {
        "send": 1, "run": 2, "total": 2,
    }  # fmt: skip


def test_what_is_counted_as_one_counts_as_hop_by_hop() -> None:
    def figures(*, at_once: bool) -> tuple[dict[tuple[str, ...], int], dict[str, list[int]], int]:
        telemetry = Telemetry("a")
        trail = Trail(MemoryLedger(StepClock()), telemetry)
        count: Callable[[], object] = tuple if at_once else trail.fold
        for n in range(40):
            kind = ("lock_control", "alert_event")[n % 2]
            trail.said(message(n, kind), FRESH if n % 5 else CONFLICT)
            for attempt in range(1, n % 4):
                count()
                trail.sent(message(n, kind), attempt)
            count()
            if n % 7:
                trail.ended(message(n).key, (State.DONE, State.FAILED, State.UNKNOWN)[n % 3])
            count()
        trail.fold()
        counted = counts_of(telemetry)
        stages = {stage: list(cell.counts) for stage, cell in telemetry.stages.items()}
        return counted, stages, telemetry.retries.value

    assert figures(at_once=True) == figures(at_once=False)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sampled_from(["fresh", "refused", "sent", "again", "done", "unknown", "note"]),
        ),
        max_size=12,
    )
)
def test_hops_are_counted_alike_together_and_one_by_one(hops: list[tuple[int, str]]) -> None:
    """Messages that take a usual course between two counts are counted without looking at each hop."""
    counted = []
    for at_once in (True, False):
        ledger, telemetry = MemoryLedger(StepClock()), Telemetry("a")
        trail = Trail(ledger, telemetry)
        for number, what in hops:
            _hop(trail, message(number), what)
            if not at_once:
                trail.fold()
        trail.fold()
        stages = {stage: (cell.counts, round(cell.sum, 6)) for stage, cell in telemetry.stages.items()}
        cells = counts_of(telemetry)
        counted.append((cells, telemetry.retries.value, stages))
    assert counted[0] == counted[1]


def test_a_message_that_ends_when_it_is_stored_is_told_and_ended_at_once(ledger: MemoryLedger) -> None:
    telemetry = Telemetry("a")
    trail = Trail(ledger, telemetry)
    trail.stored(message(1), FRESH, State.DONE)
    trail.note(message(1).key, "sent", 1)
    trail.stored(message(2), FRESH, State.DONE)
    trail.fold()
    counted = counts_of(telemetry)
    assert counted == {("lock_control", "accepted"): 2, ("lock_control", "done"): 2}
    assert {stage: sum(cell.counts) for stage, cell in telemetry.stages.items()} == {
        "send": 0, "run": 0, "total": 2,
    }  # fmt: skip
    assert trail.oldest(lambda _: True) == 0


def _hop(trail: Trail, of: Message, what: str) -> None:
    match what:
        case "fresh":
            trail.said(of, FRESH)
        case "refused":
            trail.said(of, Verdict(VerdictKind.REFUSED, cause="offline"))
        case "sent" | "again":
            trail.sent(of, 1 if what == "sent" else 2)
        case "done" | "unknown":
            trail.ended(of.key, State[what.upper()])
        case _:
            trail.note(of.key, "delivered")


def test_the_oldest_message_under_way_is_the_first_that_is_still_open(ledger: MemoryLedger) -> None:
    trail = Trail(ledger)
    assert trail.oldest(lambda _: True) == 0
    trail.said(message(1), FRESH)
    trail.said(message(2), FRESH)
    trail.fold()
    assert isinstance(ledger.clock, StepClock)
    ledger.clock.time += 5 * SECOND
    assert trail.oldest(lambda key: key == message(2).key) == pytest.approx(5, abs=0.01)
    assert trail.oldest(lambda _: False) == 0


def test_a_look_at_the_oldest_while_an_end_is_stored_takes_nothing_from_the_counts(
    ledger: MemoryLedger,
) -> None:
    """The engine has let go of a message whose end is being stored; the end is noted when it is stored."""
    telemetry = Telemetry("a")
    trail = Trail(ledger, telemetry)
    for number in (1, 2):
        trail.said(message(number), FRESH)
        trail.sent(message(number), 1)
    trail.fold()
    assert trail.oldest(lambda _: False) == 0
    trail.ended(message(1).key, State.UNKNOWN)
    trail.fold()
    counted = counts_of(telemetry)
    assert counted == {("lock_control", "accepted"): 2, ("lock_control", "unknown"): 1}
    assert {stage: sum(cell.counts) for stage, cell in telemetry.stages.items()} == {
        "send": 2, "run": 1, "total": 1,
    }  # fmt: skip
    # The other one has ended at another hub: nothing more is heard of it here, and it is forgotten.
    assert isinstance(ledger.clock, StepClock)
    ledger.clock.time += LEAVING + SECOND
    assert trail.oldest(lambda _: False) == 0
    assert not trail._counts._leaving
    assert trail._counts._kinds.keys() == {message(1).key}, "a late answer may settle it"


def test_a_clock_that_is_ahead_is_noticed_and_forgotten(ledger: MemoryLedger) -> None:
    trail = Trail(ledger)
    trail.skew()
    trail.said(message(20_000), FRESH)
    trail.fold()
    assert trail.skew() == pytest.approx(20, abs=1)
    assert isinstance(ledger.clock, StepClock)
    ledger.clock.time += 120 * SECOND
    assert trail.skew() == 0


def test_words_are_numbered_for_ever() -> None:
    assert trails._WORDS[:4] == ("fresh", "duplicate", "sent", "done")
