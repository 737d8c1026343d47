"""The ledgers, and the functions that open them by URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from duly.errors import Malformed
from duly.runtime.clock import Clock
from duly.storage.ledger import Ledger
from duly.storage.snapshot import Snapshot


def file_url(path: str | Path) -> str:
    """Return the URL of the ledger in a file; special characters in the path are quoted.

    >>> file_url("50%/app #1.db")
    'sqlite:///50%25/app%20%231.db'
    """
    return f"sqlite:///{quote(str(path))}"


async def open_ledger(url: str, *, clock: Clock | None = None) -> Ledger:
    """Open the ledger at `url`; create it if it does not exist.

    `sqlite:///app.db` (a path relative to the working directory), `sqlite:////var/lib/app.db` (an absolute
    path), `sqlite:///app.db?mode=shared` (several processes write it), `sqlite:///app.db?mode=ro` (read-only,
    while another process may write), `postgresql://…`, `memory:`.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "memory":
            from duly.storage.memory import MemoryLedger

            return MemoryLedger(clock)
        case "sqlite":
            from duly.storage.sqlite.ledger import SqliteLedger

            if parts.netloc or len(parts.path) < 2:
                raise Malformed(
                    f"{url!r} names no file; write sqlite:///app.db or sqlite:////absolute/app.db"
                )
            if parts.path == "/:memory:":
                raise Malformed(
                    f"{url!r} would be a file with that name; for a ledger in memory write memory:"
                )
            options = parse_qs(parts.query, keep_blank_values=True)
            if options.keys() - {"mode"}:
                raise Malformed(
                    f"{parts.query} in {url!r} is not known; the only option is mode=rw|ro|shared"
                )
            mode = options.get("mode", ["rw"])[0]
            path = Path(unquote(parts.path[1:]))
            if mode == "shared":
                from duly.storage.sqlite.shared import SharedSqliteLedger

                return await SharedSqliteLedger.open(path, clock)
            if mode not in ("rw", "ro"):
                raise Malformed(f"mode={mode} in {url!r} is not known; use mode=rw, mode=ro or mode=shared")
            return await SqliteLedger.open(path, clock, readonly=mode == "ro")
        case "postgresql" | "postgres":
            from duly.storage.postgres.ledger import PostgresLedger

            return await PostgresLedger.open(url, clock)
        case _:
            raise Malformed(f"{url!r} is not a ledger; use sqlite:///app.db, postgresql://… or memory:")


async def open_snapshot(url: str, *, overlay: bool = True) -> Snapshot:
    """Open a snapshot of the ledger at `url`; a running hub is not disturbed. Without `overlay` the snapshot
    of a SQLite ledger shows its tables alone, without the changes that are still in its journal."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        from duly.storage.sqlite.snapshot import SqliteSnapshot

        return await SqliteSnapshot.open(Path(unquote(parts.path[1:])), overlay=overlay)
    if parts.scheme in ("postgresql", "postgres"):
        from duly.storage.postgres.snapshot import PostgresSnapshot

        return await PostgresSnapshot.open(url)
    raise Malformed(f"{url!r} is not a durable ledger; use sqlite:///app.db or postgresql://…")
