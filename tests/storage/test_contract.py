"""What every ledger promises. The memory ledger is the readable one; the others must not differ."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from duly.core import operations as w
from duly.core.horizon import Horizon
from duly.core.lifecycle import State, can_move
from duly.core.messages import (
    CONFLICT,
    FORGOTTEN,
    FRESH,
    Answer,
    Message,
    Mode,
    Order,
    Verdict,
    VerdictKind,
    key_of,
)
from duly.core.units import DAY, HOUR, MINUTE, MS, SECOND
from duly.errors import Malformed
from duly.storage.floor_repair import lower_marks, lowered_to
from duly.storage.ledger import OLDEST, REFUSALS_KEPT, Ledger, StreamPosition, StreamRange
from duly.storage.memory import MemoryLedger
from duly.storage.message_filter import MessageFilter
from tests.storage.conftest import Store
from tests.storage.making import admit, message

# ── admission ────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_message_is_fresh_and_found_again_whole(ledger: Ledger, store: Store) -> None:
    m = message(
        expires=store.clock.now() + HOUR, time=5, order=Order("power", Mode.LATEST, 3, 2), body=b"\x00\xff"
    )
    assert (await ledger.admit(m)).kind is VerdictKind.FRESH
    record = await ledger.outcome("app-1", m.id)
    assert record is not None
    assert record.message == m
    assert (record.state, record.answer, record.accepted_at) == (State.ACCEPTED, None, store.clock.now())


async def test_what_was_never_sent_is_not_found(ledger: Ledger) -> None:
    assert await ledger.outcome("app-1", "1700000000000_0") is None


async def test_a_repeat_is_a_duplicate_with_state_and_answer(ledger: Ledger) -> None:
    m = message()
    await ledger.admit(m)
    first = await ledger.admit(m)
    assert (first.kind, first.state, first.answer) == (VerdictKind.DUPLICATE, State.ACCEPTED, None)
    await ledger.write(w.Advance(m.key, State.DONE, 2, Answer(0, b"opened")))
    second = await ledger.admit(m)
    assert (second.kind, second.state, second.answer) == (
        VerdictKind.DUPLICATE,
        State.DONE,
        Answer(0, b"opened"),
    )


async def test_a_repeat_is_still_a_duplicate_after_reopening(store: Store) -> None:
    ledger = await store.open()
    m = message()
    await ledger.admit(m)
    await ledger.write(w.Advance(m.key, State.FAILED, 2, Answer(3, b"", "jammed")))
    ledger = await store.reopen()
    verdict = await ledger.admit(m)
    assert (verdict.kind, verdict.state, verdict.answer) == (
        VerdictKind.DUPLICATE,
        State.FAILED,
        Answer(3, b"", "jammed"),
    )


@pytest.mark.parametrize(
    "change", [{"body": b"{}"}, {"recipient": "lock-2"}, {"kind": "query"}, {"order": Order("k")}]
)
async def test_the_same_id_with_other_content_is_a_conflict_and_recorded(
    ledger: Ledger, change: dict[str, Any]
) -> None:
    await ledger.admit(message())
    for _ in range(2):
        assert (await ledger.admit(message(**change))).kind is VerdictKind.CONFLICT
    assert [r.word for r in await ledger.refusals()] == ["conflict", "conflict"]
    record = await ledger.outcome("app-1", message().id)
    assert record is not None
    assert record.message == message()


async def test_the_same_id_of_two_scopes_is_two_messages(ledger: Ledger) -> None:
    assert (await ledger.admit(message(scope="app-1"))).fresh
    assert (await ledger.admit(message(scope="app-2"))).fresh


async def test_a_batch_gets_a_verdict_per_message(ledger: Ledger) -> None:
    await ledger.admit(message(1))
    verdicts = await ledger.admit_many(
        [message(0), message(1), message(1, body=b"x"), message(2), message(2)]
    )
    assert [v.kind for v in verdicts] == [
        VerdictKind.FRESH,
        VerdictKind.DUPLICATE,
        VerdictKind.CONFLICT,
        VerdictKind.FRESH,
        VerdictKind.DUPLICATE,
    ]


async def test_a_hundred_callers_with_one_id_are_one_admission(ledger: Ledger) -> None:
    verdicts = await asyncio.gather(*(ledger.admit(message()) for _ in range(100)))
    assert [v.kind for v in verdicts].count(VerdictKind.FRESH) == 1
    assert [v.kind for v in verdicts].count(VerdictKind.DUPLICATE) == 99


async def test_a_message_older_than_the_horizon_is_stale_and_recorded(ledger: Ledger, store: Store) -> None:
    store.clock.set(1_700_000_000 * SECOND + DAY)
    assert (await ledger.admit(message())).kind is VerdictKind.STALE
    assert [r.word for r in await ledger.refusals()] == ["stale"]
    assert await ledger.outcome("app-1", message().id) is None


async def test_an_expired_message_is_refused_but_the_repeat_of_a_known_one_gets_its_answer(
    ledger: Ledger, store: Store
) -> None:
    soon = store.clock.now() + SECOND
    known, unknown = message(0, expires=soon), message(1, expires=soon)
    await ledger.write(admit(known), w.Advance(known.key, State.DONE, 2, Answer(0)))
    store.clock.advance(60)
    assert (await ledger.admit(unknown)).kind is VerdictKind.EXPIRED
    assert (await ledger.admit(known)).answer == Answer(0)


async def test_a_message_from_the_future_is_refused_and_its_id_is_not_burned(
    ledger: Ledger, store: Store
) -> None:
    later = message(ms=store.clock.now() // MS + 6 * 60_000)
    assert (await ledger.admit(later)).kind is VerdictKind.REFUSED
    assert [r.word for r in await ledger.refusals()] == ["future"], "under its cause, not just as refused"
    store.clock.advance(6 * 60)
    assert (await ledger.admit(later)).fresh


async def test_a_withdrawn_message_may_be_tried_again(ledger: Ledger) -> None:
    m = message()
    ref = w.DeliveryRef(m.key, "run", "h")
    await ledger.write(admit(m, then=(w.Deliver(ref, 0),)))
    assert (await ledger.write(w.Withdraw(m.key))).values == [True]
    assert await ledger.deliveries(m.key) == []
    assert (await ledger.admit(m)).fresh


async def test_an_ended_message_cannot_be_withdrawn(ledger: Ledger) -> None:
    m = message()
    await ledger.write(admit(m), w.Advance(m.key, State.DONE, 1))
    assert (await ledger.write(w.Withdraw(m.key))).values == [False]
    assert (await ledger.write(w.Withdraw(key_of("a", "never")))).values == [False]


# ── atomic steps ─────────────────────────────────────────────────────────────────────────────────


async def test_what_follows_an_admission_happens_only_if_it_was_fresh(ledger: Ledger) -> None:
    m = message()
    step = admit(m, then=(w.Deliver(w.DeliveryRef(m.key, "mail", "eve"), 5), w.AppendEntry("log", b"x", 1)))
    fresh = await ledger.write(step)
    assert fresh.values[1:] == [True, 1]
    again = await ledger.write(step)
    assert len(again.values) == 1
    assert await ledger.extent("log") == StreamRange(1, 1)


async def test_a_raised_mark_decides_between_two_ends(ledger: Ledger) -> None:
    first, late = message(5), message(3)

    def step(m: Message, n: int) -> w.Admit:
        superseded = w.Advance(m.key, State.SUPERSEDED, 1, Answer(0, b"", "too late"))
        return admit(
            m,
            then=(
                w.RaiseMark("lane", n, 10, (w.Deliver(w.DeliveryRef(m.key, "d", "x"), 1),), (superseded,)),
            ),
        )

    assert (await ledger.write(step(first, 5))).values[1:] == [True, True]
    assert (await ledger.write(step(late, 3))).values[1:] == [
        False,
        w.Advanced(True, State.SUPERSEDED, Answer(0, b"", "too late")),
    ]
    assert await ledger.deliveries(late.key) == []


async def test_the_groups_of_one_commit_are_applied_in_order(ledger: Ledger) -> None:
    m, other = message(0), message(0, body=b"other")
    committed = await ledger.commit(
        [
            (w.Advance(m.key, State.DONE, 1),),
            (admit(m, then=(w.AppendEntry("log", b"1", 1),)),),
            (w.Withdraw(m.key),),
            (
                admit(
                    other, then=(w.AppendEntry("log", b"2", 1), w.Deliver(w.DeliveryRef(m.key, "c", "r"), 1))
                ),
            ),
            (w.Claim("c", "me", now=1, due=9),),
            (w.Advance(m.key, State.DONE, 3), w.MoveCursor("log", "eve", 9)),
            (admit(m),),
        ]
    )
    results = [each.values for each in committed]
    assert results[0] == [w.Advanced(False, None)]
    assert [results[i][0] for i in (1, 3, 6)] == [FRESH, FRESH, CONFLICT]
    assert (results[1][1:], results[2], results[3][1:]) == ([1], [True], [2, True])
    assert [d.attempt for d in results[4][0]] == [1]
    assert results[5] == [w.Advanced(True, State.DONE), 2]
    record = await ledger.find(m.key)
    assert record is not None
    assert (record.message.body, record.state) == (b"other", State.DONE)


@pytest.mark.parametrize("seed", range(12))
async def test_every_ledger_does_what_the_memory_ledger_does(store: Store, seed: int) -> None:
    ledger, model = await store.open(), MemoryLedger(store.clock)
    rng = random.Random(seed)
    for _ in range(15):
        groups = [
            tuple(some_write(rng, store.clock.now()) for _ in range(rng.randint(1, 3))) for _ in range(12)
        ]
        assert await ledger.commit(groups) == await model.commit(groups)
        if rng.random() < 0.2:
            store.clock.advance(rng.random())
            assert await ledger.prune() == await model.prune()
    for n in range(4):
        assert await ledger.find(message(n).key) == await model.find(message(n).key)
        assert await ledger.deliveries(message(n).key) == await model.deliveries(message(n).key)
    assert await ledger.entries("s0") == await model.entries("s0")
    assert await ledger.marks() == await model.marks()
    assert await ledger.bucket("users") == await model.bucket("users")
    assert await ledger.messages(open_only=True) == await model.messages(open_only=True)
    assert await ledger.open_deliveries("c") == await model.open_deliveries("c")
    assert await ledger.refusals(1000) == await model.refusals(1000)


def some_write(rng: random.Random, now: int, depth: int = 0) -> w.Write:
    """Any write on few rows, so that they meet."""
    m = message(rng.randrange(4), body=rng.choice([b"a", b"a", b"b"]))
    ref = w.DeliveryRef(m.key, rng.choice("cd"), rng.choice("xy"))
    attempt, due = rng.randrange(3), rng.randrange(100)

    def more() -> w.Group:
        return tuple(some_write(rng, now, depth + 1) for _ in range(rng.randrange(3))) if depth < 2 else ()

    make: list[Callable[[], w.Write]] = [
        lambda: w.Admit(m, now + rng.choice([-1, 500_000, 10**12]), now, rng.choice(list(State)[:3]), more()),
        lambda: w.Recall(m, FORGOTTEN, now),
        lambda: w.Withdraw(m.key),
        lambda: w.Advance(m.key, rng.choice(list(State)), due, rng.choice([None, Answer(due, b"x")])),
        lambda: w.Deliver(ref, due, attempt=rng.randrange(2), worker="w"),
        lambda: w.Take(ref, attempt, "t", due),
        lambda: w.Claim(ref.channel, "c", due, due + 10, 1000),
        lambda: w.Renew(ref, attempt, due),
        lambda: w.Postpone(ref, attempt, due, "later"),
        lambda: w.Finish(ref, rng.choice([None, attempt]), State.FAILED, "over", more()),
        lambda: w.AppendEntry(rng.choice(["s0", "s1"]), b"%d" % due, due, m.key),
        lambda: w.MoveCursor(rng.choice(["s0", "s1"]), "reader", rng.randrange(20)),
        lambda: w.RaiseMark(rng.choice("pq"), rng.randrange(20), rng.randrange(20), more(), more()),
        lambda: w.LowerMark(rng.choice("pq"), rng.randrange(20)),
        lambda: w.RecordRefusal("a", "b", "denied", "no", due),
        lambda: w.PutItem("users", rng.choice("uv"), b"%d" % rng.randrange(3)),
        lambda: w.PutNewItem("users", rng.choice("uv"), b"%d" % rng.randrange(3), more(), more()),
        lambda: w.DropItem("users", rng.choice("uv")),
    ]
    return rng.choice(make)()


# ── lifecycle ────────────────────────────────────────────────────────────────────────────────────


async def test_transitions_are_compare_and_set_along_the_table(ledger: Ledger) -> None:
    for n, (state, to) in enumerate(itertools.product(State, State)):
        m = message(n)
        await ledger.write(admit(m, state=state))
        moved = await ledger.apply(w.Advance(m.key, to, 9, Answer(1)))
        expected = can_move(state, to)
        assert moved == w.Advanced(expected, to if expected else state, Answer(1) if expected else None)
        record = await ledger.outcome("app-1", m.id)
        assert record is not None
        assert record.state is (to if expected else state), (state, to)
        assert record.moved_at == (9 if expected else 1), (state, to)


async def test_advancing_what_does_not_exist_changes_nothing(ledger: Ledger) -> None:
    assert (await ledger.write(w.Advance(b"\0" * 6 + b"a\0b", State.DONE, 1))).values == [
        w.Advanced(False, None)
    ]


async def test_of_many_different_ends_exactly_one_stands(ledger: Ledger) -> None:
    m = message()
    await ledger.admit(m)
    ends = [State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED] * 10
    moved = await asyncio.gather(*(ledger.apply(w.Advance(m.key, to, i)) for i, to in enumerate(ends)))
    assert sum(result.moved for result in moved) == 1


# ── deliveries ───────────────────────────────────────────────────────────────────────────────────


async def test_a_delivery_exists_once_per_channel_recipient_and_round(ledger: Ledger) -> None:
    m = message()
    await ledger.admit(m)
    ref = w.DeliveryRef(m.key, "mail", "eve")
    assert (await ledger.write(w.Deliver(ref, 1), w.Deliver(ref, 2))).values == [True, False]
    others = [
        w.DeliveryRef(m.key, "sms", "eve"),
        w.DeliveryRef(m.key, "mail", "bob"),
        w.DeliveryRef(m.key, "mail", "eve", 1),
    ]
    assert (await ledger.write(*(w.Deliver(other, 3) for other in others))).values == [True, True, True]
    assert {d.ref for d in await ledger.deliveries(m.key)} == {ref, *others}


async def test_the_deliveries_of_many_messages_are_those_of_each(ledger: Ledger) -> None:
    messages = [message(n) for n in range(4)]
    refs = [
        w.DeliveryRef(messages[n].key, "mail", who, round_)
        for n, who, round_ in ((2, "eve", 1), (0, "eve", 0), (2, "bob", 0), (2, "eve", 0))
    ]
    await ledger.write(*(admit(m) for m in messages), *(w.Deliver(ref, 3) for ref in refs))
    keys = [m.key for m in messages]
    unknown = key_of("nobody", "1700000000000_9")
    found = await ledger.deliveries_of([*keys, unknown])
    assert found == {key: await ledger.deliveries(key) for key in (*keys, unknown)}
    assert [len(found[key]) for key in keys] == [1, 0, 3, 0]
    assert await ledger.deliveries_of([]) == {}


async def test_claims_take_what_is_due_oldest_first_and_number_the_attempt(ledger: Ledger) -> None:
    refs = []
    for n, due in enumerate([30, 10, 20, 99]):
        m = message(n)
        refs.append(w.DeliveryRef(m.key, "mail", "eve"))
        await ledger.write(admit(m, then=(w.Deliver(refs[-1], due, expires=500),)))
    taken = await ledger.apply(w.Claim("mail", "me", now=50, due=1_000, limit=2))
    assert [d.ref for d in taken] == [refs[1], refs[2]]
    assert taken[0] == w.Delivery(refs[1], State.SENT, 1, 1_000, 500, "me", "")
    rest = await ledger.apply(w.Claim("mail", "me", now=50, due=1_000))
    assert [d.ref for d in rest] == [refs[0]]
    assert (await ledger.write(w.Claim("sms", "me", now=50, due=1_000))).values == [[]]


async def test_concurrent_claims_never_take_the_same_delivery(ledger: Ledger) -> None:
    for n in range(40):
        m = message(n)
        await ledger.write(admit(m, then=(w.Deliver(w.DeliveryRef(m.key, "mail", "eve"), 0),)))
    claims = await asyncio.gather(*(ledger.apply(w.Claim("mail", f"w{i}", 1, 100, 7)) for i in range(10)))
    taken = [d.ref for claimed in claims for d in claimed]
    assert len(taken) == len(set(taken)) == 40


async def test_a_lost_lease_is_taken_over_and_the_late_attempt_can_finish_nothing(ledger: Ledger) -> None:
    m = message()
    ref = w.DeliveryRef(m.key, "run", "h")
    await ledger.write(admit(m, then=(w.Deliver(ref, due=10, attempt=1, worker="dead"),)))
    assert (await ledger.write(w.Claim("run", "me", now=9, due=100))).values == [[]]
    taken = await ledger.apply(w.Claim("run", "me", now=10, due=100))
    assert [d.attempt for d in taken] == [2]
    end = w.Advance(m.key, State.DONE, 1)
    assert (await ledger.write(w.Finish(ref, 1, State.DONE, then=(end,)))).values == [False]
    late = await ledger.write(w.Renew(ref, 1, 999), w.Postpone(ref, 1, 999), w.Take(ref, 1, "dead", 9))
    assert late.values == [False] * 3
    assert (await ledger.write(w.Renew(ref, 2, 200))).values == [True]
    assert (await ledger.write(w.Finish(ref, 2, State.DONE, then=(end,)))).values == [
        True,
        w.Advanced(True, State.DONE),
    ]
    assert (await ledger.write(w.Finish(ref, None, State.FAILED))).values == [False]


async def test_a_delivery_that_need_not_be_kept_is_ended_or_gone_for_every_attempt(ledger: Ledger) -> None:
    m, other = message(1), message(2)
    ref, open_ = (w.DeliveryRef(one.key, "once", "run") for one in (m, other))
    first, second = (w.Deliver(one, due=1_000, attempt=7, worker="me") for one in (ref, open_))
    await ledger.commit([(admit(m, then=(first,)),), (admit(other, then=(second,)),)])
    end = w.Finish(ref, 7, State.DONE, "", (w.Advance(m.key, State.DONE, 5, Answer(0, b"paid")),), kept=False)
    assert await ledger.apply(end)
    assert all(one.state is State.DONE for one in await ledger.deliveries(m.key))
    late = (w.Finish(ref, 7, State.FAILED), w.Take(ref, 7, "you", 9_000), w.Renew(ref, 7, 9_000))
    assert (await ledger.write(*late, w.Postpone(ref, 7, 9_000))).values == [False] * 4
    record = await ledger.find(m.key)
    assert record is not None
    assert (record.state, record.answer) == (State.DONE, Answer(0, b"paid"))
    assert [one.ref for one in await ledger.deliveries(other.key)] == [open_]
    assert [one.message.key for one in await ledger.open_deliveries("once")] == [other.key]


async def test_a_postponed_delivery_waits_for_its_time_with_its_error(ledger: Ledger) -> None:
    m = message()
    ref = w.DeliveryRef(m.key, "mail", "eve")
    await ledger.write(admit(m, then=(w.Deliver(ref, due=10, attempt=1, worker="me"),)))
    assert (await ledger.write(w.Postpone(ref, 1, due=50, error="greylisted"))).values == [True]
    (delivery,) = await ledger.deliveries(m.key)
    assert delivery == w.Delivery(ref, State.ACCEPTED, 1, 50, 0, "", "greylisted")
    assert (await ledger.write(w.Take(ref, 1, "me", 80))).values == [True]
    (delivery,) = await ledger.deliveries(m.key)
    assert (delivery.attempt, delivery.state, delivery.due) == (2, State.SENT, 80)


async def test_a_restart_finds_the_open_deliveries_with_their_messages_in_order(store: Store) -> None:
    ledger = await store.open()
    made = [message(n, order=Order("k", n=n)) for n in range(5)]
    for at, m in zip([3, 1, 2, 5, 4], made, strict=True):
        await ledger.write(admit(m, at, then=(w.Deliver(w.DeliveryRef(m.key, "dev", "x"), 7),)))
    await ledger.write(w.Finish(w.DeliveryRef(made[2].key, "dev", "x"), None, State.DONE))
    ledger = await store.reopen()
    assert [o.message for o in await ledger.open_deliveries("dev")] == [made[1], made[0], made[4], made[3]]
    assert await ledger.open_deliveries("other") == []


async def test_a_delivery_without_its_message_is_nothing_to_go_on_with(ledger: Ledger) -> None:
    there, missing = message(0), message(1)
    await ledger.write(
        admit(there), *(w.Deliver(w.DeliveryRef(m.key, "dev", "x"), 7) for m in (there, missing))
    )
    assert [o.message for o in await ledger.open_deliveries("dev")] == [there]


# ── streams, cursors, marks ──────────────────────────────────────────────────────────────────────


async def test_a_stream_numbers_its_entries_without_gaps_under_concurrency(ledger: Ledger) -> None:
    numbers = await asyncio.gather(*(ledger.apply(w.AppendEntry("conv", b"%d" % i, i)) for i in range(50)))
    assert sorted(numbers) == list(range(1, 51))
    entries = await ledger.entries("conv", after=45)
    assert [e.n for e in entries] == [46, 47, 48, 49, 50]
    assert await ledger.extent("conv") == StreamRange(1, 50)
    assert [e.n for e in await ledger.entries("conv", limit=3)] == [1, 2, 3]


async def test_the_newest_entries_of_many_streams_are_those_of_each(ledger: Ledger) -> None:
    await ledger.write(
        *(w.AppendEntry("long", b"%d" % n, n) for n in range(7)), w.AppendEntry("short", b"x", 9)
    )
    await ledger.write(w.AppendEntry("trimmed", b"y", 1))
    await ledger.trim("trimmed", 1)
    asked = ["short", "long", "trimmed", "unknown"]
    newest = await ledger.newest_entries(asked, 3)
    assert newest == {"long": await ledger.entries("long", 4), "short": await ledger.entries("short")}
    assert [entry.body for entry in newest["long"]] == [b"4", b"5", b"6"]
    assert [entry.n for entry in (await ledger.newest_entries(["long"]))["long"]] == [7]
    assert await ledger.newest_entries([]) == {}
    assert await ledger.lasts(asked) == {"long": 7, "short": 1, "trimmed": 1}


async def test_trimming_keeps_the_numbers_and_shows_the_gap(ledger: Ledger) -> None:
    await ledger.write(*(w.AppendEntry("conv", b"x", 1) for _ in range(5)))
    await ledger.trim("conv", 3)
    assert await ledger.extent("conv") == StreamRange(4, 5)
    await ledger.trim("conv", 9)
    assert await ledger.extent("conv") == StreamRange(6, 5)
    assert (await ledger.write(w.AppendEntry("conv", b"x", 1))).values == [6]
    assert await ledger.extent("nothing") == StreamRange(1, 0)


async def test_a_cursor_moves_forward_only_and_never_past_the_end(ledger: Ledger) -> None:
    await ledger.write(*(w.AppendEntry("conv", b"x", 1) for _ in range(5)))
    assert (await ledger.write(w.MoveCursor("conv", "eve", 3), w.MoveCursor("conv", "eve", 2))).values == [
        3,
        3,
    ]
    assert (await ledger.write(w.MoveCursor("conv", "eve", 99), w.MoveCursor("conv", "bob", 1))).values == [
        5,
        1,
    ]
    assert (await ledger.cursor("conv", "eve"), await ledger.cursor("conv", "nobody")) == (5, 0)
    assert (await ledger.write(w.MoveCursor("nothing", "eve", 4))).values == [0]


async def test_a_mark_is_raised_never_lowered_and_survives(store: Store) -> None:
    ledger = await store.open()
    raised = await ledger.write(
        *(w.RaiseMark("lane", n, ms) for n, ms in [(5, 100), (5, 100), (3, 90), (7, 80)])
    )
    assert raised.values == [True, False, False, True]
    ledger = await store.reopen()
    assert await ledger.marks() == {"lane": (7, 100)}
    assert (await ledger.write(w.RaiseMark("lane", 0, 101))).values == [True], (
        "a sender that counts anew, later"
    )
    assert await ledger.marks() == {"lane": (0, 101)}


async def test_marks_in_the_future_are_taken_back(store: Store) -> None:
    ledger = await store.open()
    now = ledger.clock.now() // MS
    ahead = now + 2 * DAY // MS
    await ledger.write(
        w.RaiseMark("counted", 5, ahead), w.RaiseMark("timed", ahead + 1, ahead), w.RaiseMark("right", 7, now)
    )
    assert await lowered_to(ledger) == 0
    assert await lower_marks(ledger) == 2
    ledger = await store.reopen()
    marks, at = await ledger.marks(), await lowered_to(ledger)
    assert now <= at < ahead
    assert marks == {"counted": (5, at), "timed": (at, at), "right": (7, now)}
    assert await lower_marks(ledger) == 0
    assert (
        await ledger.write(w.RaiseMark("counted", 0, at + 1), w.RaiseMark("timed", at + 1, at + 1))
    ).values == [
        True,
        True,
    ]


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────


async def test_an_item_is_put_replaced_and_dropped(ledger: Ledger) -> None:
    assert await ledger.item("users", "eve") is None
    assert (await ledger.write(w.PutItem("users", "eve", b"1"), w.PutItem("users", "eve", b"2"))).values == [
        True,
        False,
    ]
    assert await ledger.item("users", "eve") == b"2"
    assert (await ledger.write(w.DropItem("users", "eve"), w.DropItem("users", "eve"))).values == [
        True,
        False,
    ]
    assert await ledger.item("users", "eve") is None
    assert (await ledger.write(w.PutItem("users", "eve", b"3"))).values == [True]


@pytest.mark.parametrize("body", [b"", b"\x00\xff", b"x" * 100_000])
async def test_a_body_is_any_bytes(ledger: Ledger, body: bytes) -> None:
    assert (await ledger.write(w.PutNewItem("s", "n", body), w.PutNewItem("s", "n", body))).values == [
        True,
        False,
    ]
    assert (await ledger.write(w.PutNewItem("s", "n", body), w.PutItem("s", "n", body))).values == [
        False,
        False,
    ]
    assert await ledger.item("s", "n") == body
    assert await ledger.bucket("s") == {"n": body}
    assert (await ledger.write(w.DropItem("s", "n"))).values == [True]


async def test_buckets_are_apart_and_listed_in_the_order_of_their_names(ledger: Ledger) -> None:
    names = ["b", "a", "ä", "B", "a-b", "a.b", "中", "\U0001f512", "\uff5e"]
    await ledger.write(
        *(w.PutItem("one", name, name.encode()) for name in names), w.PutItem("two", "a", b"other")
    )
    assert list((await ledger.bucket("one")).items()) == [(name, name.encode()) for name in sorted(names)]
    assert await ledger.bucket("two") == {"a": b"other"}
    assert await ledger.bucket("three") == {}
    assert (await ledger.write(w.DropItem("three", "a"), w.DropItem("two", "a"))).values == [False, True]
    assert len(await ledger.bucket("one")) == len(names)


async def test_what_was_put_is_there_after_reopening_and_what_was_dropped_is_not(store: Store) -> None:
    ledger = await store.open()
    await ledger.write(w.PutItem("users", "eve", b"1"), w.PutItem("users", "bob", b"2"))
    await ledger.write(w.PutItem("users", "eve", b"3"), w.DropItem("users", "bob"))
    ledger = await store.reopen()
    assert await ledger.bucket("users") == {"eve": b"3"}


async def test_a_new_item_brings_its_consequences_and_a_taken_name_the_others(ledger: Ledger) -> None:
    step = w.PutNewItem(
        "groups",
        "choir",
        b"{}",
        (w.AppendEntry("choir", b"made", 1),),
        (w.RecordRefusal("eve", "1", "taken", "", 1),),
    )
    assert (await ledger.write(step)).values == [True, 1]
    assert (await ledger.write(step)).values == [False, None]
    assert (await ledger.extent("choir"), [r.word for r in await ledger.refusals()]) == (
        StreamRange(1, 1),
        ["taken"],
    )


async def test_of_many_who_want_one_new_name_one_gets_it(ledger: Ledger) -> None:
    won = await asyncio.gather(*(ledger.apply(w.PutNewItem("users", "eve", b"%d" % i)) for i in range(50)))
    assert won.count(True) == 1
    winner = won.index(True)
    assert await ledger.item("users", "eve") == b"%d" % winner


# ── lists ────────────────────────────────────────────────────────────────────────────────────────


async def pages(ledger: Ledger, **asked: Any) -> list[list[Message]]:
    found: list[list[Message]] = []
    before: bytes | None = None
    while True:
        page = await ledger.messages(before=before, **asked)
        found.append([record.message for record in page.records])
        before = page.next
        if before is None:
            return found


async def test_messages_are_listed_newest_first_in_pages(ledger: Ledger) -> None:
    ageless = Message("app-1", "opaque", "k", "r")
    made = [message(0, ms=1_700_000_000_000 + i) for i in (3, 1, 4, 2, 5)]
    await ledger.admit_many([*made, ageless])
    newest_first = [*sorted(made, key=lambda m: m.made, reverse=True), ageless]
    assert await pages(ledger) == [newest_first]
    assert await pages(ledger, limit=4) == [newest_first[:4], newest_first[4:]]
    assert await pages(ledger, limit=3) == [newest_first[:3], newest_first[3:], []]
    record = (await ledger.messages(limit=1)).records[0]
    assert record == await ledger.find(newest_first[0].key)
    with pytest.raises(Malformed, match="at least one"):
        await ledger.messages(limit=0)


async def test_an_empty_ledger_is_one_empty_page(ledger: Ledger) -> None:
    assert await pages(ledger) == await pages(ledger, scope="app-1", open_only=True) == [[]]


async def test_messages_are_listed_by_scope_and_by_whether_they_are_open(ledger: Ledger) -> None:
    scopes = ["app", "app-1", "app-10", "äpp"]
    made = {scope: [message(n, scope=scope) for n in range(4)] for scope in scopes}
    await ledger.admit_many([m for of_one in made.values() for m in of_one])
    ends = [State.SENT, State.DONE, State.UNKNOWN, State.DELIVERED]
    for of_one in made.values():
        await ledger.write(*(w.Advance(m.key, to, 1) for m, to in zip(of_one, ends, strict=True)))
    for scope, of_one in made.items():
        assert await pages(ledger, scope=scope) == [of_one[::-1]]
        assert await pages(ledger, scope=scope, open_only=True) == [[of_one[3], of_one[0]]]
        assert await pages(ledger, scope=scope, limit=2) == [of_one[:1:-1], of_one[1::-1], []]
    assert sum(map(len, await pages(ledger, open_only=True, limit=3))) == 8
    for nobody in ("ap", "app-1\x001700000000000_0", "\ud800", ""):
        assert await pages(ledger, scope=nobody) == [[]]


async def test_messages_are_found_by_every_part_of_a_filter(ledger: Ledger) -> None:
    made = [
        Message("app-1", "1700000000001_1", "open", "lock"),
        Message("app-2", "1700000000001_1", "open", "lamp"),
        Message("app-1", "1700000000002_2", "close", "lock"),
        Message("äpp", "opaque", "open", "lock"),
    ]
    ends = [State.DONE, State.UNKNOWN, State.FAILED, State.ACCEPTED]
    for at, (one, to) in enumerate(zip(made, ends, strict=True), 1):
        await ledger.write(admit(one, at=at))
        if to is not State.ACCEPTED:
            await ledger.write(w.Advance(one.key, to, at))
    trouble = frozenset({State.FAILED, State.UNKNOWN})
    for wanted, fitting in (
        (MessageFilter(recipient="lock"), [0, 2, 3]),
        (MessageFilter(kind="open"), [0, 1, 3]),
        (MessageFilter(states=trouble), [1, 2]),
        (MessageFilter(states=frozenset({State.ACCEPTED})), [3]),
        (MessageFilter(id="opaque"), [3]),
        (MessageFilter(id="paque"), []),
        (MessageFilter(since=2, until=4), [1, 2]),
        (MessageFilter(scope="app-1", recipient="lock", kind="close", states=trouble, since=3), [2]),
        (MessageFilter(scope="app-1", recipient="lamp"), []),
    ):
        (found,) = await pages(ledger, wanted=wanted)
        assert {one.key for one in found} == {made[i].key for i in fitting}, wanted
    assert await pages(ledger, open_only=True, wanted=MessageFilter(kind="open")) == [[made[3]]]
    assert {one.message.scope for one in await ledger.with_id("1700000000001_1")} == {"app-1", "app-2"}
    assert [one.message for one in await ledger.with_id("opaque")] == [made[3]]
    assert await ledger.with_id("1700000000001_2") == []


async def test_a_search_looks_at_so_many_and_says_where_to_go_on(ledger: Ledger) -> None:
    rare = [message(scope="rare", ms=1_700_000_000_000 + at) for at in (0, 100, 140)]
    others = [message(scope="often", ms=1_700_000_000_000 + at) for at in range(1, 150)]
    await ledger.admit_many(rare)
    await ledger.commit([(admit(m, state=State.DONE),) for m in others])
    assert await pages(ledger, scope="rare", look_at=100) == [[rare[2], rare[1]], [rare[0]]]
    assert await pages(ledger, open_only=True, look_at=100) == [[rare[2], rare[1]], [rare[0]]]
    assert await pages(ledger, scope="nobody", look_at=100) == [[], []]
    first = await ledger.messages(scope="rare", limit=1)
    assert (first.records[0].message, first.next) == (rare[2], rare[2].key)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


async def test_refusals_are_listed_newest_first_and_bounded(ledger: Ledger) -> None:
    count = REFUSALS_KEPT + 50
    for start in range(0, count, 500):
        stop = min(start + 500, count)
        await ledger.write(
            *(w.RecordRefusal("app", f"id{i}", "denied", "no grant", i) for i in range(start, stop))
        )
    newest = await ledger.refusals(3)
    assert [(r.id, r.word, r.reason, r.at) for r in newest[:1]] == [
        (f"id{count - 1}", "denied", "no grant", count - 1)
    ]
    assert [r.at for r in newest] == [count - 1, count - 2, count - 3]
    assert len(await ledger.refusals(count)) == REFUSALS_KEPT
    assert await ledger.refusals(of=("app", f"id{count - 1}")) == newest[:1]
    assert await ledger.refusals(of=("another", f"id{count - 1}")) == []


# ── forgetting ───────────────────────────────────────────────────────────────────────────────────


async def test_pruning_forgets_what_ended_and_can_no_longer_be_accepted(ledger: Ledger, store: Store) -> None:
    ended, running, forever = message(0), message(1), Message("app-1", "opaque", "k", "r")
    for m in (ended, running, forever):
        await ledger.admit(m)
    for m in (ended, forever):
        await ledger.write(w.Deliver(w.DeliveryRef(m.key, "c", "r"), 0), w.Advance(m.key, State.DONE, 1))
    assert await ledger.prune() == 0
    store.clock.advance(25 * 3600)
    assert await ledger.prune() == 1
    assert await ledger.find(ended.key) is None
    assert await ledger.deliveries(ended.key) == []
    assert await ledger.find(running.key) is not None, "what has not ended is never forgotten"
    assert await ledger.find(forever.key) is not None
    size = await ledger.size()
    assert (size.messages, size.deliveries) == (2, 1)


async def test_a_forgotten_id_is_stale_even_if_the_clock_is_set_back(store: Store) -> None:
    ledger = await store.open()
    m = message()
    await ledger.admit(m)
    await ledger.write(w.Advance(m.key, State.DONE, 1))
    store.clock.advance(25 * 3600)
    await ledger.prune()
    assert (await ledger.admit(m)).kind is VerdictKind.STALE
    store.clock.advance(-25 * 3600)
    assert (await ledger.admit(m)).kind is VerdictKind.STALE
    ledger = await store.reopen()
    assert (await ledger.admit(m)).kind is VerdictKind.STALE


async def test_pruning_goes_in_steps(ledger: Ledger, store: Store) -> None:
    messages = [message(n) for n in range(25)]
    await ledger.admit_many(messages)
    await ledger.commit([(w.Advance(m.key, State.DONE, 1),) for m in messages])
    store.clock.advance(25 * 3600)
    assert [await ledger.prune(limit=10) for _ in range(4)] == [10, 10, 5, 0]


async def test_a_short_horizon_forgets_sooner(ledger: Ledger, store: Store) -> None:
    short = Horizon(keep=10 * MINUTE, skew=MINUTE)
    m = message()
    await ledger.admit(m, horizon=short)
    await ledger.write(w.Advance(m.key, State.DONE, 1))
    store.clock.advance(61 * 60)  # a new ledger trusts its clock after an hour
    assert await ledger.prune() == 1
    assert (await ledger.admit(m, horizon=short)).kind is VerdictKind.STALE


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────


async def test_waiting_returns_when_the_message_ends(ledger: Ledger) -> None:
    m = message()
    await ledger.admit(m)
    waiting = [asyncio.ensure_future(ledger.wait(m.key)) for _ in range(3)]
    await ledger.write(w.Advance(m.key, State.SENT, 1))
    await ledger.write(w.Advance(m.key, State.DONE, 2, Answer(7)))
    records = await asyncio.gather(*waiting)
    assert [r.answer for r in records if r] == [Answer(7)] * 3


async def test_waiting_for_a_withdrawn_or_unknown_message_returns_none(ledger: Ledger) -> None:
    m = message()
    assert await ledger.wait(m.key) is None
    await ledger.admit(m)
    waiting = asyncio.ensure_future(ledger.wait(m.key))
    await asyncio.sleep(0)
    await ledger.write(w.Withdraw(m.key))
    assert await waiting is None


async def test_waiting_is_bounded(ledger: Ledger) -> None:
    m = message()
    await ledger.admit(m)
    record = await ledger.wait(m.key, 0.01)
    assert record is not None
    assert record.state is State.ACCEPTED


# ── lines of a conversation ──────────────────────────────────────────────────────────────────────


def line(n: int = 0, body: bytes = b"text") -> w.Admit:
    m = message(n, body=body)
    return w.Admit(m, 1 << 60, 1, then=(w.AppendEntry("chat", body, 1, m.key, ends=True),))


async def test_a_message_that_ends_in_an_entry_tells_its_repeats_the_number(store: Store) -> None:
    ledger = await store.open()
    first, second = line(0), line(1)
    committed = await ledger.commit([(first,), (second,), (first,)])
    assert [each.values for each in committed] == [
        [FRESH, 1],
        [FRESH, 2],
        [Verdict(VerdictKind.DUPLICATE, State.DONE, Answer(data=b"1"))],
    ]
    assert (await ledger.extent("chat")).last == 2
    ledger = await store.reopen()
    assert (await ledger.write(second)).values == [
        Verdict(VerdictKind.DUPLICATE, State.DONE, Answer(data=b"2"))
    ]
    if store.kind != "shared":  # which remembers nothing
        assert ledger.recall(second.message, 2) == Verdict(
            VerdictKind.DUPLICATE, State.DONE, Answer(data=b"2")
        )


async def test_an_entry_can_be_rewritten_until_it_is_erased(ledger: Ledger) -> None:
    await ledger.write(w.AppendEntry("chat", b"old", 1, b"key"), w.AppendEntry("chat", b"other", 2))
    assert (
        await ledger.write(w.RewriteEntry("chat", 1, b"new"), w.RewriteEntry("chat", 3, b"none"))
    ).values == [
        True,
        False,
    ]
    assert [(e.n, e.body, e.at, e.key) for e in await ledger.entries("chat")] == [
        (1, b"new", 1, b"key"),
        (2, b"other", 2, b""),
    ]
    assert (
        await ledger.write(w.RewriteEntry("chat", 1, b""), w.RewriteEntry("chat", 1, b"back"))
    ).values == [
        True,
        False,
    ]
    assert (await ledger.write(w.RewriteEntry("chat", 1, b"back"))).values == [False]
    assert [e.body for e in await ledger.entries("chat")] == [b"", b"other"]


async def test_what_is_given_decides_in_the_same_transaction(ledger: Ledger) -> None:
    await ledger.write(w.PutItem("members", "ann", b"owner"))
    yes, no = (w.PutItem("said", "yes", b""),), (w.PutItem("said", "no", b""),)
    for given, found in (
        (w.CheckItem("members", "ann", None, yes, no), True),
        (w.CheckItem("members", "ann", b"owner", yes, no), True),
        (w.CheckItem("members", "ann", b"member", yes, no), False),
        (w.CheckItem("members", "bob", None, yes, no), False),
    ):
        assert (await ledger.write(given)).values == [found, True]
        assert list(await ledger.bucket("said")) == ["yes" if found else "no"]
        await ledger.write(w.DropItem("said", "yes"), w.DropItem("said", "no"))
    left = w.CheckItem("members", "ann", None, (w.PutItem("said", "yes", b""),))
    committed = await ledger.commit([(w.DropItem("members", "ann"),), (left,)])
    assert [each.values for each in committed] == [[True], [False]]


async def test_how_readers_stand_is_asked_at_once(ledger: Ledger) -> None:
    await ledger.write(*(w.AppendEntry("a", b"x", 1) for _ in range(3)), w.AppendEntry("b", b"x", 1))
    await ledger.write(w.MoveCursor("a", "ann", 2), w.MoveCursor("a", "bob", 9))
    assert await ledger.cursors("a") == {"ann": 2, "bob": 3}
    assert await ledger.standing([("b", "ann"), ("a", "ann"), ("none", "ann")]) == [
        StreamPosition(1, None),
        StreamPosition(3, 2),
        StreamPosition(0, None),
    ]
    assert await ledger.standing([]) == []


async def test_entries_of_many_streams_are_asked_at_once(ledger: Ledger) -> None:
    await ledger.write(*(w.AppendEntry("a", b"%d" % n, n, b"key") for n in (1, 2, 3)))
    await ledger.write(w.AppendEntry("b", b"b", 1), w.AppendEntry("c", b"c", 1))
    asked = [("c", 0), ("a", 1), ("none", 0), ("b", 1), ("a", 0)]
    found = await ledger.entries_after(asked, 2)
    assert [[(e.n, e.body, e.at, e.key) for e in page] for page in found] == [
        [(1, b"c", 1, b"")],
        [(2, b"2", 2, b"key"), (3, b"3", 3, b"key")],
        [],
        [],
        [(1, b"1", 1, b"key"), (2, b"2", 2, b"key")],
    ]
    assert await ledger.entries_after([]) == []


# ── alerts, and forgetting with care ─────────────────────────────────────────────────────────────


async def test_alerts_are_listed_as_they_came_and_nothing_else_is(ledger: Ledger, store: Store) -> None:
    for n in (3, 1, 2):
        event = Message("gate", f"event-{n}", "alert_event", "home", time=store.clock.now())
        await ledger.admit(event, listed=True)
        await ledger.admit(message(n))
        store.clock.advance(1)
    first = await ledger.of_kind("alert_event", limit=2)
    assert [record.message.id for record in first] == ["event-2", "event-1"]
    rest = await ledger.of_kind("alert_event", (first[-1].accepted_at, first[-1].message.key))
    assert [record.message.id for record in rest] == ["event-3"]


async def test_what_would_be_forgotten_can_be_seen_first_and_forgotten_by_name(
    ledger: Ledger, store: Store
) -> None:
    old = [message(n) for n in range(3)]
    for m in old:
        until = store.clock.now() + m.key[-1]
        await ledger.write(
            w.Admit(m, until, store.clock.now(), then=(w.Deliver(w.DeliveryRef(m.key, "x", "y"), 0),))
        )
    await ledger.write(w.Advance(old[0].key, State.DONE, store.clock.now()))
    await ledger.write(w.Advance(old[1].key, State.DONE, store.clock.now()))
    assert await ledger.prunable() == []
    store.clock.advance(61 * 60)  # a new ledger trusts its clock after an hour
    assert [record.message.key for record in await ledger.prunable()] == [old[0].key, old[1].key]
    assert await ledger.prune(keys=[old[1].key, old[2].key]) == 1, "what has not ended stays"
    assert await ledger.find(old[1].key) is None
    assert await ledger.deliveries(old[1].key) == []
    assert await ledger.find(old[2].key) is not None
    assert len(await ledger.deliveries(old[0].key)) == 1


async def test_deliveries_that_have_ended_are_forgotten_while_their_alert_stays(
    ledger: Ledger, store: Store
) -> None:
    begin = store.clock.now()
    alerts = [Message("gate", f"event-{n}", "alert_event", "home", time=begin) for n in range(3)]
    for m in alerts:
        told = tuple(w.Deliver(w.DeliveryRef(m.key, "alert", who), 0) for who in ("mail", "sms"))
        await ledger.write(w.Admit(m, begin + DAY, store.clock.now(), then=told, listed=True))
        store.clock.advance(1)
    await ledger.admit(message(1))
    first, second, third = alerts
    for m in (first, second):
        await ledger.write(w.Finish(w.DeliveryRef(m.key, "alert", "mail"), None, State.DONE))
    await ledger.write(w.Advance(first.key, State.DONE, store.clock.now()))
    await ledger.write(w.Finish(w.DeliveryRef(first.key, "alert", "sms"), None, State.FAILED, "no"))

    old = await ledger.aged("alert_event", OLDEST, begin + 2 * SECOND)
    assert [(one.accepted_at - begin, one.key) for one in old] == [(0, first.key), (SECOND, second.key)]
    assert [one.ref.recipient for one in old[0].deliveries] == ["mail", "sms"]
    assert old[1].deliveries == [], "those of an alert that has not ended are not given"
    rest = await ledger.aged("alert_event", (old[0].accepted_at, old[0].key), store.clock.now(), limit=1)
    assert [one.key for one in rest] == [second.key]
    assert await ledger.aged("alert_event", (old[1].accepted_at, old[1].key), begin) == []

    refs = [one.ref for one in old[0].deliveries] + [w.DeliveryRef(third.key, "alert", "mail")]
    assert await ledger.forget_deliveries([*refs, w.DeliveryRef(third.key, "alert", "nobody")]) == 2
    assert await ledger.forget_deliveries([]) == 0
    assert await ledger.deliveries(first.key) == []
    assert len(await ledger.deliveries(third.key)) == 2, "what has not ended stays"
    assert await ledger.find(first.key) is not None
    ledger = await store.reopen()
    assert await ledger.deliveries(first.key) == []
