"""Groups: creating, joining and leaving them, ranks, invitations and removals.

The laws. A permission is checked in the transaction that uses it, by the rank in the ledger at that moment.
Joining and leaving are lines of the group, so its members see them where they happened. A person who joins
sees earlier lines only if the group allows it; a person who is removed sees nothing after that line.

An owner may do everything, an admin may remove members, every member may invite. A group always has one
owner: an owner who wants to leave makes another member the owner first, unless they are the last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from duly.apps.chat import conversations as c
from duly.apps.chat.conversations import NOT_YOURS, GroupInfo, HistoryPolicy, Precondition, Rank, Request
from duly.core.messages import Verdict, VerdictKind
from duly.core.operations import AppendEntry, DropItem, MoveCursor, PutItem, Write
from duly.errors import Malformed, NotAllowed, TooLarge
from duly.storage.ledger import Ledger
from duly.wire.frames import Frame
from duly.wire.outgoing import encode

GROUPS: Final = frozenset(
    {"group_create", "group_invite", "group_join", "group_leave", "group_remove", "group_role"}
)
NAME_LIMIT: Final = 100
ALREADY: Final = Verdict(VerdictKind.REFUSED, reason="they are in this group already", cause="already")
LAST: Final = Verdict(
    VerdictKind.REFUSED,
    reason="a group has an owner; make another member the owner first",
    cause="last_owner",
)


class CreateGroup(Struct, frozen=True):
    """The `data` of a `group_create`."""

    name: str
    members: list[str] = []
    history: HistoryPolicy = HistoryPolicy.ALL
    open: bool = False


class GroupRequest(Struct, frozen=True):
    """The `data` of a frame about one group."""

    group: str


class MemberRequest(Struct, frozen=True):
    """The `data` of a frame about one member of a group."""

    group: str
    user: str


class RankRequest(Struct, frozen=True):
    """The `data` of a `group_role`."""

    group: str
    user: str
    role: Rank


class Groups:
    """Turns group frames into requests. `may_add(one, other)` returns whether one may bring the other into a
    group."""

    def __init__(self, ledger: Ledger, may_add: Callable[[str, str], Awaitable[bool]]) -> None:
        self._ledger = ledger
        self._may_add = may_add

    async def request(self, frame: Frame, me: str) -> Request:
        """Return the request for a group frame of the person `me`."""
        match frame.type:
            case "group_create":
                return await self._create(frame, me)
            case "group_invite":
                return await self._invite(frame, me)
            case "group_join":
                return await self._join(frame, me)
            case "group_leave":
                return await self._leave(frame, me)
            case "group_remove":
                return await self._remove(frame, me)
            case _:
                return await self._rank(frame, me)

    async def _create(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, CreateGroup)
        if not 1 <= len(wanted.name) <= NAME_LIMIT:
            raise Malformed(f"a group's name has 1 to {NAME_LIMIT} characters")
        others = sorted({*wanted.members} - {me})
        if len(others) >= c.MEMBERS_LIMIT:
            raise TooLarge(f"{len(others)} members; a group has at most {c.MEMBERS_LIMIT}")
        for other in others:
            if not await self._may_add(me, other):
                raise NotAllowed(NOT_YOURS.reason)
        message = c.message_of(frame, me, "group")
        group = c.group_of(message.key)
        info = GroupInfo(wanted.name, me, wanted.history, wanted.open)
        also: list[Write] = [PutItem(c.GROUPS, group, msgspec.json.encode(info))]
        for name in (me, *others):
            rank = Rank.OWNER if name == me else Rank.MEMBER
            also += (PutItem(c.members(group), name, rank.body), PutItem(c.convs(name), group, b""))
        shown = {"name": wanted.name, "count": len(others) + 1, "members": [me, *others][: c.NAMES_SHOWN]}
        line = c.line_of(frame, me, Raw(msgspec.json.encode(shown)))
        answer = msgspec.json.encode({"group": group})
        return Request(message, group, line, (), tuple(also), joins=(me, *others), data=answer)

    async def _invite(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, MemberRequest)
        group, other = c.known_form(wanted.group), c.known_form(wanted.user)
        info = await self._info(group)
        if info is None or not await self._may_add(me, other):
            raise NotAllowed(NOT_YOURS.reason)
        guards = (
            Precondition(c.members(group), me),
            Precondition(c.BARRED, c.direct(me, other), wanted=False),
            Precondition(c.members(group), other, wanted=False, refusal=ALREADY),
        )
        line = c.line_of(frame, me, Raw(msgspec.json.encode({"group": group, "name": info.name})))
        also = (PutItem(c.invited(group), other, me.encode()),)
        return Request(c.message_of(frame, me, group), c.notes(other), line, guards, also, shown=False)

    async def _join(self, frame: Frame, me: str) -> Request:
        group = c.known_form(c.read_data(frame, GroupRequest).group)
        info = await self._info(group)
        if info is None:
            raise NotAllowed(NOT_YOURS.reason)
        guards = [Precondition(c.members(group), me, wanted=False, refusal=ALREADY)]
        if not info.open:
            guards.append(Precondition(c.invited(group), me))
        stream = c.stream(group)
        also: list[Write] = [
            MoveCursor(stream, me, c.ALL), PutItem(c.members(group), me, Rank.MEMBER.body),
            PutItem(c.convs(me), group, b""), DropItem(c.invited(group), me),
        ]  # fmt: skip
        if info.history is HistoryPolicy.JOINED:
            also.append(MoveCursor(stream, c.begins_for(me), c.ALL))
        message = c.message_of(frame, me, group)
        return Request(message, group, c.line_of(frame, me), tuple(guards), tuple(also), joins=(me,))

    async def _leave(self, frame: Frame, me: str) -> Request:
        group = c.known_form(c.read_data(frame, GroupRequest).group)
        guards = [Precondition(c.members(group), me)]
        if list(await self._ledger.bucket(c.members(group))) != [me]:
            guards.append(Precondition(c.members(group), me, Rank.OWNER.body, wanted=False, refusal=LAST))
        also = (DropItem(c.members(group), me), DropItem(c.convs(me), group), DropItem(c.waiting(group), me))
        message = c.message_of(frame, me, group)
        return Request(message, group, c.line_of(frame, me), tuple(guards), also, parts=(me,))

    async def _remove(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, MemberRequest)
        group, other = c.known_form(wanted.group), c.known_form(wanted.user)
        mine, theirs = await self._rank_of(group, me), await self._rank_of(group, other)
        may = mine is Rank.OWNER or (mine is Rank.ADMIN and theirs is Rank.MEMBER)
        if mine is None or theirs is None or not may or me == other:
            raise NotAllowed(NOT_YOURS.reason)
        guards = (
            Precondition(c.members(group), me, mine.body),
            Precondition(c.members(group), other, theirs.body),
        )
        message = c.message_of(frame, me, group)
        line = c.line_of(frame, me, Raw(msgspec.json.encode({"group": group, "user": other})))
        told = AppendEntry(c.stream(c.notes(other)), encode(line), self._ledger.clock.now(), message.key)
        gone = (
            DropItem(c.members(group), other),
            DropItem(c.convs(other), group),
            DropItem(c.waiting(group), other),
        )
        also = (*gone, told)
        news = (c.notes(other),)
        return Request(message, group, line, guards, also, parts=(other,), news=news)

    async def _rank(self, frame: Frame, me: str) -> Request:
        wanted = c.read_data(frame, RankRequest)
        group, other = c.known_form(wanted.group), c.known_form(wanted.user)
        theirs = await self._rank_of(group, other)
        if theirs is None or me == other or await self._rank_of(group, me) is not Rank.OWNER:
            raise NotAllowed(NOT_YOURS.reason)
        guards = (
            Precondition(c.members(group), me, Rank.OWNER.body),
            Precondition(c.members(group), other, theirs.body),
        )
        also = [PutItem(c.members(group), other, wanted.role.body)]
        if wanted.role is Rank.OWNER:
            also.append(PutItem(c.members(group), me, Rank.ADMIN.body))
        message = c.message_of(frame, me, group)
        return Request(message, group, c.line_of(frame, me), guards, tuple(also))

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def show(self, frame: Frame, me: str) -> dict[str, object]:
        """Return a group as its members see it."""
        group = c.known_form(c.read_data(frame, GroupRequest).group)
        info, ranks = await self._info(group), await self._ledger.bucket(c.members(group))
        if info is None or me not in ranks:
            raise NotAllowed(NOT_YOURS.reason)
        shown: dict[str, object] = msgspec.to_builtins(info)
        return shown | {"group": group, "members": {name: rank.decode() for name, rank in ranks.items()}}

    async def name_of(self, group: str) -> str:
        """Return the name of a group; empty if there is no such group."""
        info = await self._info(group)
        return "" if info is None else info.name

    async def _info(self, group: str) -> GroupInfo | None:
        body = await self._ledger.item(c.GROUPS, group)
        return None if body is None else msgspec.json.decode(body, type=GroupInfo)

    async def _rank_of(self, group: str, name: str) -> Rank | None:
        body = await self._ledger.item(c.members(group), name)
        return None if body is None else Rank(body.decode())
