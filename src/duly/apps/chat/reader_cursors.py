"""Reader cursors: stores how far readers have read, and who does not acknowledge.

The law: moves that arrive while the ledger flushes go out with the next flush, only the newest of each
reader; moves that could not be stored stay here until the ledger is back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from duly.apps.chat import conversations as c
from duly.apps.chat.receipts import AwaitedReceipt, note_waiting
from duly.core.operations import MoveCursor, Write
from duly.errors import DulyError, LedgerError
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger

Moved: TypeAlias = Callable[[str, Sequence[tuple[str, int]]], None]
"""Told of a conversation's readers whose new positions are stored, as (reader, position)."""


class ReaderCursors:
    """Writes the cursors of one hub's readers. `moved` is called once for each conversation of a commit."""

    def __init__(self, ledger: Ledger, tasks: Supervisor, moved: Moved) -> None:
        self._ledger = ledger
        self._tasks = tasks
        self._moved = moved
        self._moves: dict[tuple[str, str], int] = {}
        self._waits: dict[tuple[str, str], AwaitedReceipt | None] = {}
        self._saving = False

    def move(self, conv: str, reader: str, n: int) -> None:
        """Note a reader's new position."""
        key = (conv, reader)
        if n > self._moves.get(key, 0):
            self._moves[key] = n
        self.save()

    def note_waiting(self, conv: str, name: str, waiting: AwaitedReceipt | None) -> None:
        """Note for how long, and after how many attempts, a person has not acknowledged; None removes the
        note."""
        self._waits[conv, name] = waiting
        self.save()

    def save(self) -> None:
        """Start to store what is noted, unless that is under way."""
        if not self._saving and (self._moves or self._waits):
            self._saving = True
            self._tasks.do("a note of chat's readers", self._save(), expected=(DulyError,))

    async def _save(self) -> None:
        try:
            while self._moves or self._waits:
                moves, self._moves = self._moves, {}
                waits, self._waits = self._waits, {}
                cursors = [MoveCursor(c.stream(conv), reader, n) for (conv, reader), n in moves.items()]
                writes: list[Write] = [*cursors]
                writes += [note_waiting(conv, name, waiting) for (conv, name), waiting in waits.items()]
                try:
                    results = await self._ledger.write(*writes)
                except LedgerError:
                    self._moves = moves | self._moves
                    self._waits = waits | self._waits
                    return  # until the ledger is back
                stored: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
                for (conv, reader), n in zip(moves, results.of_each(cursors), strict=True):
                    stored[conv].append((reader, n))
                for conv, readers in stored.items():
                    self._moved(conv, readers)
        finally:
            self._saving = False
