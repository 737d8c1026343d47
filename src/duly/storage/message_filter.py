"""Which messages are looked for in a ledger.

A ledger has no index by recipient, state, kind or time of acceptance, since every message would have to pay
for it. Its database compares row by row instead, which takes about 0.2 µs a row: docs/adr/0068.
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
    """What is looked for; None and an empty set stand for any. `since` <= accepted < `until`, in
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
        """How a key of the scope goes on behind its time."""
        return None if self.scope is None else self.scope.encode(errors="surrogatepass") + b"\0"

    @property
    def tail(self) -> bytes | None:
        """How a key with the id ends."""
        return None if self.id is None else b"\0" + self.id.encode(errors="surrogatepass")

    @property
    def state_bits(self) -> int:
        """The states as a number: bit n is the state with the number n. 0 stands for any."""
        return sum(1 << int(state) for state in self.states)

    def fits(self, record: Record) -> bool:
        """Whether a message is one that is looked for."""
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
"""Nothing is asked for in particular."""
