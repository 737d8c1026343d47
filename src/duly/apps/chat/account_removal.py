"""Account removal: takes a person whose account was removed out of their conversations.

The laws. The person leaves their groups and their friends; others see that in lines, as if the person had
done it. An owner hands a group over first. The name of a person who has used chat is not given to another
person, so that old lines cannot be attributed to another person.

Removing an account leaves a note in its own transaction (`accounts.LEAVING`). Every hub that finds the note
does the rest, as often as necessary: each step has its own id and happens once, even with several hubs or
after a crash.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from duly.apps.chat import conversations as c
from duly.apps.chat.conversations import HORIZON, Rank, Request
from duly.apps.chat.friends import Friends
from duly.apps.chat.groups import Groups
from duly.core.horizon import remember_until
from duly.core.ids import uuid7
from duly.core.operations import AppendEntry, DropItem, PutItem
from duly.core.units import SECOND
from duly.errors import NotAllowed
from duly.identity.accounts import FORMER, LEAVING
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame
from duly.wire.outgoing import encode

SETTLED: Final = 15 * SECOND
"""Longer than a hub that does not know of the removal yet still accepts lines from the person."""


async def remove_from_chat(ledger: Ledger, name: str) -> list[str]:
    """Take a person out of their conversations if their account was removed; return the conversations with
    new lines."""
    note = await ledger.item(LEAVING, name)
    if note is None:
        return []
    leaving = _Removal(ledger, name, int(note))
    mine = await ledger.bucket(c.convs(name))
    if mine or (await ledger.extent(c.stream(c.notes(name)))).last:
        await ledger.write(PutItem(FORMER, name, b""))  # first, since what follows removes the traces
    for group in filter(c.is_group, mine):
        await leaving.leave(group)
    for friend in await ledger.bucket(c.friends(name)):
        await leaving.part_from(friend)
    left = not any(map(c.is_group, await ledger.bucket(c.convs(name))))
    if left and (ledger.sole or ledger.clock.now() > leaving.since + SETTLED):
        await ledger.write(DropItem(LEAVING, name, note))
    return leaving.news


class _Removal:
    """The steps of one removal."""

    def __init__(self, ledger: Ledger, name: str, since: int) -> None:
        self._ledger = ledger
        self._name = name
        self._groups = Groups(ledger, _always)
        self._friends = Friends(ledger, _always)
        self.since = since
        self.news: list[str] = []

    async def leave(self, group: str) -> None:
        """Leave a group; an owner hands it over first."""
        ranks = await self._ledger.bucket(c.members(group))
        if ranks.get(self._name) == Rank.OWNER.body and len(ranks) > 1:
            # To an admin, if there is one; among several to the first by name, so that every hub picks the
            # same one.
            ranked = sorted(ranks.keys() - {self._name}, key=lambda one: (ranks[one] != Rank.ADMIN.body, one))
            frame = self._frame("group_role", group, group=group, user=ranked[0], role=Rank.OWNER.value)
            with suppress(NotAllowed):  # another hub has done it, or they left: try again
                await self._do(await self._groups.request(frame, self._name))
        await self._do(await self._groups.request(self._frame("group_leave", group, group=group), self._name))

    async def part_from(self, friend: str) -> None:
        """End a friendship, and tell the friend."""
        request = await self._friends.request(self._frame("friend_remove", friend, user=friend), self._name)
        theirs = c.notes(friend)
        told = AppendEntry(
            c.stream(theirs), encode(request.line), self._ledger.clock.now(), request.message.key
        )
        await self._do(replace(request, also=(*request.also, told), news=(theirs,)))

    async def _do(self, request: Request) -> None:
        until = remember_until(request.message, HORIZON)
        await self._ledger.write(*request.writes(until, self._ledger.clock.now()))
        self.news += (request.conv, *request.news)

    def _frame(self, type_: str, about: str, **data: str) -> Frame:
        """Return a frame whose id contains when the person was removed, and from what; it is the same at
        every hub."""
        digest = blake2b(f"{type_} {about}".encode(), digest_size=10).digest()
        id_ = uuid7(self.since, int.from_bytes(digest))
        return Frame(type_, id_, data=Raw(msgspec.json.encode(data)))


async def _always(*_: str) -> bool:
    return True
