"""The chat's view of the other hubs on its ledger, where its people may be connected.

The laws. A line is stored first, then hinted; a hub that gets the hint reads the ledger. Without the hint it
would read it a second later, or five seconds later for a new conversation (a little more if there are very
many). Typing and presence, which are not stored, travel within the hint and are lost with it. For receipts
the hint names the reader, and the ledger has the position.

`ChatRemote` is the interface. `SingleHubChat` implements it for a hub with a ledger of its own,
`ChatRemoteHubs` for hubs that share a ledger.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from duly.apps.chat import conversations as c
from duly.apps.chat.connections import Connections
from duly.apps.chat.subscriptions import Subscriptions
from duly.cluster.notifier import HintSender
from duly.cluster.remote import CoalescedTask, NoRemoteHubs, PolledRemoteHubs, RemoteHubs
from duly.errors import DulyError
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger
from duly.wire.outgoing import TypingFrame

LINE: Final = "line"
"""The hint that a line was stored in this conversation."""
PERSON: Final = "person"
"""The hint that this person may be in more conversations than before."""
READER: Final = "reader"
"""The hint that a reader has read further: [conversation, reader]."""
TYPING: Final = "typing"
"""The hint that carries a typing frame: [conversation, frame]."""
PRESENCE: Final = "presence"
"""The hint that carries a `PersonPresence`."""
PASSING_BYTES: Final = 1_000
"""Longer typing and presence frames are sent at this hub only."""
PEOPLE_EVERY: Final = 5
"""After this many refreshes, conversations that are new to a person are looked up."""
CONVS_PER_REFRESH: Final = 20_000
"""How many conversations one refresh asks for; if there are more, they take turns."""


class PersonPresence(msgspec.Struct, frozen=True, array_like=True):
    """A person's presence: `data` is the content of a presence frame."""

    name: str
    data: str
    answered: bool = False
    """whether it answers another presence, and gets no answer itself"""


class PresenceData(msgspec.Struct, frozen=True):
    """The content of a presence frame; only its field `online` has a meaning here."""

    online: bool | None = None


def online_in(data: Raw) -> bool | None:
    """Return whether a presence says that the person is online; None if it does not say.

    >>> online_in(Raw(b'{"online":true,"note":"false"}')), online_in(Raw(b'"false"'))
    (True, None)
    >>> online_in(Raw(b'{"online": "false"}'))
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


class ChatRemote(RemoteHubs, Protocol):
    """The interface of a chat to the other hubs; also used where there are none."""

    def said(self, convs: tuple[str, ...], joins: tuple[str, ...]) -> None:
        """Hint that lines were stored in conversations, and that people are in more of them than before."""
        ...

    def read(self, conv: str, readers: Iterable[tuple[str, int]]) -> None:
        """Hint that these readers have read further in a conversation."""
        ...

    def typing(self, frame: TypingFrame) -> None:
        """Pass on that a person is typing in a conversation."""
        ...

    def presence(self, name: str, data: Raw) -> None:
        """Pass on a person's presence."""
        ...


class SingleHubChat(NoRemoteHubs):
    """The chat's remote side for a hub with a ledger of its own: everyone who is connected is connected
    here."""

    def said(self, convs: tuple[str, ...], joins: tuple[str, ...]) -> None:
        """Do nothing: the chat serves its own connections."""

    def read(self, conv: str, readers: Iterable[tuple[str, int]]) -> None:
        """Do nothing: the chat serves its own connections."""

    def typing(self, frame: TypingFrame) -> None:
        """Do nothing: the chat serves its own connections."""

    def presence(self, name: str, data: Raw) -> None:
        """Do nothing: the chat serves its own connections."""


