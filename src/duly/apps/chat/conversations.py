"""Conversations: how they are named, where they are in the ledger, and what may be said in them.

The laws. A conversation is a stream; its numbers are the order in which all see it. `ann+bob` is between
two people, `#…` is a group, `~ann` is what only Ann is told: that a person wants to be her friend, or has
invited her. Each member of a group is an item, and coming and going are lines of its stream: so every
member, at every hub, sees them at the same place.

What is asked for is a `Request`: the message, the line it becomes, what has to be so (`Precondition`), and
what else is written. All of it is one transaction, so a right is judged where it is used.
"""

from __future__ import annotations

import base64
import re
from enum import Enum
from hashlib import blake2b
from typing import Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from duly.core.horizon import Horizon
from duly.core.messages import Message, Verdict, VerdictKind, names_in
from duly.core.operations import Admit, AppendEntry, CheckItem, Recall, Write
from duly.core.units import DAY, FOREVER, MS
from duly.errors import Malformed, NotAllowed, TooLarge
from duly.storage.ledger import StreamEntry
from duly.wire.fields import NOTHING
from duly.wire.frames import Frame, dump
from duly.wire.outgoing import LineFrame, encode

DATA_LIMIT: Final = 64 * 1024
"""Most bytes of one line: chat is for people."""
MEMBERS_LIMIT: Final = 20_000
NAMES_SHOWN: Final = 100
"""Members whose names are told in the line that makes a group."""
HORIZON: Final = Horizon(keep=7 * DAY)
"""How long an id is remembered: a line written on a journey is still taken a week later."""
ALL: Final = FOREVER
"""Past every number: a cursor that is moved there ends at the last line."""

BARRED: Final = "barred"
"""pairs of whom one has blocked the other"""
GROUPS: Final = "groups"

ONLINE: Final = dump({"online": True})
OFFLINE: Final = dump({"online": False})
"""What the hub says of a person's presence."""

LINES: Final = frozenset({"one_chat", "group_chat"})
"""What can be edited and deleted."""


class Rank(Enum):
    """The rank of a member in a group."""

    OWNER = "owner"
    ADMIN = "admin"
    MEMBER = "member"

    @property
    def body(self) -> bytes:
        """The rank as it is stored in the item of a member."""
        return self.value.encode()


class HistoryPolicy(Enum):
    """What those who join a group later may see of what was said before."""

    ALL = "all"
    JOINED = "joined"


class GroupInfo(Struct, frozen=True):
    """A group as it lies on its bucket."""

    name: str
    made_by: str
    history: HistoryPolicy = HistoryPolicy.ALL
    open: bool = False
    """a person who knows its id may join"""


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def direct(one: str, other: str) -> str:
    """The conversation of two people.

    >>> direct("bob", "ann")
    'ann+bob'
    """
    return "+".join(sorted((one, other)))


def pair_in(conv: str) -> tuple[str, ...]:
    """The two people of a conversation; none, if it is not one of two."""
    names = tuple(conv.split("+"))
    return names if len(names) == 2 and all(names) else ()


def other_in(conv: str, me: str) -> str:
    """The one with whom a person is in a conversation of two.

    >>> other_in("ann+bob", "ann")
    'bob'
    """
    one, other = pair_in(conv)
    return other if one == me else one


_CONV: Final = re.compile(r"[#~]?[A-Za-z0-9._+-]{1,129}")


def known_form(conv: str) -> str:
    """The conversation if it can be one. What strangers make up is nowhere, and is not looked for."""
    if not _CONV.fullmatch(conv):
        raise NotAllowed(NOT_YOURS.reason)
    return conv


def notes(name: str) -> str:
    """The conversation that only this person reads: requests and invitations to them."""
    return f"~{name}"


def is_group(conv: str) -> bool:
    """Whether a conversation is a group."""
    return conv.startswith("#")


def group_of(key: bytes) -> str:
    """The id of the group that this message makes; the same for every repeat of it."""
    return "#" + base64.b32encode(blake2b(key, digest_size=10).digest()).decode().lower()


def stream(conv: str) -> str:
    """The stream with the lines of a conversation."""
    return f"chat/{conv}"


def convs(name: str) -> str:
    """The bucket with the conversations of a person, except their notes."""
    return f"convs/{name}"


def members(group: str) -> str:
    """The bucket with the members of a group and their ranks."""
    return f"members/{group}"


def waiting(conv: str) -> str:
    """Who was told something there and has not acknowledged it."""
    return f"waiting/{conv}"


def invited(group: str) -> str:
    """The bucket with the people who are invited to a group, each with the member who invited them."""
    return f"invited/{group}"


def friends(name: str) -> str:
    """The bucket with the friends of a person."""
    return f"friends/{name}"


def asked(name: str) -> str:
    """The bucket with the people who have asked this person to be their friend."""
    return f"asked/{name}"


def blocks(name: str) -> str:
    """The bucket with the people whom this person has blocked."""
    return f"blocks/{name}"


def read_by(name: str) -> str:
    """The reader whose cursor is how far a person has read; how far they have it is under their name."""
    return f"r:{name}"


def begins_for(name: str) -> str:
    """The reader whose cursor is where a conversation begins for a person who joined it."""
    return f"s:{name}"


# ── requests ─────────────────────────────────────────────────────────────────────────────────────

NOT_YOURS: Final = Verdict(
    VerdictKind.REFUSED,
    reason="there is no such conversation or person, or you may not do that there",
    cause="not_allowed",
)
"""The same words whether something does not exist or is not for them: nothing leaks."""


