"""What a ledger gives out: records, pages, entries, positions, refusals, and what it says of itself."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.operations import Delivery
from duly.core.units import FOREVER

NEWEST: Final = (FOREVER, b"")
"""Above every listed message."""

OLDEST: Final = (0, b"")
"""Below every listed message."""


class Record(Struct, frozen=True):
    """One message as the ledger holds it, with the times it went through."""

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


class Page(Struct, frozen=True):
    """Some messages, newest first. The next page is the one before `next`; None: that was all.

    A page may be short, or empty, and still have a next one: nothing else was found where it looked.
    """

    records: list[Record]
    next: bytes | None = None


class AgedMessage(Struct, frozen=True):
    """An old message, and those of its deliveries that have ended, if it has ended itself."""

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
    """What a stream holds: entries `first` to `last`. Empty if first > last; older ones were trimmed."""

    first: int = 1
    last: int = 0


class StreamPosition(Struct, frozen=True, gc=False):
    """A stream's last number, and how far one reader has come in it; None: they never said."""

    last: int
    cursor: int | None


class Refusal(Struct, frozen=True):
    """Why nothing happened."""

    scope: str
    id: str
    word: str
    reason: str
    at: int


class Size(Struct, frozen=True):
    """How much the ledger remembers."""

    messages: int
    deliveries: int
    bytes: int


class Description(Struct, frozen=True):
    """What a ledger is made of: its engine with its version, and the number of its schema."""

    engine: str
    schema: int
