"""Critical events that cannot be stored locally and are sent to the tower anyway.

The laws. Only a critical event is sent unstored, when it is due, and always with the same bytes, so that the
tower recognises a later copy as a duplicate. The ledger may have an earlier form, since the event was dated
or updated in the commit that failed: then the form that was sent takes its place. Once the tower has
answered, the event is not sent again until it is stored. An event that was cancelled or has settled in time
is not sent.
"""

from __future__ import annotations

from msgspec import Struct

from duly.core.messages import Message
from duly.core.monitor.signals import EVENT, Severity, read_event
from duly.core.steps import Effect, MachineEffect, Origin


class UnstoredEvent(Struct, frozen=True):
    """A critical event is due and could not be stored; `origin` is that of its signal."""

    message: Message
    origin: Origin = None


class UnstoredEvents:
    """The critical events of one sentinel that went out before they were stored, and have not ended."""

    def __init__(self) -> None:
        self._sent: dict[bytes, Message] = {}
        self._answered: set[bytes] = set()
        self._withheld: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sent

    def get(self, key: bytes) -> Message | None:
        """Return an event as it was sent, or None if it was not."""
        return self._sent.get(key)

    def failed(self, message: Message, origin: Origin = None) -> tuple[Effect, ...]:
        """Return what to do if the step that sends this message cannot be stored."""
        return (MachineEffect(UnstoredEvent(message, origin)),) if is_critical(message) else ()

    def withhold(self, key: bytes) -> None:
        """Do not send this event: it was cancelled or has settled."""
        if key not in self._sent:
            self._withheld.add(key)

    def may_go(self, message: Message) -> bool:
        """Return whether to send this event to the tower now."""
        return message.key not in self._withheld and message.key not in self._answered

    def sent(self, message: Message) -> Message:
        """Note that an event is sent; return the form to send, which is that of the first time."""
        return self._sent.setdefault(message.key, message)

    def answered(self, key: bytes) -> bool:
        """Note the tower's answer; return whether it is about an event that was sent unstored."""
        if key in self._sent:
            self._answered.add(key)
        return key in self._sent

    def forget(self, key: bytes) -> None:
        """Forget an event that has ended."""
        self._sent.pop(key, None)
        self._answered.discard(key)

    def judge_again(self) -> None:
        """Stop withholding events: everything reported since is handled again."""
        self._withheld.clear()


def is_critical(message: Message) -> bool:
    """Return whether a message is a critical event."""
    return message.kind == EVENT and read_event(message.body).severity is Severity.CRITICAL
