"""Pending changes: those of the current flush, those in the journal, and those being written to the tables.

The law: the tables get only changes that are in the journal. Changes that could not be written to the tables
are tried again, before later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from duly.storage.sqlite.table_rows import Statement, TableChanges

_NONE: Final = TableChanges()
"""Nothing is added to these."""


class PendingChanges:
    """All changes that the tables do not hold."""

    def __init__(self) -> None:
        self.flush = TableChanges()
        """the changes of the current flush"""
        self._taken = _NONE
        """the changes that are being written to the journal"""
        self._behind = TableChanges()
        """the changes that are in the journal and not in the tables"""
        self._applying: list[TableChanges] = []
        """the changes that are being written to the tables"""
        self._length = 0
        """how many of them are in the journal, counted when that has changed"""

    def __iter__(self) -> Iterator[TableChanges]:
        """Iterate over all pending changes, in order."""
        yield from (*self._applying, self._behind, self._taken, self.flush)

    def __len__(self) -> int:
        """Return how many changes are in the journal and not in the tables."""
        return self._length

    def together(self) -> TableChanges:
        """Return all pending changes merged, each row once."""
        together = TableChanges()
        for changes in self:
            together.update(changes)
        return together

    def take(self) -> TableChanges:
        """Return the changes of the current flush, to be written to the journal."""
        self._taken, self.flush = self.flush, TableChanges()
        return self._taken

    def committed(self) -> None:
        """Record that the changes returned by `take` are in the journal."""
        self._behind.update(self._taken)
        self._taken = _NONE
        self._count()

    def begin_to_apply(self) -> list[Statement]:
        """Return the statements that write all changes in the journal to the tables."""
        self._applying.append(self._behind)
        self._behind = TableChanges()
        return [statement for changes in self._applying for statement in changes.statements()]

    def applied(self) -> None:
        """Record that the tables hold these changes; else the next `begin_to_apply` returns them again."""
        self._applying.clear()
        self._count()

    def _count(self) -> None:
        self._length = sum(map(len, self._applying)) + len(self._behind)
