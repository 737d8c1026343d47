from __future__ import annotations

import itertools

import pytest

from duly.core.lifecycle import SOURCES, TRANSITIONS, State, can_move, move
from duly.errors import IllegalTransition

PAIRS = list(itertools.product(State, State))


def test_every_state_has_its_row() -> None:
    assert set(TRANSITIONS) == set(State)


def test_the_road_of_the_design_is_open() -> None:
    state = State.ACCEPTED
    for step in (State.SENT, State.DELIVERED, State.DONE):
        state = move(state, step)
    assert state is State.DONE


@pytest.mark.parametrize(("current", "to"), PAIRS)
def test_states_only_move_forward(current: State, to: State) -> None:
    if can_move(current, to) and current is not State.UNKNOWN:
        assert to > current


@pytest.mark.parametrize("end", [state for state in State if state.terminal and state is not State.UNKNOWN])
@pytest.mark.parametrize("to", list(State))
def test_an_end_never_changes(end: State, to: State) -> None:
    with pytest.raises(IllegalTransition, match="it has ended"):
        move(end, to)


def test_a_late_result_settles_unknown_and_nothing_else_does() -> None:
    assert TRANSITIONS[State.UNKNOWN] == {State.DONE, State.FAILED}


def test_every_open_state_may_end_in_every_way() -> None:
    ends = {state for state in State if state.terminal}
    for state in State:
        if not state.terminal:
            assert ends <= TRANSITIONS[state]


@pytest.mark.parametrize(("current", "to"), PAIRS)
def test_the_table_reads_the_same_backwards(current: State, to: State) -> None:
    assert (current in SOURCES[to]) == can_move(current, to)


def test_an_illegal_move_says_what_would_be_legal() -> None:
    with pytest.raises(
        IllegalTransition, match="delivered cannot become sent; it may become cancelled, done"
    ):
        move(State.DELIVERED, State.SENT)
