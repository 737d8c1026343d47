"""The invariants of a ledger, and what to do where one is violated.

`duly check` verifies each of them. A violation is a bug in duly or damage to the database: no input and no
crash causes one.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

_RESTORE: Final = "restore a backup ('duly restore'), and report it"
_REPORT: Final = "report it, with 'duly export' of the rows that are named"


class Invariant(Struct, frozen=True):
    """A statement that is true of every ledger."""

    name: str
    sentence: str
    advice: str


class BrokenInvariant(Struct, frozen=True):
    """An invariant that does not hold, and where."""

    invariant: str
    detail: str


KERNEL: Final = (
    Invariant("file-sound", "the database is whole: its pages, checksums and indexes are sound", _RESTORE),
    Invariant("column-types", "every value has the type of its column", _RESTORE),
    Invariant("journal-readable", "every row of the journal has its version and its checksum", _RESTORE),
    Invariant("journal-sequence", "the rows of the journal are numbered without gaps", _RESTORE),
    Invariant("one-outcome", "an id of a sender has one row, and so one outcome", _RESTORE),
    Invariant("message-key", "the key of a message is its sender, its id and the time in that id", _RESTORE),
    Invariant("message-readable", "a message has a known state, a valid order and valid times", _RESTORE),
    Invariant("message-fingerprint", "the fingerprint of a message is that of its content", _RESTORE),
    Invariant(
        "answer-readable", "an answer can be read, and only a message that has ended has one", _RESTORE
    ),
    Invariant("delivery-message", "every delivery belongs to a message", _REPORT),
    Invariant(
        "delivery-readable", "a delivery has a known state and kind; one under way has an attempt", _RESTORE
    ),
    Invariant(
        "delivery-ended",
        "a message that has ended has no first delivery that is still open",
        "restart the hub, which ends it; if it stays, report it",
    ),
    Invariant(
        "mark-readable", "the name of a high-water mark is a recipient, an order key and a sender", _RESTORE
    ),
    Invariant("mark-reached", "no message has started that is later than the mark of its lane", _REPORT),
    Invariant("stream-last", "every entry has a stream whose last number is not below its own", _RESTORE),
    Invariant("stream-order", "the entries of a stream are numbered upwards, without gaps", _RESTORE),
    Invariant("cursor-reached", "no reader has come further than its stream", _RESTORE),
    Invariant("floor-one", "there is one floor, and its numbers agree with each other", _RESTORE),
    Invariant("refusals-kept", "a refusal has a word and a time, and no more are kept than may be", _REPORT),
)
"""The invariants of every ledger: of a hub, a device, a node, a sentinel or a program that uses `once`."""
