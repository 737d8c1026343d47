"""The ledgers, and the one door to them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from duly.errors import Malformed
from duly.runtime.clock import Clock
from duly.storage.ledger import Ledger


def file_url(path: str | Path) -> str:
    """The URL of the ledger in a file, whatever characters its name has.

    >>> file_url("50%/app #1.db")
    'sqlite:///50%25/app%20%231.db'
    """
    return f"sqlite:///{quote(str(path))}"


async def open_ledger(url: str, *, clock: Clock | None = None) -> Ledger:
    """Open the ledger at `url`; create it if it is not there.

    `sqlite:///app.db` (a file beside you), `sqlite:////var/lib/app.db` (an absolute path),
    `sqlite:///app.db?mode=shared` (several processes write it), `sqlite:///app.db?mode=ro` (look into it
    while another process writes), `postgresql://…`, `memory:`.
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
            mode = parse_qs(parts.query).get("mode", ["rw"])[0]
            path = Path(unquote(parts.path[1:]))
            if mode == "shared":
                from duly.storage.sqlite.shared import SharedSqliteLedger

                return await SharedSqliteLedger.open(path, clock)
            if mode not in ("rw", "ro"):
                raise Malformed(f"mode={mode} in {url!r} is not known; use mode=shared, mode=ro or none")
            return await SqliteLedger.open(path, clock, readonly=mode == "ro")
        case "postgresql" | "postgres":
            from duly.storage.postgres.ledger import PostgresLedger

            return await PostgresLedger.open(url, clock)
        case _:
            raise Malformed(f"{url!r} is not a ledger; use sqlite:///app.db, postgresql://… or memory:")
