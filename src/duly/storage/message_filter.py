"""Filters for messages in a ledger.

A ledger has no index by recipient, state, kind or time of acceptance, since such an index would slow down
every message. The database compares row by row instead, which takes about 0.2 µs a row: docs/adr/0068.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.core.lifecycle import State
from duly.core.units import FOREVER
from duly.storage.records import Record

OPEN_STATES: Final = frozenset(state for state in State if not state.terminal)
"""The states of a message that has not ended."""


class MessageFilter(Struct, frozen=True):
    """The messages to search for; None and an empty set mean any. `since` <= accepted < `until`, in
    microseconds."""

    scope: str | None = None
    id: str | None = None
    recipient: str | None = None
    kind: str | None = None
    states: frozenset[State] = frozenset()
    since: int = 0
    until: int = FOREVER

    @property
    def lead(self) -> bytes | None:
        """The bytes that follow the time in every key of the scope."""
        return None if self.scope is None else self.scope.encode(errors="surrogatepass") + b"\0"

    @property
    def tail(self) -> bytes | None:
        """The bytes with which every key with this id ends."""
        return None if self.id is None else b"\0" + self.id.encode(errors="surrogatepass")

    @property
    def state_bits(self) -> int:
        """The states as a bit mask: bit n is set for the state with the number n; 0 means any state."""
        return sum(1 << int(state) for state in self.states)

    def fits(self, record: Record) -> bool:
        """Return whether a message matches the filter."""
        message = record.message
        return (
            self.scope in (None, message.scope)
            and self.id in (None, message.id)
            and self.recipient in (None, message.recipient)
            and self.kind in (None, message.kind)
            and (not self.states or record.state in self.states)
            and self.since <= record.accepted_at < self.until
        )


ANY_MESSAGE: Final = MessageFilter()
"""The filter that matches every message."""
