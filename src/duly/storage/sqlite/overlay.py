"""Shows a reader of a ledger that another process writes the tables with the journal applied.

A reader cannot bring the tables up to date. Whenever the database has changed, the reader reads the journal
and creates a temporary view over each table that shows what the table would hold. Journal and tables are read
in one transaction, so an answer shows the ledger at one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import apsw

from duly.storage.sqlite.replay import replay
from duly.storage.sqlite.table_rows import Row, TableChanges, TableReader

_KEYS: Final = {
    "messages": "key",
    "deliveries": "key, channel, recipient, round",
    "entries": "stream, n",
    "streams": "stream",
    "cursors": "stream, reader",
    "marks": "mark",
    "items": "bucket, name",
    "refusals": "n",
}
"""The primary key of each table."""


class JournalOverlay:
    """The views that apply the journal to the tables, on one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._reader = TableReader(db)
        self._version = -1
        """the version of the database for which the views were made"""
        db.execute("PRAGMA temp_store = MEMORY")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the queries of this block see everything that is committed."""
        with self._db:
            self._db.execute("SELECT 1 FROM main.sqlite_schema").fetchall()  # starts the read transaction
            version = int(self._db.pragma("data_version"))
            if version != self._version:
                self._lift()
                changes = replay(self._reader.journal())
                if changes:
                    self._lay(changes)
            self._version = -1  # an error rolls the views back
            yield
        self._version = version

    def _lift(self) -> None:
        """Remove the views."""
        for table in _KEYS:
            self._db.execute(f"DROP VIEW IF EXISTS temp.{table}")
            self._db.execute(f"DROP TABLE IF EXISTS temp.new_{table}")
            self._db.execute(f"DROP TABLE IF EXISTS temp.touched_{table}")

    def _lay(self, changes: TableChanges) -> None:
        run = self._db.execute
        touched = _touched(changes)
        for table, key in _KEYS.items():
            run(f"CREATE TEMP TABLE touched_{table} AS SELECT {key} FROM main.{table} WHERE 0")
            marks = ", ".join("?" * len(key.split(",")))
            self._db.executemany(f"INSERT INTO temp.touched_{table} VALUES ({marks})", touched.get(table, ()))
        run(
            "INSERT INTO temp.touched_deliveries SELECT key, channel, recipient, round FROM main.deliveries "
            "WHERE key IN (SELECT key FROM temp.touched_messages)"
        )
        for table, key in _KEYS.items():
            copied = f"SELECT * FROM main.{table} WHERE ({key}) IN temp.touched_{table}"
            run(f"CREATE TEMP TABLE {table} AS {copied}")
            run(f"CREATE UNIQUE INDEX temp.{table}_key ON {table} ({key})")
        for statement, values in changes.statements():  # a name without a schema means the temporary copy
            run(statement, values)
        run("UPDATE temp.refusals SET n = rowid + (SELECT coalesce(max(n), 0) FROM main.refusals)")
        for table, key in _KEYS.items():
            run(f"CREATE TEMP TABLE new_{table} AS SELECT * FROM temp.{table}")
            run(f"DROP TABLE temp.{table}")
            run(
                f"CREATE TEMP VIEW {table} AS SELECT * FROM main.{table} "
                f"WHERE ({key}) NOT IN temp.touched_{table} UNION ALL SELECT * FROM temp.new_{table}"
            )


def _touched(changes: TableChanges) -> dict[str, Iterable[Row]]:
    """Return, for each table, the keys of the rows that differ from the table."""
    return {
        "messages": [(key,) for key in {*changes.states, *changes.gone}],
        "deliveries": list(changes.deliveries),
        "entries": [*changes.entries, *changes.bodies],
        "streams": [(stream,) for stream in changes.lasts],
        "cursors": list(changes.cursors),
        "marks": [(mark,) for mark in changes.marks],
        "items": list(changes.items),
    }
