"""The rows of open work: what is kept of a flush, and what is not."""

from __future__ import annotations

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.trusted_time import Floor
from duly.storage.interpreter import Interpreter
from duly.storage.locked_rows import LockedRows
from duly.storage.postgres.row_cache import LARGEST, RowCache
from tests.storage.making import admit, message


def carried_out(*operations: w.Write) -> LockedRows:
    """The rows of a flush of these operations."""
    rows = LockedRows()
    Interpreter(rows).execute(operations)
    return rows


def sent(n: int) -> w.Admit:
    m = message(n)
    return admit(
        m, state=State.SENT, then=(w.Deliver(w.DeliveryRef(m.key, "device", "lock"), 1, 0, 1, "me"),)
    )


def test_open_messages_and_deliveries_are_kept_without_their_bodies() -> None:
    cache = RowCache()
    cache.learn(carried_out(sent(1)))
    kept = cache.messages[message(1).key]
    assert (kept.state, kept.fingerprint, kept.admit) == (State.SENT, message(1).fingerprint, None)
    assert [delivery.attempt for delivery in cache.deliveries.values()] == [1]


def test_what_has_ended_or_was_withdrawn_is_not_kept() -> None:
    cache = RowCache()
    cache.learn(carried_out(sent(1), sent(2)))
    for n, end in ((1, w.Advance(message(1).key, State.DONE, 2)), (2, w.Withdraw(message(2).key))):
        ref = w.DeliveryRef(message(n).key, "device", "lock")
        cache.learn(carried_out(sent(n), w.Finish(ref, None, State.DONE), end))
    assert not cache.messages
    assert [ref.key for ref in cache.deliveries] == [message(2).key]


def test_every_table_is_bounded_and_the_least_recently_written_go_first() -> None:
    cache = RowCache(capacity=2)
    for n in (1, 2, 1, 3):
        name = f"{n}"
        cache.learn(carried_out(sent(n), w.RaiseMark(name, n, n), w.PutItem("b", name, b"x")))
    assert [*cache.messages] == [message(1).key, message(3).key]
    assert len(cache.deliveries) == 2
    assert [*cache.marks] == ["1", "3"]
    assert [*cache.items] == [("b", "1"), ("b", "3")]


def test_items_that_are_dropped_or_large_are_not_kept() -> None:
    cache = RowCache()
    large = b"x" * (LARGEST + 1)
    cache.learn(carried_out(w.PutItem("b", "one", b"1"), w.PutItem("b", "two", b"2")))
    cache.learn(carried_out(w.PutItem("b", "one", large)))
    cache.learn(carried_out(w.PutItem("b", "two", b"3"), w.DropItem("b", "two")))
    assert not cache.items


def test_the_rows_of_a_refused_flush_are_forgotten_and_others_kept() -> None:
    cache = RowCache()
    cache.learn(carried_out(sent(1), w.RaiseMark("a", 1, 1), w.PutItem("b", "one", b"1")))
    cache.learn(carried_out(sent(2), w.RaiseMark("z", 1, 1), w.PutItem("b", "two", b"2")))
    cache.forget(carried_out(sent(1), w.RaiseMark("a", 1, 1), w.PutItem("b", "one", b"1")))
    assert [*cache.messages] == [message(2).key]
    assert [ref.key for ref in cache.deliveries] == [message(2).key]
    assert ([*cache.marks], [*cache.items]) == (["z"], [("b", "two")])


def test_a_floor_is_kept_from_a_flush_that_has_read_it() -> None:
    cache = RowCache()
    read = carried_out(sent(1))
    read.floor = Floor(until=5)
    cache.learn(read)
    cache.learn(carried_out(sent(2)))
    assert cache.floor == Floor(until=5)
