"""The SQL files: named queries in `queries.sql`, and numbered migrations beside them.

A migration is applied once, in order, inside a transaction, and is never edited after a release.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from msgspec import Struct

from duly.errors import LedgerTooNew


class Migration(Struct, frozen=True):
    """One numbered change of the schema."""

    number: int
    name: str
    sql: str


@cache
def queries(dialect: str, file: str = "queries") -> dict[str, str]:
    """Return the statements of one dialect by name."""
    text = files(__package__).joinpath(dialect, f"{file}.sql").read_text(encoding="utf-8")
    blocks = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {name: _bare(sql) for name, sql in zip(blocks[::2], blocks[1::2], strict=True)}


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """Return the migrations of one dialect, in order."""
    named = (
        (re.fullmatch(r"(\d{4})_(\w+)\.sql", path.name), path)
        for path in files(__package__).joinpath(dialect).iterdir()
    )
    found = (Migration(int(m[1]), m[2], path.read_text(encoding="utf-8")) for m, path in named if m)
    return tuple(sorted(found, key=lambda migration: migration.number))


def pending(dialect: str, version: int) -> tuple[Migration, ...]:
    """Return the migrations that a ledger of this version still needs."""
    known = migrations(dialect)
    if version > known[-1].number:
        raise LedgerTooNew(
            f"this ledger was written by a newer duly (schema {version}, this one knows {known[-1].number}); "
            "upgrade duly, or restore the backup made before the upgrade"
        )
    return tuple(migration for migration in known if migration.number > version)


def _bare(sql: str) -> str:
    lines = (line for line in sql.splitlines() if line.strip() and not line.lstrip().startswith("--"))
    return "\n".join(lines).rstrip(";")
