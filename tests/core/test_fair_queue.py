"""A queue that senders share: turns, shares, and the order of each kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duly.core.fair_queue import NO_SENDER, FairQueue


@given(st.lists(st.sampled_from(["", "ann", "bob", "cid"]), max_size=60))
def test_everything_comes_out_once_and_each_senders_own_in_order(senders: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for n, sender in enumerate(senders):
        queue.append(sender, (sender, n))
    out = []
    while queue:
        out += queue.take(1)[0]
        assert len(queue) == len(senders) - len(out)
    assert sorted(out, key=lambda item: item[1]) == list(zip(senders, range(len(senders)), strict=True))
    for name in set(senders):
        own = [n for sender, n in out if sender == name]
        assert own == sorted(own)


def test_a_newcomer_waits_for_one_item_of_each_other() -> None:
    queue: FairQueue[str] = FairQueue()
    for sender in ("ann", "bob"):
        for n in range(100):
            queue.append(sender, f"{sender} {n}")
    queue.append("cid", "cid")
    assert queue.take(3)[0] == ["ann 0", "bob 0", "cid"]


def test_what_has_no_sender_gets_every_second_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(3):
        queue.append("ann", f"ann {n}")
        queue.append(NO_SENDER, f"end {n}")
    assert queue.take(6)[0] == ["ann 0", "end 0", "ann 1", "end 1", "ann 2", "end 2"]


def test_a_share_is_used_up_by_items_or_by_bytes() -> None:
    queue: FairQueue[int] = FairQueue(capacity=10, share=3, share_bytes=100)
    for n in range(3):
        assert queue.room("ann") > 0
        queue.append("ann", n)
    assert queue.room("ann") == 0
    queue.append("bob", 0, 100)
    assert queue.room("bob") == 0
    queue.take(1)
    assert queue.room("ann") == 1


def test_when_it_is_full_only_those_who_have_something_in_it_wait() -> None:
    queue: FairQueue[int] = FairQueue(capacity=4, share=3)
    for sender in ("ann", "ann", "bob", "bob"):
        queue.append(sender, 0)
    assert (queue.room("ann"), queue.room("bob")) == (0, 0)
    assert queue.room("cid") > 0


def test_what_was_taken_out_can_be_put_back_in_front() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.append(NO_SENDER, "later")
    queue.put_back(["first", "second"])
    assert list(queue) == ["first", "second", "later"]
    queue.clear()
    assert not queue


@given(
    st.lists(st.tuples(st.sampled_from([NO_SENDER, "ann", "bob"]), st.integers(0, 50)), max_size=60),
    st.integers(0, 3),
)
def test_an_offer_is_taken_exactly_where_there_is_room(offers: list[tuple[str, int]], reserved: int) -> None:
    queue: FairQueue[int] = FairQueue(capacity=10, share=4, share_bytes=100)
    queue.reserved = reserved
    taken: list[int] = []
    for n, (sender, size) in enumerate(offers):
        room = queue.room(sender)
        if queue.offer(sender, n, size):
            taken.append(n)
        assert (n in taken) is (room > 0)
    assert sorted(queue) == taken
    assert len(queue) == len(taken)


def test_what_has_no_sender_is_taken_until_only_the_reserved_room_is_left() -> None:
    queue: FairQueue[int] = FairQueue(capacity=3)
    queue.reserved = 1
    assert [queue.offer(NO_SENDER, n, 1) for n in range(4)] == [True, True, False, False]
    queue.reserved = 0
    assert queue.offer(NO_SENDER, 4, 1)


@given(
    st.lists(st.tuples(st.sampled_from([NO_SENDER, "ann", "bob"]), st.integers(0, 50)), max_size=60),
    st.integers(1, 9),
)
def test_many_are_taken_at_once_as_they_would_be_one_by_one(offers: list[tuple[str, int]], most: int) -> None:
    one_by_one: FairQueue[int] = FairQueue()
    together: FairQueue[int] = FairQueue()
    for n, (sender, size) in enumerate(offers):
        one_by_one.append(sender, n, size)
        together.append(sender, n, size)
    while together:
        taken, size = together.take(most)
        assert taken == [item for _ in taken for item in one_by_one.take(1)[0]]
        assert size == sum(offers[n][1] for n in taken)
    assert not one_by_one


def test_no_item_is_taken_after_so_many_bytes() -> None:
    queue: FairQueue[int] = FairQueue()
    for n in range(5):
        queue.append("ann", n, 40)
    assert queue.take(5, 100) == ([0, 1, 2], 120)
    assert queue.take(5, 0) == ([], 0)
    assert queue.take(5) == ([3, 4], 80)
