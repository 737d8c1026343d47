"""Broadcast: tells the people who are connected what is kept nowhere: presence, typing and receipts.

The law: what is told here may be lost, and nothing depends on it; what must not be lost is a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Raw

from duly.apps.chat import conversations as c
from duly.apps.chat.connections import Connections
from duly.storage.ledger import Ledger
from duly.wire.outgoing import PresenceFrame, ReceiptFrame, TypingFrame

RECEIPTS_LIMIT: Final = 50
"""In larger groups receipts are not told one by one: ask."""


class Broadcast:
    """Tells the connections to one hub's chat."""

    def __init__(self, ledger: Ledger, connections: Connections) -> None:
        self._ledger = ledger
        self._connections = connections

    async def presence(self, name: str, data: Raw) -> list[str]:
        """Tell friends who are here how a person is present; returns them."""
        friends = await self._ledger.bucket(c.friends(name))
        here = [friend for friend in friends if self._connections.of_person(friend)]
        self.presence_to(here, name, data)
        return here

    def presence_to(self, friends: Iterable[str], name: str, data: Raw) -> None:
        """Tell these friends how a person is present."""
        frame = PresenceFrame(name, data)
        for friend in friends:
            for subscriber in self._connections.of_person(friend):
                subscriber.pass_on(frame)

    def typing(self, typing: TypingFrame) -> None:
        """Tell the others in a conversation that a person is typing."""
        for subscriber in self._connections.in_conversation(typing.conv):
            if subscriber.who.name != typing.from_:
                subscriber.pass_on(typing)

    def receipt(self, conv: str, reader: str, n: int) -> None:
        """Tell the others in a conversation how far a reader has come."""
        name = reader.removeprefix("r:")
        subscribers = self._connections.in_conversation(conv)
        if conv.startswith("~") or len(subscribers) > RECEIPTS_LIMIT:
            return
        receipt = ReceiptFrame(name, conv, n, {"state": "read" if reader != name else "delivered"})
        for subscriber in subscribers:
            if subscriber.who.name != name or reader != name:  # one's own other devices know what was read
                subscriber.pass_on(receipt)
