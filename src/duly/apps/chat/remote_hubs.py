"""Elsewhere: what a chat does because the people it talks to may be at other hubs on its ledger.

The laws. A line is stored, then rung for; whoever hears it looks into the ledger, and would have looked there
anyway a second later, or five for a conversation that is new (a few more, where there are very many). What
passes and is kept nowhere, typing and presence, travels with the ring itself: if it is lost, it is lost.
Receipts are in between: the ring says whose, the ledger how far.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw

from duly.apps.chat import conversations as c
from duly.apps.chat.subscriptions import Subscriptions
from duly.cluster.notifier import HintSender
from duly.errors import LedgerError, Stopped
from duly.storage.ledger import Ledger
from duly.wire.outgoing import TypingFrame

LINE: Final = "line"
"""Something was said in this conversation."""
PERSON: Final = "person"
"""They may be in more conversations than before."""
READER: Final = "reader"
"""They have come further: [conversation, reader]."""
TYPING: Final = "typing"
PRESENCE: Final = "presence"
PASSING_BYTES: Final = 1_000
"""What passes is short, or stays here."""
PEOPLE_EVERY: Final = 5
"""Looks between two looks for conversations that are new to somebody."""
CONVS_LOOKED_AT: Final = 20_000
"""Conversations of one look; where there are more, they take turns."""


class PersonPresence(msgspec.Struct, frozen=True, array_like=True):
    name: str
    data: str
    answered: bool = False
    """it answers somebody else's, and is not answered itself"""


class PresenceData(msgspec.Struct, frozen=True):
    """What a person's presence says: of its fields only whether they are online means something here."""

    online: bool | None = None


def online_in(data: Raw) -> bool | None:
    """Whether a presence says that the person is online; None if it does not say.

    >>> online_in(Raw(b'{"online":true,"note":"false"}')), online_in(Raw(b'"false"'))
    (True, None)
    """
    try:
        return _decode_presence_data(data).online
    except msgspec.DecodeError:
        return None


_decode_presence_data: Final = msgspec.json.Decoder(PresenceData).decode
_typing: Final = msgspec.json.Decoder(TypingFrame).decode
_pair: Final = msgspec.json.Decoder(tuple[str, str]).decode
_presence: Final = msgspec.json.Decoder(PersonPresence).decode
_encode: Final = msgspec.json.Encoder().encode


class ChatRemoteHubs:
    """Of one hub's chat. `reached` tells who is here of a reader's progress, `typed` of a frame in a
    conversation, `present` friends of somebody's presence."""

    def __init__(
        self,
        ledger: Ledger,
        bell: HintSender,
        subscriptions: Subscriptions,
        *,
        reached: Callable[[str, str, int], None],
        typed: Callable[[TypingFrame], None],
        present: Callable[[str, Raw], Awaitable[list[str]]],
    ) -> None:
        self._ledger, self._bell, self._subscriptions = ledger, bell, subscriptions
        self._reached, self._typed, self._present = reached, typed, present
        self._looks = 0
        self._unseen: list[str] = []
        """conversations that the next looks are for"""
        self._looking = False
        bell.listen(LINE, self._heard_line)
        bell.listen(PERSON, self._heard_person)
        bell.listen(READER, self._heard_reader)
        bell.listen(TYPING, self._heard_typing)
        bell.listen(PRESENCE, self._heard_presence)

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def said(self, convs: tuple[str, ...], joins: tuple[str, ...]) -> None:
        for conv in convs:
            self._bell.ring(LINE, conv)
        for name in joins:
            self._bell.ring(PERSON, name)

    def read(self, conv: str, reader: str) -> None:
        self._bell.ring(READER, _encode((conv, reader)).decode())

    def typing(self, frame: TypingFrame) -> None:
        self._pass(TYPING, _encode((frame.conv, _encode(frame).decode())))

    def presence(self, name: str, data: Raw, *, answered: bool = False) -> None:
        self._pass(PRESENCE, _encode(PersonPresence(name, bytes(data).decode(), answered)))

    def _pass(self, about: str, what: bytes) -> None:
        if len(what) <= PASSING_BYTES:
            self._bell.ring(about, what.decode())

    # ── hearing ──────────────────────────────────────────────────────────────────────────────────

    def _heard_line(self, conv: str) -> None:
        if self._subscriptions.concerns(conv):
            self._subscriptions.look(conv)

    def _heard_person(self, name: str) -> None:
        if self._subscriptions.subscribers(name):
            self._subscriptions.do(self._subscriptions.look_up(name))

    def _heard_reader(self, what: str) -> None:
        with suppress(msgspec.DecodeError):
            conv, reader = _pair(what)
            if self._subscriptions.here(conv):
                self._subscriptions.do(self._learn_reader(conv, reader))

    async def _learn_reader(self, conv: str, reader: str) -> None:
        self._reached(conv, reader, await self._ledger.cursor(c.stream(conv), reader))

    def _heard_typing(self, what: str) -> None:
        with suppress(msgspec.DecodeError):
            _, frame = _pair(what)
            self._typed(_typing(frame))

    def _heard_presence(self, what: str) -> None:
        with suppress(msgspec.DecodeError):
            self._subscriptions.do(self._pass_presence(_presence(what)))

    async def _pass_presence(self, presence: PersonPresence) -> None:
        name, data = presence.name, Raw(presence.data.encode())
        online = online_in(data)
        if not presence.answered and self._subscriptions.subscribers(name) and online is False:
            # They left there and are here as well.
            self.presence(name, c.ONLINE, answered=True)
            return
        friends = await self._present(name, data)
        if not presence.answered and online is True:
            for friend in friends:
                self.presence(friend, c.ONLINE, answered=True)

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def look(self) -> None:
        """What rings would have told, found without them."""
        if self._looking:
            return
        self._looking = True
        try:
            with suppress(LedgerError, Stopped):
                await self._look()
        finally:
            self._looking = False

    async def _look(self) -> None:
        """Two questions, however many are here: ten thousand people must not cost ten thousand."""
        if not self._unseen:
            self._unseen = self._subscriptions.convs()
        some, self._unseen = self._unseen[:CONVS_LOOKED_AT], self._unseen[CONVS_LOOKED_AT:]
        lasts = await self._ledger.lasts([c.stream(conv) for conv in some])
        for conv in some:
            head = self._subscriptions.head(conv)
            if head is not None and lasts.get(c.stream(conv), 0) > head:
                self._subscriptions.look(conv)
        self._looks += 1
        if self._looks % PEOPLE_EVERY == 0:
            # Who is in as many as we know of is in the same ones: that they left one, its own lines say.
            known = self._subscriptions.counts()
            found = await self._ledger.counts([c.convs(name) for name in known])
            for name, count in known.items():
                if found.get(c.convs(name), 0) != count:
                    await self._subscriptions.look_up(name)
