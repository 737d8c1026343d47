"""What waits is counted by sender and by recipient, once each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.backlog import Backlog, BacklogPolicy
from duly.errors import Malformed

NAMES = st.sampled_from(["ann", "bob"])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), NAMES, NAMES, st.integers(0, 60)), max_size=80))
def test_it_counts_what_was_added_and_not_removed(steps: list[tuple[bool, int, str, str, int]]) -> None:
    backlog, waiting = Backlog(BacklogPolicy(messages=3, bytes=100)), dict[bytes, tuple[str, str, int]]()
    for add, n, sender, recipient, size in steps:
        key = b"%d" % n
        if add:
            backlog.add(key, sender, recipient, size)
            waiting.setdefault(key, (sender, recipient, size))
        else:
            backlog.remove(key)
            waiting.pop(key, None)
        assert len(backlog) == len(waiting)
        of = [size for by, _, size in waiting.values() if by == sender]
        to = [size for _, whom, size in waiting.values() if whom == recipient]
        pair = [size for by, whom, size in waiting.values() if (by, whom) == (sender, recipient)]
        share = not pair or (len(pair) * 10 < 3 and sum(pair) * 10 < 100)
        full = (len(to) >= 3 or sum(to) >= 100) and not share
        too_much = len(of) >= 3 or sum(of) >= 100 or full
        assert (backlog.excess(sender, recipient) is not None) is too_much
        assert (backlog.excess(sender, recipient, of_sender=False) is not None) is full


def test_it_says_which_bound_and_whose() -> None:
    backlog = Backlog(BacklogPolicy(messages=2, bytes=100))
    backlog.add(b"1", "phone", "lock", 100)
    assert backlog.excess("phone", "lock", of_sender=False) == (
        "100 bytes of commands for lock are waiting, 100 may"
    )
    assert backlog.excess("tablet", "lamp") is None
    backlog.add(b"2", "phone", "lamp", 0)
    assert backlog.excess("phone", "door") == "2 commands of phone are waiting, 2 may"
    backlog.clear()
    assert backlog.excess("phone", "lock") is None


def test_one_sender_does_not_fill_a_recipient_for_the_others() -> None:
    backlog = Backlog(BacklogPolicy(messages=100, bytes=10_000))
    for n in range(100):
        backlog.add(b"%d" % n, "phone", "lock", 1)
    assert backlog.excess("phone", "lock") == "100 commands of phone are waiting, 100 may"
    for n in range(10):
        assert backlog.excess("tablet", "lock") is None
        backlog.add(b"tablet %d" % n, "tablet", "lock", 1)
    assert backlog.excess("tablet", "lock") == "110 commands for lock are waiting, 100 may"


@pytest.mark.parametrize("wrong", [{"messages": 0}, {"bytes": 0}])
def test_a_backlog_that_holds_nothing_cannot_be_made(wrong: dict[str, int]) -> None:
    with pytest.raises(Malformed):
        BacklogPolicy(**wrong)
