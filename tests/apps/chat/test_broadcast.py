"""Receipts go to the others in a conversation; in a large group nobody is asked for."""

from __future__ import annotations

import pytest

from duly.apps.chat.broadcast import RECEIPTS_LIMIT, Broadcast
from duly.apps.chat.connections import Connections
from duly.identity.accounts import Principal, Role
from duly.storage.memory import MemoryLedger
from duly.wire.outgoing import OutgoingFrame, ReceiptFrame
from duly.wire.session import UncongestedSession

GROUP = "#team"


class ReceiptSocket(UncongestedSession):
    """A connection that remembers the receipts that were pushed to it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, str]] = []

    def push(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, ReceiptFrame)
        self.told.append((frame.from_, frame.n, frame.data["state"]))

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


def present(connections: Connections, *names: str) -> list[ReceiptSocket]:
    """Connect people, each in the group."""
    sockets = [ReceiptSocket() for _ in names]
    for name, socket in zip(names, sockets, strict=True):
        subscriber = connections.add(socket, Principal(name, Role.USER))
        connections.subscribe(subscriber, GROUP, told=9, head=9)
        subscriber.greeted()
    return sockets


def test_the_receipts_of_a_commit_go_to_the_others_in_their_order() -> None:
    connections = Connections()
    ann, bob, desk = present(connections, "ann", "bob", "bob")
    broadcast = Broadcast(MemoryLedger(), connections)
    broadcast.receipts(GROUP, [("bob", 3), ("r:bob", 2), ("ann", 1)])
    assert ann.told == [("bob", 3, "delivered"), ("bob", 2, "read")]
    assert bob.told == desk.told == [("bob", 2, "read"), ("ann", 1, "delivered")]


def test_the_members_of_a_large_group_are_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections()
    sockets = present(connections, *(f"u{i}" for i in range(RECEIPTS_LIMIT + 1)))

    def gone_through(conv: str) -> list[object]:
        raise AssertionError(f"the members of {conv} are gone through for a receipt that is not sent")

    monkeypatch.setattr(connections, "in_conversation", gone_through)
    Broadcast(MemoryLedger(), connections).receipts(GROUP, [("u1", 3)])
    assert not any(socket.told for socket in sockets)
