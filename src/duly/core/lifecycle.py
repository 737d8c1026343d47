"""The lifecycle of a message: one table for every application, from which each dialect derives its own
states.

    accepted → sent → delivered → done | failed | expired | superseded | cancelled | unknown
                                                             unknown → done | failed

The law: states only move forward and terminal states never change, except that a late result settles
`unknown`. A transition that is not in the table raises an error and changes nothing. States may be skipped,
since networks reorder: an answer may come before its receipt.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from duly.errors import IllegalTransition

_FIRST_END: Final = 10


class State(IntEnum):
    """The state of a message. The ledger stores the numbers, so never reuse one."""

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
"""The table reversed: the states from which each state may be reached. Used for compare-and-set."""


def can_move(current: State, to: State) -> bool:
    """Return whether a message may move from one state to another."""
    return to in TRANSITIONS[current]


def move(current: State, to: State) -> State:
    """Return the new state, or raise `IllegalTransition`.

    >>> move(State.ACCEPTED, State.DELIVERED).word
    'delivered'
    """
    if to not in TRANSITIONS[current]:
        allowed = ", ".join(sorted(state.word for state in TRANSITIONS[current])) or "nothing: it has ended"
        raise IllegalTransition(f"{current.word} cannot become {to.word}; it may become {allowed}")
    return to
