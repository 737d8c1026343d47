"""Changes on their way: of the flush that is carried out, in the journal, and at last in the tables.

The law: the tables get only what the journal has. Changes that fail to get into the tables stay behind,
before those that come later.
"""

from __future__ import annotations

from collections.abc import Iterator

from duly.storage.sqlite.tables import Statement, TableChanges


class PendingChanges:
    """All changes that the tables do not hold."""

    def __init__(self) -> None:
        self.flush = TableChanges()
        """what the flush that is carried out has changed"""
        self._taken = TableChanges()
        """what is being written to the journal"""
        self._behind = TableChanges()
        """what the journal holds, and the tables do not"""
        self._applying: list[TableChanges] = []
        """what is being written to the tables"""

    def __iter__(self) -> Iterator[TableChanges]:
        """All of them, in order."""
        yield from (*self._applying, self._behind, self._taken, self.flush)

    def __len__(self) -> int:
        """How many the journal holds, and the tables do not."""
        return sum(map(len, self._applying)) + len(self._behind)

    def together(self) -> TableChanges:
        """All of them, each row once."""
        together = TableChanges()
        for changes in self:
            together.update(changes)
        return together

    def take(self) -> TableChanges:
        """Return what the flush has changed, for the journal."""
        self._taken, self.flush = self.flush, TableChanges()
        return self._taken

    def committed(self) -> None:
        """What was taken is in the journal."""
        self._behind.update(self._taken)
        self._taken = TableChanges()

    def begin_to_apply(self) -> list[Statement]:
        """Return what brings everything that is in the journal into the tables."""
        self._applying.append(self._behind)
        self._behind = TableChanges()
        return [statement for changes in self._applying for statement in changes.statements()]

    def applied(self) -> None:
        """The tables hold it now. Without this, the next time has it again."""
        self._applying.clear()
