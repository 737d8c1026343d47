"""The results of a ledger's queries: records, pages, entries, positions, refusals and its description."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Delivery
from duly.core.units import FOREVER, MS

NEWEST: Final = (FOREVER, b"")
"""Above every listed message."""

OLDEST: Final = (0, b"")
"""Below every listed message."""

TIMED: Final = (1).to_bytes(6, "big")
"""Above the keys of all ids without a time, and not above any other key."""


class Record(Struct, frozen=True):
    """A message as the ledger holds it, with its state, its answer and the times of its changes."""

    message: Message
    state: State
    answer: Answer | None
    until: int
    accepted_at: int
    moved_at: int

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the message."""
        return self.message.fingerprint

    @property
    def place(self) -> bytes:
        """Its place in `Ledger.newest`: its key, which begins with the time in its id; if the id has no time,
        with the time of its acceptance instead."""
        key = self.message.key
        return key if key >= TIMED else (self.accepted_at // MS).to_bytes(6, "big") + key[6:]


class Page(Struct, frozen=True):
    """Some messages, newest first. Pass `next` as `before` to get the next page; None: this is the last.

    A page may be short or empty and still have a next page: a query examines a limited number of messages.
    """

    records: list[Record]
    next: bytes | None = None


class AgedMessage(Struct, frozen=True):
    """An old message and, if it has ended, those of its deliveries that have ended."""

    accepted_at: int
    key: bytes
    deliveries: list[Delivery]


class StreamEntry(Struct, frozen=True):
    """One entry of a stream."""

    n: int
    body: bytes
    at: int
    key: bytes = b""


class StreamRange(Struct, frozen=True):
    """The numbers of a stream's entries, `first` to `last`; none if first > last. Older ones were trimmed."""

    first: int = 1
    last: int = 0


class StreamPosition(Struct, frozen=True, gc=False):
    """A stream's last number, and one reader's position in it; None if the reader never reported one."""

    last: int
    cursor: int | None


class Refusal(Struct, frozen=True):
    """The record of a message that was not admitted, and why."""

    scope: str
    id: str
    word: str
    reason: str
    at: int


class Size(Struct, frozen=True):
    """The size of a ledger: its messages, its deliveries and its bytes."""

    messages: int
    deliveries: int
    bytes: int


class Description(Struct, frozen=True):
    """A ledger's engine with its version, and the number of its schema."""

    engine: str
    schema: int
