"""A client's local ledger: a file, or memory that is lost with its process.

The law: no id is created twice. The newest one is a mark in the ledger, raised in the commit that stores its
message; a restarted client continues after it.
"""

from __future__ import annotations

from typing import Final

from duly.core.ids import SeqId, SeqIds
from duly.storage import file_url, open_ledger
from duly.storage.ledger import Ledger

MINTED: Final = "ids"
"""The name of the mark that holds the newest id."""


def store_url(store: str | None) -> str:
    """Return the ledger URL of a file name or URL; None means a ledger in memory.

    >>> store_url("app.db"), store_url("sqlite:///app.db"), store_url(None)
    ('sqlite:///app.db', 'sqlite:///app.db', 'memory:')
    """
    if not store or store == "memory:":
        return "memory:"
    return store if "://" in store else file_url(store)


async def open_store(store: str | None) -> Ledger:
    """Open the ledger that `store` names."""
    return await open_ledger(store_url(store))


async def minted_ids(ledger: Ledger) -> SeqIds:
    """Return an id generator whose ids follow those of earlier runs."""
    n, ms = (await ledger.marks()).get(MINTED, (-1, 0))
    return SeqIds(SeqId(ms, n) if n >= 0 else None)
