"""Replays a journal: converts its entries to changes of the tables.

A ledger that was killed under an older duly may hold entries of the previous format, a list of numbered
changes in order. They are read as well; the next flush writes the current format.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

import msgspec

from duly.core.operations import Delivery
from duly.errors import LedgerDamaged
from duly.storage.sql import rows
from duly.storage.sqlite.journal_format import checked_part, flushes_in
from duly.storage.sqlite.table_rows import Row, TableChanges

OLD_VERSION: Final = 1
_OLD_HEAD: Final = bytes((OLD_VERSION,))
_decode_old: Final = msgspec.msgpack.Decoder(list[list[object]]).decode


def replay(entries: Iterable[tuple[int, bytes]]) -> TableChanges:
    """Return the changes in the entries (n, body) of a journal, each row once. Raises if an entry cannot be
    read."""
    changes = TableChanges()
    for old, some in groupby(entries, key=lambda entry: entry[1][:1] == _OLD_HEAD):
        if old:
            for n, body in some:
                for change in _decode_old(checked_part(n, body)):
                    _add_old(changes, n, change)
        else:
            for flush in flushes_in(some):
                changes.update(TableChanges.unpack(flush))
    return changes


def _add_old(changes: TableChanges, n: int, change: Row) -> None:
    match change:
        case (0, row, state):
            changes.messages[row[0]] = row
            changes.states[row[0]] = (state, row[5], None)
        case (1, key, *state):
            changes.states[key] = state
        case (2, key):
            changes.withdraw(key)
        case (3, packed):
            delivery = msgspec.convert(packed, Delivery)
            changes.deliveries[rows.names(delivery.ref)] = delivery
        case (4, stream, number, *rest):
            changes.lasts[stream] = number
            changes.entries[stream, number] = rest
        case (5, stream, number, body):
            changes.rewrite(stream, number, body)
        case (6, stream, reader, number):
            changes.cursors[stream, reader] = number
        case (7, mark, number, ms):
            changes.marks[mark] = (number, ms)
        case (8, bucket, name, body):
            changes.items[bucket, name] = body
        case (9, *refusal):
            changes.refusals.append(refusal)
        case _:
            raise LedgerDamaged(
                f"entry {n} of the ledger's journal holds a change of an unknown kind. Restore a backup; "
                "nothing was changed"
            )
