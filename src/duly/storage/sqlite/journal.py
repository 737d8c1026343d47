"""The journal of a SQLite ledger: what was committed, and is not in the tables yet.

A flush is one row of the table `journal`: the changes it makes to rows, in order, as msgpack. They are
changes and not operations, so replaying them asks nothing and decides nothing: `admit` is the new row, `move`
the state it has now. In front stand a byte with the version of this format and a checksum. What cannot be
read is refused, with a sentence; it is never skipped.

A change is a tuple that begins with its number below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias
from zlib import crc32

import msgspec

from duly.errors import LedgerDamaged, LedgerTooNew

Row: TypeAlias = Sequence[Any]
"""The columns of a row, or some of them."""
Change: TypeAlias = Row

ADMIT: Final = 0
"""the columns of a message that never change (`duly.storage.sql.rows`), its state"""
MOVE: Final = 1
"""key, state, moved_at, answer as bytes or None"""
WITHDRAW: Final = 2
"""key"""
DELIVERY: Final = 3
"""the delivery"""
APPEND: Final = 4
"""stream, n, body, at, key"""
REWRITE: Final = 5
"""stream, n, body"""
CURSOR: Final = 6
"""stream, reader, n"""
MARK: Final = 7
"""mark, n, ms"""
ITEM: Final = 8
"""bucket, name, body; None: there is none any more"""
REFUSE: Final = 9
"""scope, id, word, reason, at"""

VERSION: Final = 1
CHANGES_A_ROW: Final = 1_000
"""Most changes in one row, so that none is too large for SQLite; a larger flush has several rows."""
_HEAD: Final = 5

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode


def bodies_of(changes: Sequence[Change]) -> list[bytes]:
    """Return the bodies of the journal's rows that hold these changes. Raises if a value cannot be held."""
    if len(changes) <= CHANGES_A_ROW:
        return [_body(changes)]
    return [_body(changes[at : at + CHANGES_A_ROW]) for at in range(0, len(changes), CHANGES_A_ROW)]


def _body(changes: Sequence[Change]) -> bytes:
    packed = _encode(changes)
    return b"%c%b%b" % (VERSION, crc32(packed).to_bytes(4, "big"), packed)


def changes_in(rows: Iterable[tuple[int, bytes]]) -> list[Change]:
    """Return the changes that rows (n, body) of a journal hold, in order."""
    changes: list[Change] = []
    for n, body in rows:
        if body[:1] != bytes((VERSION,)):
            raise LedgerTooNew(
                f"entry {n} of the ledger's journal has the format {body[0] if body else 'none'}, and this "
                f"duly reads {VERSION}: a newer one has written it. Upgrade duly; nothing was changed"
            )
        packed = body[_HEAD:]
        if crc32(packed).to_bytes(4, "big") != body[1:_HEAD]:
            raise LedgerDamaged(
                f"entry {n} of the ledger's journal is damaged: it does not have its checksum. Restore a "
                "backup; nothing was changed"
            )
        changes += _decode(packed)
    return changes
