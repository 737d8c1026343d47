"""Critical events that cannot be stored here, and go to the tower all the same.

The laws. Only a critical event goes out unstored, when it is due, and with the same bytes each time: what is
stored and sent later is a duplicate to the tower. Once the tower has answered, it is not sent again until it
is stored. What a person has called off in time, or what has settled in time, stays here.
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
        """Return an event as it went out; None: it did not."""
        return self._sent.get(key)

    def failed(self, message: Message, origin: Origin = None) -> tuple[Effect, ...]:
        """Return what follows if the step that lets this message go cannot be stored."""
        return (MachineEffect(UnstoredEvent(message, origin)),) if is_critical(message) else ()

    def withhold(self, key: bytes) -> None:
        """Keep an event here that has not gone out: it was called off, or has settled."""
        if key not in self._sent:
            self._withheld.add(key)

    def may_go(self, message: Message) -> bool:
        """Whether the tower should get this event now."""
        return message.key not in self._withheld and message.key not in self._answered

    def sent(self, message: Message) -> None:
        """Note that an event went out."""
        self._sent[message.key] = message

    def answered(self, key: bytes) -> bool:
        """Note the tower's answer; return whether it is about an event that went out unstored."""
        if key in self._sent:
            self._answered.add(key)
        return key in self._sent

    def forget(self, key: bytes) -> None:
        """Forget an event that has ended."""
        self._sent.pop(key, None)
        self._answered.discard(key)

    def judge_again(self) -> None:
        """Forget what is withheld: everything that was said since is handled again."""
        self._withheld.clear()


def is_critical(message: Message) -> bool:
    """Whether a message is an event of the highest severity."""
    return message.kind == EVENT and read_event(message.body).severity is Severity.CRITICAL
