"""Unaddressed acks: finds the command that an `ack` without `to` answers.

The law: such an ack counts only if exactly one command with its `seq_id` is under way to that device, or
ended as unknown a short while ago. An id is unique only within its sender, so if there are two candidates,
none is chosen.

Most devices name the app that they answer. Commands are noted here only for devices that once did not, and
commands that ended as unknown for every device: the first ack of a slow device may be a late one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from duly.core.lifecycle import State
from duly.core.messages import Message, names_in

KEPT: Final = 1_000
"""How many ids are kept per device."""
KEPT_UNKNOWN: Final = 10_000
"""How many commands that ended as unknown are kept, over all devices."""


class UnaddressedAcks:
    """Finds the command that an ack without `to` answers, for one gateway."""

    def __init__(self) -> None:
        self.scopes: dict[str, OrderedDict[str, set[str]]] = {}
        """by device and id: the apps whose commands they are; empty while every device names the app it
        answers"""
        self.unknown: OrderedDict[bytes, str] = OrderedDict()
        """by key: the device of a command that ended as unknown, while that device's commands are not
        noted"""

    def knows(self, device: str) -> bool:
        """Return whether the commands of this device are noted."""
        return device in self.scopes

    def learn(self, device: str, under_way: Iterable[Message]) -> None:
        """Note from now on the commands of a device that does not name the app it answers, including those
        under way and those that ended as unknown."""
        ids = self.scopes[device] = OrderedDict()
        for key in [key for key, its_device in self.unknown.items() if its_device == device]:
            del self.unknown[key]
            scope, id_ = names_in(key)
            ids.setdefault(id_, set()).add(scope)
        for message in under_way:
            self.began(message)

    def began(self, message: Message) -> None:
        """Note that a command was sent to its device."""
        ids = self.scopes.get(message.recipient)
        if ids is not None:
            ids.setdefault(message.id, set()).add(message.scope)
            if len(ids) > KEPT:
                ids.popitem(last=False)

    def ended(self, key: bytes, device: str, state: State) -> None:
        """Forget a command that has ended; one that ended as unknown is kept, since a late answer may still
        settle it."""
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
        """Keep a command that ended as unknown for a device that has always named the app it answers."""
        if state is not State.UNKNOWN:
            self.unknown.pop(key, None)
            return
        self.unknown[key] = device
        if len(self.unknown) > KEPT_UNKNOWN:
            self.unknown.popitem(last=False)

    def find(self, device: str, id: str) -> list[str]:
        """Return the apps whose command this id could be."""
        ids = self.scopes.get(device)
        return [] if ids is None else sorted(ids.get(id, ()))
