"""Bugs to plant in nodes. The checkers must find every one of them."""

from __future__ import annotations

import pytest

from duly.clients.node.incoming import Incoming
from duly.clients.node.mailbox import Mailbox
from duly.clients.node.outgoing import Outgoing
from duly.core.messages import VerdictKind
from duly.core.steps import Arrived, Reply, Transmit
from duly.wire import fd
from duly.wire.fd import FdKind
from duly.wire.session import Acknowledge
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("stored")
def acknowledged_before_stored(patch: Patch) -> None:
    """The `ack` of the seed: sent when a task has come, not when it is safe."""
    offer = Incoming._offer

    def hasty(self: Incoming, event: Arrived, ack: Acknowledge) -> None:
        message = event.message
        self._mailbox.post(message.scope, FdKind.ACK, fd.encode(fd.FdAck(message.id)))
        ack()
        offer(self, event, ack)

    patch.setattr(Incoming, "_offer", hasty)


@breaks("once")
def everything_may_be_repeated(patch: Patch) -> None:
    """After a crash in the middle a handler runs again, whatever it declared."""
    patch.setattr(Incoming, "_repeatable", lambda self, message: True)


@breaks("settled")
def a_repeat_gets_no_answer(patch: Patch) -> None:
    """As the seed has it: a known id is ignored."""
    reply = Incoming._reply

    def silent(self: Incoming, effect: Reply) -> None:
        if effect.verdict.kind is not VerdictKind.DUPLICATE:
            reply(self, effect)

    patch.setattr(Incoming, "_reply", silent)


@breaks("settled")
def the_broker_is_trusted(patch: Patch) -> None:
    """What the broker has confirmed is never sent again."""

    def once(self: Outgoing, effect: Transmit) -> None:
        message = effect.message
        if message.key not in self._leaving:
            self._leaving.add(message.key)
            self._mailbox.post(message.recipient, FdKind.PENDING, message.body)

    patch.setattr(Outgoing, "_transmit", once)


@breaks("settled")
def an_answer_is_sent_once(patch: Patch) -> None:
    """Nobody keeps it until the broker has it; with a sender that asks only once it is gone."""
    the_broker_is_trusted(patch)
    patch.setattr(Mailbox, "keep", lambda self, _, username, kind, text: self.post(username, kind, text))


PLANTED = planted(
    acknowledged_before_stored, everything_may_be_repeated, a_repeat_gets_no_answer,
    the_broker_is_trusted, an_answer_is_sent_once,
)  # fmt: skip
