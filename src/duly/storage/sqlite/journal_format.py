"""The journal of a SQLite ledger: what was committed, and is not in the tables yet.

A flush is one entry of the table `journal`: the rows that it has changed, as they stand after it
(`duly.storage.sqlite.tables`). They are rows and not operations, so replaying them asks nothing and decides
nothing. In front stand a byte with the version of this format and the checksum of all that follows: a byte
that says whether the next entry goes on with the same flush, and the rows. What cannot be read is refused,
with a sentence; it is never skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final
from zlib import crc32

from duly.errors import LedgerDamaged, LedgerTooNew

VERSION: Final = 2
ENTRY_BYTES: Final = 64 << 20
"""Most bytes of one entry, so that none is too large for SQLite; a larger flush has several."""
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
        if body[:1] != bytes((VERSION,)):
            raise LedgerTooNew(
                f"entry {n} of the ledger's journal has the format {body[0] if body else 'none'}, and this "
                f"duly reads {VERSION}: another one has written it. Upgrade duly, or start and stop the one "
                "that wrote it; nothing was changed"
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
    """Return what follows the checksum of an entry; raises if it is not what was written."""
    checked = body[_HEAD:]
    if not checked or crc32(checked).to_bytes(4, "big") != body[1:_HEAD]:
        raise LedgerDamaged(
            f"entry {n} of the ledger's journal is damaged: it does not have its checksum. Restore a "
            "backup; nothing was changed"
        )
    return checked
