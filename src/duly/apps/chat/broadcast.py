"""Broadcast: sends presence, typing and receipts, which are not stored, to the people who are connected.

The law: these messages may be lost, and nothing depends on them; anything that must not be lost is a line.
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
"""In larger groups receipts are not broadcast; clients ask for them."""


class Broadcast:
    """Sends to the connections of one hub's chat."""

    def __init__(self, ledger: Ledger, connections: Connections) -> None:
        self._ledger = ledger
        self._connections = connections

    async def presence(self, name: str, data: Raw) -> list[str]:
        """Send a person's presence to the friends connected here; return those friends."""
        friends = await self._ledger.bucket(c.friends(name))
        here = [friend for friend in friends if self._connections.of_person(friend)]
        self.presence_to(here, name, data)
        return here

    def presence_to(self, friends: Iterable[str], name: str, data: Raw) -> None:
        """Send a person's presence to these friends."""
        frame = PresenceFrame(name, data)
        for friend in friends:
            for subscriber in self._connections.of_person(friend):
                subscriber.pass_on(frame)

    def typing(self, typing: TypingFrame) -> None:
        """Tell the others in a conversation that a person is typing."""
        for subscriber in self._connections.in_conversation(typing.conv):
            if subscriber.who.name != typing.from_:
                subscriber.pass_on(typing)

    def receipts(self, conv: str, readers: Iterable[tuple[str, int]]) -> None:
        """Tell the others in a conversation how far readers have come."""
        if conv.startswith("~") or self._connections.count(conv) > RECEIPTS_LIMIT:
            return
        subscribers = self._connections.in_conversation(conv)
        for reader, n in readers:
            name = reader.removeprefix("r:")
            receipt = ReceiptFrame(name, conv, n, {"state": "read" if reader != name else "delivered"})
            for subscriber in subscribers:
                # the reader's own other devices are told as well
                if subscriber.who.name != name or reader != name:
                    subscriber.pass_on(receipt)
