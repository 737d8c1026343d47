"""The statements of a caller's own transaction: they may read everything and write the caller's tables. What
would change the ledger's tables, or end its transaction, is refused before it runs.

SQLite asks when it compiles a statement, so a statement that a trigger runs is judged as well.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import apsw

from duly.errors import ProgramError

Row: TypeAlias = tuple[object, ...]

LEDGER_TABLES: Final = frozenset(
    (
        "messages",
        "deliveries",
        "streams",
        "entries",
        "cursors",
        "marks",
        "refusals",
        "floor",
        "items",
        "file",
        "journal",
    )
)
_CHANGES: Final = frozenset(
    (
        apsw.SQLITE_INSERT,
        apsw.SQLITE_UPDATE,
        apsw.SQLITE_DELETE,
        apsw.SQLITE_CREATE_TABLE,
        apsw.SQLITE_CREATE_TEMP_TABLE,
        apsw.SQLITE_CREATE_VIEW,
        apsw.SQLITE_CREATE_TEMP_VIEW,
        apsw.SQLITE_CREATE_VTABLE,
        apsw.SQLITE_DROP_TABLE,
    )
)
"""actions whose first argument is a table"""
_CHANGES_OF: Final = frozenset(
    (
        apsw.SQLITE_ALTER_TABLE,
        apsw.SQLITE_CREATE_INDEX,
        apsw.SQLITE_CREATE_TRIGGER,
        apsw.SQLITE_CREATE_TEMP_TRIGGER,
        apsw.SQLITE_DROP_INDEX,
        apsw.SQLITE_DROP_TRIGGER,
    )
)
"""actions whose second argument is a table"""
_SETTINGS: Final = frozenset(
    (
        "application_id",
        "checksum_verification",
        "journal_mode",
        "locking_mode",
        "page_size",
        "schema_version",
        "synchronous",
        "user_version",
        "wal_autocheckpoint",
        "writable_schema",
    )
)
"""what the ledger itself sets"""
ENDED: Final = "this SQL ends the ledger's transaction; leave BEGIN, COMMIT and ROLLBACK out"


class CallerSql:
    """Runs the statements of callers on one connection."""

    def __init__(self) -> None:
        self._judging = False
        self._refusal = ""

    def fetch(self, db: apsw.Connection, statement: str, args: Row, *, own: bool) -> list[Row]:
        """Run a statement and return its rows; raise `ProgramError` if it is not the caller's to run. One of
        the ledger's `own` may do everything."""
        if own:
            return db.execute(statement, args).fetchall()
        if db.authorizer != self._judge:
            db.authorizer = self._judge
        self._judging, self._refusal = True, ""
        try:
            # With a flag of their own, they do not share the cache of compiled statements with the ledger's.
            flags = apsw.SQLITE_PREPARE_PERSISTENT
            return db.execute(statement, args, prepare_flags=flags).fetchall()
        except apsw.AuthError:
            raise ProgramError(self._refusal) from None
        finally:
            self._judging = False

    def _judge(self, action: int, a: str | None, b: str | None, database: str | None, _: str | None) -> int:
        if self._judging:
            self._refusal = _refusal(action, a or "", b or "", database or "")
        return apsw.SQLITE_DENY if self._judging and self._refusal else apsw.SQLITE_OK


def _refusal(action: int, first: str, second: str, database: str) -> str:
    """Return why an action is refused; empty if it is allowed."""
    if action == apsw.SQLITE_TRANSACTION:
        return ENDED
    if action == apsw.SQLITE_PRAGMA and second and first.lower() in _SETTINGS:
        return f"the ledger sets {first} itself; leave this PRAGMA out"
    table = first if action in _CHANGES else second if action in _CHANGES_OF else ""
    of = first if action == apsw.SQLITE_ALTER_TABLE else database
    if table.lower() not in LEDGER_TABLES or of not in ("main", "temp"):
        return ""
    return f"{table} is a table of the ledger itself, which may only be read; name yours differently"
