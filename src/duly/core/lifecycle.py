"""How a message lives: one table for every application; the dialects' states are views of it.

    accepted → sent → delivered → done | failed | expired | superseded | cancelled | unknown
                                                             unknown → done | failed

The law: states only move forward and terminal states never change, except that a late result
settles `unknown`. A move that is not in the table raises and changes nothing. Steps may be skipped,
since networks reorder: an answer before its receipt is simply further along.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from duly.errors import IllegalTransition

_FIRST_END: Final = 10


class State(IntEnum):
    """How far a message has come. Numbers are what the ledger stores: never reuse one."""

    ACCEPTED = 0
    """committed here"""
    SENT = 1
    """handed to a transport or a handler"""
    DELIVERED = 2
    """the recipient has durably received it"""
    DONE = 10
    FAILED = 11
    EXPIRED = 12
    SUPERSEDED = 13
    CANCELLED = 14
    UNKNOWN = 15
    """it may have taken effect; a late result settles it"""

    word: str
    """the name of the state in JSON and in sentences"""
    terminal: bool
    """whether the message has ended"""

    def __init__(self, number: int) -> None:
        self.word = self.name.lower()
        self.terminal = number >= _FIRST_END


_ENDS: Final = frozenset(state for state in State if state.terminal)

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.ACCEPTED: _ENDS | {State.SENT, State.DELIVERED},
    State.SENT: _ENDS | {State.DELIVERED},
    State.DELIVERED: _ENDS,
    State.UNKNOWN: frozenset({State.DONE, State.FAILED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.EXPIRED: frozenset(),
    State.SUPERSEDED: frozenset(),
    State.CANCELLED: frozenset(),
}

SOURCES: Final[Mapping[State, frozenset[State]]] = {
    to: frozenset(state for state, targets in TRANSITIONS.items() if to in targets) for to in State
}
"""The table read backwards: from where a state may be reached. Compare-and-set is written with it."""


def can_move(current: State, to: State) -> bool:
    """Return whether a message may move from one state to another."""
    return to in TRANSITIONS[current]


def move(current: State, to: State) -> State:
    """The new state, or `IllegalTransition`.

    >>> move(State.ACCEPTED, State.DELIVERED).word
    'delivered'
    """
    if to not in TRANSITIONS[current]:
        allowed = ", ".join(sorted(state.word for state in TRANSITIONS[current])) or "nothing: it has ended"
        raise IllegalTransition(f"{current.word} cannot become {to.word}; it may become {allowed}")
    return to
