"""The changes of accounts and grants: how a hub stores its own, and how it finds those of the others.

The laws. The version of the accounts is one row, which every change writes. A change is made at a version:
it is stored only if the row still has this version, together with a note of the version before, the version
after, and the names of what was changed. So the ledger stores changes one after the other, and no change
without its note. An unbroken chain of notes from the version that a hub has read to the present one names
everything that it has to read. Where the chain is broken (a hub of an older version wrote, or there were more
changes than notes), the hub reads everything.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.operations import CheckItem, PutItem, PutNewItem, Write

VERSIONS: Final = "versions"
"""A bucket whose items change together with what they are named after: one read shows whether to read it
again."""
ACCOUNTS_VERSION: Final = (VERSIONS, "accounts")
NOTES: Final = "account changes"
"""The bucket of notes; their names are used again and again."""
KEPT: Final = 2_000
"""How many notes there are: a hub that is further behind reads everything."""
MOST: Final = 1_000
"""How many names a note has at most; beyond that, other hubs read everything."""
_RANDOM: Final = 8
_NUMBER: Final = 8


class Note(Struct, frozen=True):
    """What one change has changed."""

    before: bytes
    """the version at which it was made; empty for the first one"""
    after: bytes
    """the version that it made"""
    names: list[str] | None
    """accounts, and grants as `grant_name` names them; None if there are too many"""


_decode: Final = msgspec.json.Decoder(Note).decode


def new_version(before: bytes | None) -> bytes:
    """Return a version to follow this one: random, and numbered for the names of notes."""
    return secrets.token_bytes(_RANDOM) + (_number(before) + 1).to_bytes(_NUMBER, "big")


def unrelated_version() -> bytes:
    """Return a version without a note: every hub reads everything."""
    return secrets.token_bytes(_RANDOM)


def noted(before: bytes | None, after: bytes, names: Collection[str], writes: Sequence[Write]) -> Write:
    """Return the operation that stores a change with its note, if the version still is the one before."""
    note = Note(before or b"", after, sorted(names) if len(names) <= MOST else None)
    put = PutItem(NOTES, _slot(_number(after)), msgspec.json.encode(note))
    if before is None:
        return PutNewItem(*ACCOUNTS_VERSION, after, then=(put, *writes))
    return CheckItem(*ACCOUNTS_VERSION, before, then=(PutItem(*ACCOUNTS_VERSION, after), put, *writes))


def notes_between(seen: bytes | None, now: bytes | None) -> list[tuple[str, str]]:
    """Return where the notes are that lead from one version to another; empty if there are none."""
    first, last = _number(seen) + 1, _number(now)
    if not 0 <= last - first < KEPT:
        return []
    return [(NOTES, _slot(n)) for n in range(first, last + 1)]


def changed_between(seen: bytes | None, now: bytes | None, notes: Sequence[bytes | None]) -> set[str] | None:
    """Return the names of what was changed between two versions, by the notes that lead from one to the
    other; None if they do not."""
    at, changed = seen or b"", set[str]()
    try:
        for body in notes:
            note = _decode(body or b"")
            if note.before != at or note.names is None:
                return None
            at = note.after
            changed.update(note.names)
    except msgspec.DecodeError:
        return None
    return changed if at == (now or b"") else None


def _number(version: bytes | None) -> int:
    """Return how many changes have been noted one after the other up to this version; 0 if an older hub wrote
    it."""
    if version is None or len(version) != _RANDOM + _NUMBER:
        return 0
    return int.from_bytes(version[_RANDOM:], "big")


def _slot(number: int) -> str:
    return str(number % KEPT)
