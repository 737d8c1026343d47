"""Unaddressed acks: which command an `ack` without `to` answers.

The law: such an ack counts only if exactly one command with its `seq_id` is under way to that device, or
ended as unknown a short while ago. An id is unique within its sender only, so of two candidates none is
chosen.

Most devices say whom they answer. Commands are noted here only for those that once did not, and, for every
device, what ended as unknown: the first ack of a slow device may be a late one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from duly.core.lifecycle import State
from duly.core.messages import Message, names_in

KEPT: Final = 1_000
"""Ids of one device."""
KEPT_UNKNOWN: Final = 10_000
"""Commands of all devices that ended as unknown."""


class UnaddressedAcks:
    """Finds the command that an ack without `to` answers, for one gateway."""

    def __init__(self) -> None:
        self.scopes: dict[str, OrderedDict[str, set[str]]] = {}
        """by device and id: whose commands; empty while every device says whom it answers"""
        self.unknown: OrderedDict[bytes, str] = OrderedDict()
        """by key: the device of a command that ended as unknown, while that device's are not noted"""

    def knows(self, device: str) -> bool:
        """Whether the commands of this device are noted."""
        return device in self.scopes

    def learn(self, device: str, under_way: Iterable[Message]) -> None:
        """A device does not say which app it answers: what is under way to it or ended as unknown is
        noted, and what follows."""
        ids = self.scopes[device] = OrderedDict()
        for key in [key for key, its_device in self.unknown.items() if its_device == device]:
            del self.unknown[key]
            scope, id_ = names_in(key)
            ids.setdefault(id_, set()).add(scope)
        for message in under_way:
            self.began(message)

    def began(self, message: Message) -> None:
        """A command was sent to its device."""
        ids = self.scopes.get(message.recipient)
        if ids is not None:
            ids.setdefault(message.id, set()).add(message.scope)
            if len(ids) > KEPT:
                ids.popitem(last=False)

    def ended(self, key: bytes, device: str, state: State) -> None:
        """A command has ended; one that ended as unknown is kept, since a late answer may still settle it."""
        ids = self.scopes.get(device)
        if ids is None:
            self._note_unknown(key, device, state)
            return
        if state is State.UNKNOWN:
            return
        scope, id_ = names_in(key)
        scopes = ids.get(id_, set())
        scopes.discard(scope)
        if not scopes:
            ids.pop(id_, None)

    def _note_unknown(self, key: bytes, device: str, state: State) -> None:
        """Keep what ended as unknown for a device that has said of each command so far whom it answers."""
        if state is not State.UNKNOWN:
            self.unknown.pop(key, None)
            return
        self.unknown[key] = device
        if len(self.unknown) > KEPT_UNKNOWN:
            self.unknown.popitem(last=False)

    def find(self, device: str, id: str) -> list[str]:
        """The apps whose command this id could be."""
        ids = self.scopes.get(device)
        return [] if ids is None else sorted(ids.get(id, ()))
