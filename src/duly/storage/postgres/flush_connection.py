"""The connection by which a PostgreSQL ledger commits: it is made when it is needed, and again when it broke.

The law: before a new connection is used, the server processes of earlier ones that may still commit something
are ended.
"""

from __future__ import annotations

from typing import Any

from duly.storage.postgres.watch import DoubtfulCommits, ServerProcess, StatementWatch, asyncpg, process_of


class FlushConnection:
    """The connection for the flushes of one ledger; there is at most one at a time."""

    def __init__(
        self, url: str, connecting: dict[str, Any], watch: StatementWatch, doubts: DoubtfulCommits
    ) -> None:
        self._url = url
        self._connecting = connecting
        self._watch = watch
        self._doubts = doubts
        self._process: ServerProcess | None = None
        """the server process of the connection"""
        self.line: Any = None

    async def get(self) -> Any:
        """Return the connection, which is made if there is none."""
        if self._doubts:
            await self._doubts.settle()
        if self.line is None or self.line.is_closed():
            self.line = await asyncpg.connect(self._url, **self._connecting)
            with self._watch.over(self.line):
                self._process = await process_of(self.line)
        return self.line

    def drop(self, *, in_doubt: bool = False) -> None:
        """Drop the connection; the server rolls back its open transaction. With `in_doubt` that transaction
        may have been committed."""
        if in_doubt and self._process is not None:
            self._doubts.add(self._process)
        if self.line is not None:
            self.line.terminate()
            self.line = None

    async def close(self, seconds: float) -> None:
        """Close the connection, within this time."""
        line, self.line = self.line, None
        if line is not None:
            await line.close(timeout=seconds)
