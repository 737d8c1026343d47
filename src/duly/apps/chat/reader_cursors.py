"""Reader cursors: how far readers have read, and who does not acknowledge, as steps of the chat's engine.

The law: moves are stored with the lines that the engine commits next, in one flush, only the newest of each
reader; moves that could not be stored are stored when the ledger is back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from duly.apps.chat import conversations as c
from duly.apps.chat.receipts import AwaitedReceipt, note_waiting
from duly.core.operations import MoveCursor, Results, Write
from duly.core.steps import MachineEffect, Step, Todo

Moved: TypeAlias = Callable[[str, Sequence[tuple[str, int]]], None]
"""Told of a conversation's readers whose new positions are stored, as (reader, position)."""

DUE: Final = 0
"""When moves that wait are stored: with the next step of the engine."""


class _Moves(Struct):
    """Moves that are stored together, by conversation and reader."""

    cursors: dict[tuple[str, str], int] = {}
    waits: dict[tuple[str, str], AwaitedReceipt | None] = {}


class _StoredMoves(Struct, frozen=True):
    """The positions after a commit, by conversation and reader."""

    positions: list[tuple[tuple[str, str], int]]


class ReaderCursors:
    """Gathers the moves of one hub's readers for the engine that stores them. `moved` is called once for each
    conversation of a commit; `nudge` tells the engine that there is something to store."""

    def __init__(self, moved: Moved, nudge: Callable[[], None]) -> None:
        self._moved = moved
        self._nudge = nudge
        self._new = _Moves()
        self._failed: list[_Moves] = []
        """what could not be stored, the oldest first"""
        self._due = False
        """there is something to store"""
        self._stopping = False

    def move(self, conv: str, reader: str, n: int) -> None:
        """Note a reader's new position."""
        key, moves = (conv, reader), self._new.cursors
        if n > moves.get(key, 0):
            moves[key] = n
            if not self._due:
                self._store_soon()

    def note_waiting(self, conv: str, name: str, waiting: AwaitedReceipt | None) -> None:
        """Note for how long, and after how many attempts, a person has not acknowledged; None removes the
        note."""
        self._new.waits[conv, name] = waiting
        if not self._due:
            self._store_soon()

    def _store_soon(self) -> None:
        self._due = True
        self._nudge()

    def stop(self) -> None:
        """Give up moves that cannot be stored from now on: the engine is stopping, and tries nothing
        twice."""
        self._stopping = True

    def next_wake(self) -> int | None:
        """Return when there is something to store: at once, or None."""
        return DUE if self._due else None

    def take(self) -> list[Todo]:
        """Return the step that stores what was noted since the last one."""
        if not self._due:
            return []
        self._due = False
        moves, self._new = self._new, _Moves()
        if self._failed:
            moves = _merged([*self._failed, moves])
            self._failed.clear()
        cursors = [MoveCursor(c.stream(conv), reader, n) for (conv, reader), n in moves.cursors.items()]
        writes: list[Write] = [*cursors]
        writes += [note_waiting(conv, name, waiting) for (conv, name), waiting in moves.waits.items()]

        def done(results: Results, now: int) -> list[Todo]:
            stored = results.of_each(cursors)
            return [MachineEffect(_StoredMoves([*zip(moves.cursors, stored, strict=True)]))]

        return [Step(tuple(writes), done, (MachineEffect(moves),))]

    def perform(self, effect: MachineEffect) -> None:
        """Tell of what is stored; keep what could not be stored for the next step."""
        what = effect.what
        if isinstance(what, _Moves):
            if not self._stopping:
                self._failed.append(what)
                self._due = True
        elif isinstance(what, _StoredMoves):
            stored: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
            for (conv, reader), n in what.positions:
                stored[conv].append((reader, n))
            for conv, readers in stored.items():
                self._moved(conv, readers)


def _merged(each: Sequence[_Moves]) -> _Moves:
    """Return moves as one; the later ones take precedence."""
    merged = _Moves()
    for moves in each:
        merged.cursors |= moves.cursors
        merged.waits |= moves.waits
    return merged