class ChatRemoteHubs(PolledRemoteHubs):
    """The chat's remote side where several hubs share a ledger.

    `reached` sends a reader's progress to the people here, `typed` a typing frame, and `present` a person's
    presence to the friends here.
    """

    def __init__(
        self,
        ledger: Ledger,
        notifier: HintSender,
        connections: Connections,
        subscriptions: Subscriptions,
        tasks: Supervisor,
        *,
        reached: Callable[[str, list[tuple[str, int]]], None],
        typed: Callable[[TypingFrame], None],
        present: Callable[[str, Raw], Awaitable[list[str]]],
    ) -> None:
        super().__init__()
        self._ledger, self._notifier, self._jobs = ledger, notifier, tasks
        self._connections, self._subscriptions = connections, subscriptions
        self._reached, self._typed, self._present = reached, typed, present
        self._progress: CoalescedTask[tuple[str, str]] = CoalescedTask(self._learn_readers, tasks)
        self._refreshes = 0
        self._unseen: list[str] = []
        """conversations that the next refreshes ask for"""
        notifier.listen(LINE, self._heard_line)
        notifier.listen(PERSON, self._heard_person)
        notifier.listen(READER, self._heard_reader)
        notifier.listen(TYPING, self._heard_typing)
        notifier.listen(PRESENCE, self._heard_presence)

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def said(self, convs: tuple[str, ...], joins: tuple[str, ...]) -> None:
        """Hint that lines were stored in conversations, and that people are in more of them than before."""
        for conv in convs:
            self._notifier.hint(LINE, conv)
        for name in joins:
            self._notifier.hint(PERSON, name)

    def read(self, conv: str, readers: Iterable[tuple[str, int]]) -> None:
        """Hint that these readers have read further in a conversation."""
        for reader, _ in readers:
            self._notifier.hint(READER, _encode((conv, reader)).decode())

    def typing(self, frame: TypingFrame) -> None:
        """Pass on that a person is typing, within the hint."""
        self._pass(TYPING, _encode((frame.conv, _encode(frame).decode())))

    def presence(self, name: str, data: Raw, *, answered: bool = False) -> None:
        """Pass on a person's presence, within the hint."""
        self._pass(PRESENCE, _encode(PersonPresence(name, bytes(data).decode(), answered)))

    def _pass(self, about: str, what: bytes) -> None:
        if len(what) <= PASSING_BYTES:
            self._notifier.hint(about, what.decode())

    # ── hearing ──────────────────────────────────────────────────────────────────────────────────

    def _heard_line(self, conv: str) -> None:
        if self._connections.concern(conv):
            self._subscriptions.refresh(conv)

    def _heard_person(self, name: str) -> None:
        if self._connections.of_person(name):
            self._subscriptions.refresh_person(name)

    def _heard_reader(self, what: str) -> None:
        with suppress(msgspec.DecodeError):
            conv, reader = _pair(what)
            if self._connections.in_conversation(conv):
                self._progress.want((conv, reader))

    async def _learn_readers(self, wanted: list[tuple[str, str]]) -> None:
        positions = await self._ledger.standing([(c.stream(conv), reader) for conv, reader in wanted])
        for (conv, reader), position in zip(wanted, positions, strict=True):
            self._reached(conv, [(reader, position.cursor or 0)])

    def _heard_typing(self, what: str) -> None:
        with suppress(msgspec.DecodeError):
            _, frame = _pair(what)
            self._typed(_typing(frame))

    def _heard_presence(self, what: str) -> None:
        with suppress(msgspec.DecodeError):
            self._do(self._pass_presence(_presence(what)))

    async def _pass_presence(self, presence: PersonPresence) -> None:
        name, data = presence.name, Raw(presence.data.encode())
        online = online_in(data)
        if not presence.answered and self._connections.of_person(name) and online is False:
            # The person left there but is connected here as well.
            self.presence(name, c.ONLINE, answered=True)
            return
        friends = await self._present(name, data)
        if not presence.answered and online is True:
            for friend in friends:
                self.presence(friend, c.ONLINE, answered=True)

    def _do(self, work: Coroutine[object, None, None]) -> None:
        self._jobs.do("a hint of another hub's chat", work, expected=(DulyError,))

    # ── refreshing ───────────────────────────────────────────────────────────────────────────────

    async def _refresh(self) -> None:
        """Look for new lines with two queries, however many people are connected here."""
        if not self._unseen:
            self._unseen = self._connections.conversations()
        some, self._unseen = self._unseen[:CONVS_PER_REFRESH], self._unseen[CONVS_PER_REFRESH:]
        lasts = await self._ledger.lasts([c.stream(conv) for conv in some])
        for conv in some:
            head = self._connections.head(conv)
            if head is not None and lasts.get(c.stream(conv), 0) > head:
                self._subscriptions.refresh(conv)
        self._refreshes += 1
        if self._refreshes % PEOPLE_EVERY == 0:
            # A person with as many conversations as are known here is in the same ones; that they left one is
            # in its lines.
            known = self._connections.counts()
            found = await self._ledger.counts([c.convs(name) for name in known])
            for name, count in known.items():
                if found.get(c.convs(name), 0) != count:
                    await self._subscriptions.load_new(name)
