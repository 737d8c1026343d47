"""Line requests: turns `one_chat`, `group_chat`, `edit` and `delete` frames into requests to the ledger.

The law: a line is one row, however many people read it. Only its sender may edit it; its sender or an admin
of its group may delete it. A line that a person cannot see is treated as if it did not exist.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw, Struct

from duly.apps.chat import conversations as c
from duly.apps.chat.conversations import NOT_YOURS, Precondition, Request
from duly.apps.chat.permissions import ChatPermissions
from duly.core.operations import PutNewItem, RewriteEntry, Write
from duly.errors import Malformed, NotAllowed
from duly.storage.ledger import Ledger
from duly.wire.fields import NOTHING
from duly.wire.frames import Frame
from duly.wire.outgoing import LineFrame, encode

LINES: Final = frozenset({"one_chat", "group_chat", "edit", "delete"})
BEGUN_KEPT: Final = 100_000


class EditRequest(Struct, frozen=True):
    """The `data` of an `edit`."""

    conv: str
    n: int
    data: Raw


class LineRequests:
    """Turns the frames of people into requests to store lines."""

    def __init__(self, ledger: Ledger, permissions: ChatPermissions) -> None:
        self._ledger = ledger
        self._permissions = permissions
        self._begun: dict[str, None] = {}
        """pairs that have talked before, so that their conversation is in the buckets of both"""

    def request_at_once(self, frame: Frame, me: str) -> Request | None:
        """Return the request for a new line; None for any other frame, or if the ledger has to be read
        first."""
        match frame.type:
            case "one_chat" if frame.to and self._permissions.is_known(frame.to):
                return self._one_chat(frame, me, frame.to)
            case "group_chat":
                return self._group_chat(frame, me)
            case _:
                return None

    async def request(self, frame: Frame, me: str) -> Request:
        """Return the request for this frame."""
        match frame.type:
            case "one_chat":
                if not frame.to:
                    raise Malformed("a one_chat needs 'to': the person it is for")
                request = self._one_chat(frame, me, frame.to)
                if not await self._permissions.knows(frame.to, me):
                    raise NotAllowed(NOT_YOURS.reason)
                return request
            case "group_chat":
                return self._group_chat(frame, me)
            case "edit":
                return await self._edit(frame, me)
            case _:
                return await self._delete(frame, me)

    def stored(self, kind: str, conv: str) -> None:
        """Note that a line was stored; if it was from one person to another, those two have talked."""
        if kind == "one_chat" and len(self._begun) < BEGUN_KEPT:
            self._begun[conv] = None

    def _one_chat(self, frame: Frame, me: str, other: str) -> Request:
        message = c.message_of(frame, me, other)
        conv = c.direct(me, other)
        also: tuple[Write, ...] = ()
        if conv not in self._begun:
            also = tuple(PutNewItem(c.convs(name), conv, b"") for name in sorted({me, other}))
        return Request(message, conv, c.line_of(frame, me), self._permissions.to_talk(conv, me, other), also)

    def _group_chat(self, frame: Frame, me: str) -> Request:
        group = frame.to
        if not group or not c.is_group(group):
            raise Malformed("a group_chat needs 'to': the group it is for")
        guards = (Precondition(c.members(c.known_form(group)), me),)
        return Request(c.message_of(frame, me, group), group, c.line_of(frame, me), guards)

    async def _edit(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, EditRequest)
        line = await self._line(wanted.conv, wanted.n, me)
        guards = self._permissions.to_edit(wanted.conv, line.from_, me)
        new = c.line_of(line, me, wanted.data, edited=True)
        told = c.edit_line(frame, me, wanted.n, NOTHING)
        return Request(
            c.message_of(frame, me, wanted.conv),
            wanted.conv,
            told,
            guards,
            (RewriteEntry(c.stream(wanted.conv), wanted.n, encode(new)),),
            live=c.edit_line(frame, me, wanted.n, wanted.data),
        )

    async def _delete(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, c.LineNumber)
        line = await self._line(wanted.conv, wanted.n, me)
        guards = await self._permissions.to_delete(wanted.conv, line.from_, me)
        erase = RewriteEntry(c.stream(wanted.conv), wanted.n, b"")
        return Request(
            c.message_of(frame, me, wanted.conv), wanted.conv, c.line_of(frame, me), guards, (erase,)
        )

    async def _line(self, conv: str, n: int, me: str) -> LineFrame:
        """Return a line of a conversation that `me` can see."""
        begins = await self._permissions.first_visible(conv, me)
        found = await self._ledger.entries(c.stream(conv), n - 1, 1) if n >= max(begins, 1) else []
        if not found or found[0].n != n or not found[0].body:
            raise NotAllowed(NOT_YOURS.reason)
        line = c.read_line(found[0])
        if line.type not in c.LINES:
            raise NotAllowed(NOT_YOURS.reason)
        return line
