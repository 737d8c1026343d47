"""Queries: requests that only read: history, receipts, conversations, groups and friends.

The law: a person sees nothing of a conversation they are not in, and no line before the first one they may
see.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from duly.apps.chat import conversations as c
from duly.apps.chat import receipts
from duly.apps.chat.broadcast import RECEIPTS_LIMIT
from duly.apps.chat.connections import Connections
from duly.apps.chat.conversations import NOT_YOURS
from duly.apps.chat.friends import Friends
from duly.apps.chat.groups import Groups
from duly.apps.chat.history import encode_page, show_page
from duly.apps.chat.permissions import ChatPermissions
from duly.errors import Malformed, NotAllowed
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame

PAGE_LIMIT: Final = 200
"""The most lines on one page of history."""
CONVERSATIONS_LIMIT: Final = 200
"""The most conversations on one page: a person may be in very many, and each takes some queries."""
QUERIES: Final = frozenset({"history", "receipts", "conversations", "group_info", "friends"})


class HistoryPage(Struct, frozen=True):
    """The `data` of a `history` frame."""

    conv: str
    before: int = c.ALL
    limit: int = 50


class ConversationsQuery(Struct, frozen=True):
    """The `data` of a `conversations` frame."""

    after: str = ""
    limit: int = CONVERSATIONS_LIMIT


class ChatQueries:
    """Answers queries from the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        permissions: ChatPermissions,
        connections: Connections,
        groups: Groups,
        friends: Friends,
    ) -> None:
        self._ledger = ledger
        self._permissions = permissions
        self._connections = connections
        self._groups = groups
        self._friends = friends

    async def answer(self, frame: Frame, me: str) -> bytes:
        """Return the answer as JSON."""
        match frame.type:
            case "history":
                return await self._history(frame, me)
            case "receipts":
                return msgspec.json.encode(await self._receipts(frame, me))
            case "conversations":
                return msgspec.json.encode(await self._conversations(frame, me))
            case "group_info":
                return msgspec.json.encode(await self._groups.show(frame, me))
            case _:
                return msgspec.json.encode(await self._friends.of(me))

    async def _history(self, frame: Frame, me: str) -> bytes:
        """Return a page of lines before a number, oldest first; `first` is the first line the person may
        see."""
        wanted = c.read_data(frame, HistoryPage)
        if not 1 <= wanted.limit <= PAGE_LIMIT or wanted.before < 1:
            raise Malformed(f"a page has 1 to {PAGE_LIMIT} lines, before a number from 1")
        stream = c.stream(c.known_form(wanted.conv))
        extent = await self._ledger.extent(stream)
        before = min(wanted.before, extent.last + 1)
        page = await self._ledger.entries(stream, max(0, before - 1 - wanted.limit), wanted.limit)
        # Checked after reading, so that a member who was removed meanwhile sees nothing.
        first = max(await self._permissions.first_visible(wanted.conv, me), 1)
        page = [entry for entry in page if first <= entry.n < before]
        lines = await show_page(self._ledger, wanted.conv, page, self._ledger.clock.now())
        return encode_page(lines, first, extent.last)

    async def _receipts(self, frame: Frame, me: str) -> dict[str, object]:
        """Return the receipts of a line: delivered to k of n, read by m of n."""
        wanted = c.read_data(frame, c.LineNumber)
        begins = await self._permissions.first_visible(wanted.conv, me)
        found = await self._ledger.entries(c.stream(wanted.conv), wanted.n - 1, 1) if wanted.n >= 1 else []
        if not found or found[0].n != wanted.n or wanted.n < begins:
            raise NotAllowed(NOT_YOURS.reason)
        others = await receipts.recipients(self._ledger, wanted.conv, found[0])
        read = [one.name for one in others if one.state == "read"]
        have = [one.name for one in others if one.state in ("delivered", "read")]
        attempts = [one.attempts for one in others]
        # Connections here may have acknowledged more than the ledger knows yet. Those of the author do not
        # count.
        here = self._connections.attempts(wanted.conv, wanted.n, {one.name for one in others})
        shown: dict[str, object] = {
            "conv": wanted.conv, "n": wanted.n, "state": "accepted", "of": len(others),
            "delivered": len(have), "read": len(read),
            "attempts": max(here, *attempts, 0),
        }  # fmt: skip
        if others and len(have) == len(others):
            shown["state"] = "read" if len(read) == len(others) else "delivered"
        if len(others) <= RECEIPTS_LIMIT:
            shown |= {"delivered_to": have, "read_by": read}
        return shown

    async def _conversations(self, frame: Frame, me: str) -> dict[str, object]:
        """Return a page of a person's conversations, by name: how many lines each has, how far they have
        read, and how many lines of others are unread. `next` says after which one to continue."""
        wanted = c.read_data(frame, ConversationsQuery) if bytes(frame.data) else ConversationsQuery()
        if not 1 <= wanted.limit <= CONVERSATIONS_LIMIT:
            raise Malformed(f"a page has 1 to {CONVERSATIONS_LIMIT} conversations")
        rest = sorted(conv for conv in await self._ledger.bucket(c.convs(me)) if conv > wanted.after)
        known = rest[: wanted.limit]
        found = await self._ledger.standing(
            [(c.stream(conv), reader) for conv in known for reader in (me, c.read_by(me))]
        )
        shown = []
        for conv, have, read in zip(known, found[::2], found[1::2], strict=True):
            name = await self._groups.name_of(conv) if c.is_group(conv) else ""
            shown.append(
                {"conv": conv, "last": have.last, "delivered": have.cursor or 0, "read": read.cursor or 0}
                | {"unread": await receipts.unread(self._ledger, conv, me, read.cursor or 0, have.last)}
                | ({"name": name} if name else {"with": c.other_in(conv, me)})
            )
        return {"conversations": shown} | ({"next": known[-1]} if len(rest) > len(known) else {})
