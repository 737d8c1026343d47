"""A client's local ledger: a file of its own, or memory that ends with its process.

The law: no id is minted twice. The newest one is a mark in the ledger, raised in the commit that stores its
message; a restarted client continues after it.
"""

from __future__ import annotations

from typing import Final

from duly.core.ids import SeqId, SeqIds
from duly.storage import file_url, open_ledger
from duly.storage.ledger import Ledger

MINTED: Final = "ids"
"""The name of the mark that holds the newest id."""


async def open_local_ledger(data: str | None) -> Ledger:
    """Opens the ledger in this file; None opens one in memory."""
    return await open_ledger("memory:" if data is None else file_url(data))


async def minted_ids(ledger: Ledger) -> SeqIds:
    """Returns a mint whose ids follow those of earlier runs."""
    n, ms = (await ledger.marks()).get(MINTED, (-1, 0))
    return SeqIds(SeqId(ms, n) if n >= 0 else None)