REVOKED: Final = Verdict(
    VerdictKind.REFUSED, reason="your login is no longer valid; log in again", cause="not_allowed"
)


class Precondition(Struct, frozen=True, gc=False):
    """What has to be so: an item lies on a bucket (with this body, if one is named); or does not."""

    bucket: str
    name: str
    body: bytes | None = None
    wanted: bool = True
    refusal: Verdict = NOT_YOURS


class Request(Struct, frozen=True, eq=False):
    """What a frame asks the ledger to do. `line` is what becomes of it in the stream of `conv`."""

    message: Message
    conv: str
    line: LineFrame
    guards: tuple[Precondition, ...] = ()
    also: tuple[Write, ...] = ()
    joins: tuple[str, ...] = ()
    """who is in the conversation from this line on"""
    parts: tuple[str, ...] = ()
    """who is not, after it"""
    news: tuple[str, ...] = ()
    """other conversations in which something is new then"""
    live: LineFrame | None = None
    """what those who are here are told, if it is not the line itself"""
    data: bytes = b""
    """what the `server_ack` carries"""
    shown: bool = True
    """the sender may know the conversation and the number"""

    def writes(self, until: int, now: int) -> tuple[Write, ...]:
        """The one transaction that does it: look, admit, append."""
        message = self.message
        append = AppendEntry(stream(self.conv), encode(self.line), now, message.key, ends=True)
        write: Write = Admit(message, until, now, then=(append, *self.also))
        for guard in reversed(self.guards):
            # Who may no longer is still told what became of what he could.
            refused = (Recall(message, guard.refusal, now),)
            done, not_done = ((write,), refused) if guard.wanted else (refused, (write,))
            write = CheckItem(guard.bucket, guard.name, guard.body, done, not_done)
        return (write,)


T = TypeVar("T")


class LineNumber(Struct, frozen=True):
    """The `data` of a frame about one line."""

    conv: str
    n: int


def read_data(frame: Frame, as_: type[T]) -> T:
    """What is in a frame's `data`."""
    try:
        return msgspec.json.decode(frame.data, type=as_)
    except (msgspec.DecodeError, ValueError) as problem:
        raise Malformed(f"the data of a {frame.type} does not fit: {problem}") from None


def message_of(frame: Frame, sender: str, recipient: str) -> Message:
    """The message in a frame. It carries only a digest of what was said: the text is in the stream."""
    if frame.seq_id is None:
        raise Malformed(f"a {frame.type} needs a seq_id: milliseconds, '_', a counter; mint one per message")
    data = bytes(frame.data)
    if len(data) > DATA_LIMIT:
        raise TooLarge(f"data has {len(data)} bytes; {DATA_LIMIT} are allowed, send it in parts")
    if frame.exp is not None and frame.exp < 10**11:
        raise Malformed(f"exp is a time in milliseconds since 1970, not {frame.exp}")
    said = blake2b(data, digest_size=16).digest()
    return Message(sender, frame.seq_id, frame.type, recipient, said, expires=(frame.exp or 0) * MS)


def line_of(
    frame: Frame | LineFrame, sender: str, data: Raw | None = None, *, edited: bool = False
) -> LineFrame:
    """What is stored of a line: everything but its number, time and place, which the stream knows."""
    return LineFrame(
        frame.type, frame.seq_id, sender, frame.data if data is None else data, frame.exp, edited
    )


class EditData(Struct, frozen=True, omit_defaults=True):
    """The `data` of an edit: the number of the line, and what the line says now."""

    n: int
    data: Raw = NOTHING


def edit_of(line: LineFrame) -> int | None:
    """The number of the line that this one says was edited. What was edited is in that line, so that
    deleting it leaves nothing behind."""
    return _decode_edit(line.data).n if line.type == "edit" else None


def edit_line(frame: Frame | LineFrame, sender: str, n: int, data: Raw) -> LineFrame:
    """An edit with what the line says now; nothing, if it has been deleted since."""
    return line_of(frame, sender, Raw(msgspec.json.encode(EditData(n, data))))


# ── showing ──────────────────────────────────────────────────────────────────────────────────────

_decode: Final = msgspec.json.Decoder(LineFrame).decode
_decode_edit: Final = msgspec.json.Decoder(EditData).decode


def read_line(entry: StreamEntry) -> LineFrame:
    """The line that was stored as this entry, which must not have been deleted."""
    return _decode(entry.body)


def show(conv: str, n: int, line: LineFrame, at: int, attempt: int = 1) -> LineFrame:
    """A line as it goes to its readers."""
    return LineFrame(
        line.type, line.seq_id, line.from_, line.data, line.exp, line.edited,
        conv, n, at // MS, attempt if attempt > 1 else None,
    )  # fmt: skip


def shown_line(entry: StreamEntry, now: int) -> LineFrame:
    """The line of an entry as far as it may be shown: what was deleted or has expired keeps its id alone."""
    if not entry.body:
        return _remains("deleted", entry)
    line = _decode(entry.body)
    return _remains("expired", entry) if is_over(line, now) and line.type != "edit" else line


def is_over(line: LineFrame, now: int) -> bool:
    """Whether a line has expired: then what it said is not shown any more."""
    return 0 < (line.exp or 0) * MS <= now


def _remains(type_: str, entry: StreamEntry) -> LineFrame:
    scope, id_ = names_in(entry.key)
    return LineFrame(type_, id_, scope)


def leaver_in(line: LineFrame) -> str | None:
    """Who is no longer in the group after this line."""
    match line.type:
        case "group_leave":
            return line.from_
        case "group_remove":
            return str(msgspec.json.decode(line.data)["user"])
        case _:
            return None
