"""Unaddressed acks: which command an `ack` without `to` answers.

The law: such an ack counts only if exactly one command with its `seq_id` is under way to that device, or
ended as unknown a short while ago. An id is unique within its sender only, so of two candidates none is
chosen.

Most devices say whom they answer. Commands are noted here only for those that once did not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from duly.core.lifecycle import State
from duly.core.messages import Message, names_in

KEPT: Final = 1_000
"""Ids of one device."""


class UnaddressedAcks:
    """Finds the command that an ack without `to` answers, for one gateway."""

    def __init__(self) -> None:
        self.scopes: dict[str, OrderedDict[str, set[str]]] = {}
        """by device and id: whose commands; empty while every device says whom it answers"""

    def knows(self, device: str) -> bool:
        """Whether the commands of this device are noted."""
        return device in self.scopes

    def learn(self, device: str, under_way: Iterable[Message]) -> None:
        """A device does not say which app it answers: what is under way to it is noted, and what follows."""
        self.scopes[device] = OrderedDict()
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
        if ids is None or state is State.UNKNOWN:
            return
        scope, id_ = names_in(key)
        scopes = ids.get(id_, set())
        scopes.discard(scope)
        if not scopes:
            ids.pop(id_, None)

    def find(self, device: str, id: str) -> list[str]:
        """The apps whose command this id could be."""
        ids = self.scopes.get(device)
        return [] if ids is None else sorted(ids.get(id, ()))
