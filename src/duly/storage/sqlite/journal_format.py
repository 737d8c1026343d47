"""The format of a SQLite ledger's journal: changes that are committed and not yet in the tables.

A flush is one entry of the table `journal`: the rows that it changed, with their new values
(`duly.storage.sqlite.table_rows`). An entry holds rows and not operations, so replaying it reads nothing and
decides nothing. It begins with a byte for the version of this format and a checksum of the rest. The rest is
a byte that says whether the next entry continues the same flush, and the rows. An entry that cannot be read
raises an error; it is never skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final
from zlib import crc32

from duly.errors import LedgerDamaged, LedgerTooNew

VERSION: Final = 3
READABLE: Final = (b"\x02", bytes((VERSION,)))
"""The versions that are read. Version 2 could not say that a delivery is removed; else it was the same."""
ENTRY_BYTES: Final = 64 << 20
"""The most bytes of one entry, so that none is too large for SQLite; a larger flush has several entries."""
_HEAD: Final = 5


def entries_of(flush: bytes) -> list[bytes]:
    """Return the entries of the journal that hold a flush."""
    parts = [flush[at : at + ENTRY_BYTES] for at in range(0, len(flush), ENTRY_BYTES)]
    last = len(parts) - 1
    return [_entry(b"%c%b" % (at < last, part)) for at, part in enumerate(parts)]


def _entry(checked: bytes) -> bytes:
    return b"%c%b%b" % (VERSION, crc32(checked).to_bytes(4, "big"), checked)


def flushes_in(entries: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the flushes that entries (n, body) of a journal hold, in order."""
    parts: list[bytes] = []
    for n, body in entries:
        if body[:1] not in READABLE:
            raise LedgerTooNew(
                f"entry {n} of the ledger's journal has the format {body[0] if body else 'none'}, and this "
                f"duly reads {VERSION}: another version has written it. Upgrade duly, or start and stop the "
                "version that wrote it; nothing was changed"
            )
        checked = checked_part(n, body)
        parts.append(checked[1:])
        if not checked[0]:
            yield b"".join(parts)
            parts.clear()
    if parts:
        raise LedgerDamaged(
            "the ledger's journal ends in the middle of a flush. Restore a backup; nothing was changed"
        )


def checked_part(n: int, body: bytes) -> bytes:
    """Return the part of an entry after the checksum; raise if it is not what was written."""
    checked = body[_HEAD:]
    if not checked or crc32(checked).to_bytes(4, "big") != body[1:_HEAD]:
        raise LedgerDamaged(
            f"entry {n} of the ledger's journal is damaged: it does not match its checksum. Restore a "
            "backup; nothing was changed"
        )
    return checked
