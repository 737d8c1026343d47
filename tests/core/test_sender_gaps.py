"""Chains, as a specification: which numbers follow on, which are held, and when a gap is given up."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from duly.core.high_water import mark_name
from duly.core.messages import Message, Order
from duly.core.sender_gaps import EVERY_GAP, Chain, Chains, HeldMessage
from duly.core.units import MS

T = 1_700_000_000_000 * MS
WINDOW = 300 * MS


def message(n: int) -> Message:
    return Message("app", f"{T // MS + n}_{n}", "dev_control", "lamp", order=Order("power", n=n))


def hold(chains: Chains, n: int, now: int = T) -> Chain:
    """Hold a message that needs the number before its own."""
    chain, one = chains.open("app"), message(n)
    chains.hold("app", chain, chains.held_message(one, mark_name(one), n, one.made // MS, n - 1, now))
    return chain


def numbers(free: list[HeldMessage]) -> list[int]:
    return [held.number for held in free]


def test_what_is_held_follows_on_when_its_gap_is_closed() -> None:
    chains = Chains(WINDOW)
    for n in (3, 2):
        chain = hold(chains, n)
    assert numbers(chain.follow()) == []
    chain.raise_to(1, T // MS)
    assert numbers(chain.follow()) == [2, 3]
    assert chains.waiting == 0


def test_a_gap_is_given_up_when_the_window_is_over() -> None:
    chains = Chains(WINDOW)
    hold(chains, 2)
    hold(chains, 5, T + 10 * MS)
    assert chains.next_wake() == T + WINDOW
    assert [numbers(free) for free in chains.wake(T + WINDOW)] == [[2]]
    assert chains.next_wake() == T + WINDOW + 10 * MS


def test_a_number_that_needs_no_lane_lets_go_what_follows_it() -> None:
    chains = Chains(WINDOW)
    chains.open("app").raise_to(0, T // MS)
    hold(chains, 2)
    assert [numbers(free) for free in chains.arrive("app", 1, T // MS + 1, T)] == [[], [2]]


def test_a_sender_that_starts_over_is_waited_for_no_longer() -> None:
    chains = Chains(WINDOW)
    chain = hold(chains, 9)
    chain.raise_to(7, T // MS)
    assert numbers(chain.count_anew(0, T // MS + 1_000, -1)) == [9]
    assert chain.mark == -1


def test_what_waits_for_a_recipient_that_has_left_is_removed() -> None:
    chains = Chains(WINDOW)
    hold(chains, 2)
    chains.remove_messages("lamp")
    assert (chains.waiting, numbers(chains.open("app").follow(EVERY_GAP))) == (0, [])


def test_windows_go_on_when_the_wall_clock_is_set() -> None:
    chains = Chains(WINDOW)
    hold(chains, 2)
    chains.shift(60_000 * MS)
    assert chains.next_wake() == T + WINDOW + 60_000 * MS


def by_time(chains: Chains, n: int, *, counts: bool = True) -> Message:
    """Hold a message that only its time puts in order."""
    one = message(n)
    held = chains.held_message(one, mark_name(one), one.made // MS, one.made // MS, EVERY_GAP, T)
    chains.sort_by_time("app", held, counts=counts)
    return one


def test_of_two_that_are_sorted_by_time_one_is_withdrawn_and_the_other_stays() -> None:
    chains = Chains(WINDOW)
    first, second = by_time(chains, 1), by_time(chains, 2)
    assert chains.withdraw("app", mark_name(first), first.key) == []
    assert chains.waiting == 1
    assert chains.withdraw("app", mark_name(second), second.key) == []
    assert list(chains.stop_sorting("app")) == [], "nothing is left to let go"


def test_a_held_message_below_the_mark_is_withdrawn_without_a_new_number() -> None:
    chains = Chains(WINDOW)
    chain = hold(chains, 3)
    chain.mark = 3
    one = message(3)
    assert chains.withdraw("app", mark_name(one), one.key) == []
    assert (chains.waiting, chain.ahead) == (0, {})


def test_what_was_let_go_or_moved_by_the_clock_is_withdrawn_once_at_most() -> None:
    chains = Chains(WINDOW)
    for n in (2, 4, 6):
        chain = hold(chains, n)
    chains.shift(60_000 * MS)
    assert numbers(chain.follow(2)) == [2]
    for n in (2, 6, 6):
        chains.withdraw("app", mark_name(message(n)), message(n).key)
    assert numbers(chain.held) == [4]


def test_a_chain_that_was_removed_has_nothing_to_stop_sorting() -> None:
    chains = Chains(WINDOW)
    one = by_time(chains, 1)
    (name,) = chains.by_time["app"]
    chains.remove(name)
    assert list(chains.stop_sorting("app")) == []
    assert chains.withdraw("app", mark_name(one), one.key) == []


def test_the_newest_time_of_a_chain_is_lowered() -> None:
    chains = Chains(WINDOW)
    chain = chains.open("app")
    chain.raise_to(1, T // MS + 500)
    chains.lower(T // MS)
    assert chain.top_ms == T // MS


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "the last one first"])
def test_the_steps_for_many_gaps_grow_with_their_number(turned: bool) -> None:
    steps: list[int] = []
    for count in (100, 400):
        chains = Chains(WINDOW)
        for n in range(2, 2 * count, 2):
            hold(chains, n)
        held = [waiting.message for waiting in chains.open("app").held]
        with counted_steps() as counter:
            for one in reversed(held) if turned else held:
                chains.withdraw("app", mark_name(one), one.key)
        steps.append(counter.total())
        assert len(list(chains.wake(T + WINDOW))) == 1
        assert chains.open("app").idle
    assert steps[1] < 6 * steps[0]


@contextmanager
def counted_steps() -> Iterator[Counter[str]]:
    """Count the lines of Python that run, each pass of a comprehension as one."""
    counter, before = Counter[str](), sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        counter[event] += 1
        return trace

    sys.settrace(trace)
    try:
        yield counter
    finally:
        sys.settrace(before)
