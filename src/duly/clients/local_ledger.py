"""What a client remembers: a ledger in a file of its own, or nothing beyond its process.

The law: an id is never minted twice. The newest is a mark in the ledger, raised with the message that it was
minted for; whoever starts again goes on after it.
"""

from __future__ import annotations

from typing import Final

from duly.core.ids import SeqId, SeqIds
from duly.storage import file_url, open_ledger
from duly.storage.ledger import Ledger

MINTED: Final = "ids"
"""The mark of the newest id."""


async def open_memory(data: str | None) -> Ledger:
    """The ledger in this file; in memory if there is none."""
    return await open_ledger("memory:" if data is None else file_url(data))


async def minted_ids(ledger: Ledger) -> SeqIds:
    """Mints the ids that follow those of earlier runs."""
    n, ms = (await ledger.marks()).get(MINTED, (-1, 0))
    return SeqIds(SeqId(ms, n) if n >= 0 else None)
