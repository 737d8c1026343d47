"""The rows that a transaction has locked, with the changes that operations have made to them so far.

A ledger that several processes write reads the rows of a flush's footprint under a lock, lets
`duly.storage.interpreter` carry out the operations on them, and writes back the rows that changed.
"""

from __future__ import annotations

from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.core.trusted_time import Floor
from duly.storage.interpreter import earliest

K = TypeVar("K")
V = TypeVar("V")

UNREAD: Final = Floor()
"""Stands for a floor that was not read, because the flush admits no message."""


class LockedMessage(Struct, frozen=True, gc=False):
    """The parts of a locked message that the interpreter reads and changes."""

    fingerprint: bytes
    state: State
    answer: Answer | None = None
    moved_at: int | None = None
    """when this flush moved the message; None if it did not"""
    admit: w.Admit | None = None
    """the admission, if this flush admitted the message"""


class LockedRows:
    """The rows that a transaction has locked, with the changes that operations have made to them so far.

    It implements `duly.storage.interpreter.Rows` for the rows of the footprint, and holds no others.
    """

    def __init__(self) -> None:
        self.floor = UNREAD
        self.messages: dict[bytes, LockedMessage] = {}
        self.withdrawn: set[bytes] = set()
        self.lasts: dict[str, int] = {}
        self.cursors: dict[tuple[str, str], int] = {}
        self.marks: dict[str, tuple[int, int]] = {}
        self.items: dict[tuple[str, str], bytes] = {}
        self.dropped: set[tuple[str, str]] = set()
        self.appended: dict[tuple[str, int], w.AppendEntry] = {}
        self.bodies: dict[tuple[str, int], bytes] = {}
        """the bodies of the entries that may be rewritten"""
        self.refusals: list[w.RecordRefusal] = []
        self.deliveries: dict[w.DeliveryNames, w.Delivery] = {}
        self.discarded: set[w.DeliveryNames] = set()
        """deliveries that have ended and need not be kept; `deliveries` has their last state"""

    def message(self, key: bytes) -> LockedMessage | None:
        """Return a message, if it is stored."""
        return self.messages.get(key)

    def admit(self, admit: w.Admit) -> None:
        """Add a message that is admitted."""
        self.messages[admit.message.key] = LockedMessage(admit.message.fingerprint, admit.state, admit=admit)

    def move(self, key: bytes, to: State, answer: Answer | None, at: int) -> None:
        """Put a message into another state."""
        row = self.messages[key]
        self.messages[key] = LockedMessage(row.fingerprint, to, answer, at, row.admit)

    def withdraw(self, key: bytes) -> None:
        """Remove a message and its deliveries."""
        del self.messages[key]
        for names in [names for names in self.deliveries if names[0] == key]:
            del self.deliveries[names]
        self.withdrawn.add(key)

    def delivery(self, ref: w.DeliveryRef) -> w.Delivery | None:
        """Return a delivery."""
        return self.deliveries.get((ref.key, ref.channel, ref.recipient, ref.round))

    def put_delivery(self, delivery: w.Delivery) -> None:
        """Add or replace a delivery."""
        ref = delivery.ref
        self.deliveries[ref.key, ref.channel, ref.recipient, ref.round] = delivery

    def discard_delivery(self, ended: w.Delivery) -> None:
        """Replace a delivery by its ended state, and mark it as one that need not be kept."""
        self.put_delivery(ended)
        ref = ended.ref
        self.discarded.add((ref.key, ref.channel, ref.recipient, ref.round))

    def due(self, channel: str, now: int, limit: int) -> list[w.Delivery]:
        """Return the deliveries that a claim takes."""
        return earliest(self.deliveries.values(), channel, now, limit)

    def last(self, stream: str) -> int:
        """Return the number of a stream's last entry."""
        return self.lasts.get(stream, 0)

    def append(self, n: int, entry: w.AppendEntry) -> None:
        """Add an entry under its number."""
        self.lasts[entry.stream] = n
        self.appended[entry.stream, n] = entry

    def entry_body(self, stream: str, n: int) -> bytes | None:
        """Return the body of an entry."""
        new = self.appended.get((stream, n))
        return self.bodies.get((stream, n)) if new is None else new.body

    def rewrite(self, stream: str, n: int, body: bytes) -> None:
        """Replace the body of an entry."""
        new = self.appended.get((stream, n))
        if new is None:
            self.bodies[stream, n] = body
        else:
            self.appended[stream, n] = replace(new, body=body)

    def cursor(self, stream: str, reader: str) -> int:
        """Return the position of a reader in a stream."""
        return self.cursors.get((stream, reader), 0)

    def put_cursor(self, stream: str, reader: str, n: int) -> None:
        """Set the position of a reader in a stream."""
        self.cursors[stream, reader] = n

    def mark(self, name: str) -> tuple[int, int] | None:
        """Return a high-water mark."""
        return self.marks.get(name)

    def put_mark(self, name: str, n: int, ms: int) -> None:
        """Change a high-water mark."""
        self.marks[name] = (n, ms)

    def item(self, bucket: str, name: str) -> bytes | None:
        """Return an item."""
        return self.items.get((bucket, name))

    def put_item(self, bucket: str, name: str, body: bytes) -> None:
        """Add or replace an item."""
        self.items[bucket, name] = body
        self.dropped.discard((bucket, name))

    def drop_item(self, bucket: str, name: str) -> None:
        """Remove an item."""
        del self.items[bucket, name]
        self.dropped.add((bucket, name))

    def refuse(self, refusal: w.RecordRefusal) -> None:
        """Record a refusal."""
        self.refusals.append(refusal)


def changes_of(before: dict[K, V], after: dict[K, V]) -> tuple[list[tuple[K, V]], list[tuple[K, V]]]:
    """Return the new entries, sorted by key, and the changed entries."""
    new = sorted((key, value) for key, value in after.items() if key not in before)
    return new, [(key, value) for key, value in after.items() if before.get(key, value) != value]
