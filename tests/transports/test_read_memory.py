"""The memory of what is being read: bounded, and the one that holds most makes room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import Overloaded
from duly.transports.read_memory import SHARES, Reading, ReadMemory

VERBS = ("resize", "complete", "end")


def held(memory: ReadMemory, owner: str, size: int, given_up: list[str]) -> Reading:
    reading = Reading(owner, lambda: given_up.append(owner))
    memory.resize(reading, size)
    return reading


def test_one_client_holds_its_share_and_no_more() -> None:
    memory, given_up = ReadMemory(400), list[str]()
    held(memory, "eve", 60, given_up)
    with pytest.raises(Overloaded, match="you are sending too much"):
        held(memory, "eve", 50, given_up)
    held(memory, "phone", 100, given_up)
    assert (memory.taken, given_up) == (160, [])


def test_the_one_that_holds_most_makes_room_for_one_that_asks_for_little() -> None:
    memory, given_up = ReadMemory(400), list[str]()
    oldest = held(memory, "eve", 50, given_up)
    held(memory, "eve", 50, given_up)
    for name in ("a", "b", "c"):
        held(memory, name, 90, given_up)
    held(memory, "phone", 40, given_up)
    assert (given_up, oldest.size, memory.taken) == (["eve"], 0, 360)


def test_the_one_that_holds_most_itself_is_told_to_come_back() -> None:
    memory, given_up = ReadMemory(400), list[str]()
    for name in ("a", "b", "c", "d"):
        held(memory, name, 95, given_up)
    with pytest.raises(Overloaded, match="the hub is busy"):
        held(memory, "e", 96, given_up)
    assert given_up == []


def test_what_has_come_whole_makes_no_room() -> None:
    memory, given_up = ReadMemory(400), list[str]()
    whole = [held(memory, name, 100, given_up) for name in ("a", "b", "c", "d")]
    for one in whole:
        memory.complete(one)
    with pytest.raises(Overloaded):
        held(memory, "phone", 1, given_up)
    memory.end(whole[0])
    memory.end(whole[0])
    held(memory, "phone", 100, given_up)
    assert (memory.taken, given_up) == (400, [])


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.sampled_from(VERBS))
        | st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.just("new"))
    )
)
def test_what_is_counted_is_what_is_held(steps: list[tuple[str, int, str]]) -> None:
    memory = ReadMemory(200)
    held_now: list[Reading] = []
    for owner, number, what in steps:
        try:
            if what == "new":
                reading = Reading(owner, lambda: None)
                held_now.append(reading)
                memory.resize(reading, number)
            elif held_now:
                reading = held_now[number % len(held_now)]
                if what == "complete":
                    memory.complete(reading)
                elif what == "end":
                    memory.end(reading)
                elif not reading.is_whole:
                    memory.resize(reading, number * 6)
        except Overloaded:
            memory.end(reading)
        assert memory.taken == sum(one.size for one in held_now) <= 200
        for name in "abcdef":
            assert sum(one.size for one in held_now if one.owner == name) <= 200 // SHARES
    for reading in held_now:
        memory.end(reading)
    assert memory.taken == 0
    assert memory._owners == {}
    assert not any(memory._by_size)
