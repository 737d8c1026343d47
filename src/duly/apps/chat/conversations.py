"""Conversations: their names, their place in the ledger, and the requests about them.

The laws. A conversation is a stream, and all its members see its lines in the order of their numbers.
`ann+bob` is a conversation of two people, `#…` is a group, `~ann` contains notes for Ann alone: friend
requests and invitations. Each member of a group is an item, and joining and leaving are lines of its stream,
so every member at every hub sees them at the same place.

A `Request` contains the message, the line it becomes, its preconditions (`Precondition`), and further writes.
All of it is one transaction, so a permission is checked where it is used.
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
from duly.wire import optional_fields
from duly.wire.fields import NOTHING
from duly.wire.frames import Frame, dump
from duly.wire.outgoing import LineFrame, encode

DATA_LIMIT: Final = 64 * 1024
"""The most bytes of one line: chat is for people."""
MEMBERS_LIMIT: Final = 20_000
NAMES_SHOWN: Final = 100
"""How many members are named in the line that creates a group."""
HORIZON: Final = Horizon(keep=7 * DAY)
"""How long an id is remembered: a line written offline is still accepted a week later."""
ALL: Final = FOREVER
"""Greater than every number: a cursor that is moved there ends at the last line."""

BARRED: Final = "barred"
"""pairs of whom one has blocked the other"""
GROUPS: Final = "groups"

ONLINE: Final = dump({"online": True})
OFFLINE: Final = dump({"online": False})
"""The presence of a person as the hub reports it."""

LINES: Final = frozenset({"one_chat", "group_chat"})
"""The kinds of lines that can be edited and deleted."""


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
    """How much of the earlier lines people see who join a group later."""

    ALL = "all"
    JOINED = "joined"


class GroupInfo(Struct, frozen=True):
    """A group as it is stored in its bucket."""

    name: str
    made_by: str
    history: HistoryPolicy = HistoryPolicy.ALL
    open: bool = False
    """whether a person who knows its id may join"""


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def direct(one: str, other: str) -> str:
    """Return the name of the conversation of two people.

    >>> direct("bob", "ann")
    'ann+bob'
    """
    return "+".join(sorted((one, other)))


def pair_in(conv: str) -> tuple[str, ...]:
    """Return the two people of a conversation; empty if it is not one of two."""
    names = tuple(conv.split("+"))
    return names if len(names) == 2 and all(names) else ()


def other_in(conv: str, me: str) -> str:
    """Return the other person in a conversation of two.

    >>> other_in("ann+bob", "ann")
    'bob'
    """
    one, other = pair_in(conv)
    return other if one == me else one


_CONV: Final = re.compile(r"[#~]?[A-Za-z0-9._+-]{1,129}")


def known_form(conv: str) -> str:
    """Return the conversation if its name is well-formed. Other names cannot exist and are not looked up."""
    if not _CONV.fullmatch(conv):
        raise NotAllowed(NOT_YOURS.reason)
    return conv


def notes(name: str) -> str:
    """Return the conversation with the notes for one person: requests and invitations."""
    return f"~{name}"


def is_group(conv: str) -> bool:
    """Return whether a conversation is a group."""
    return conv.startswith("#")


def group_of(key: bytes) -> str:
    """Return the id of the group that this message creates; the same for every repeat of it."""
    return "#" + base64.b32encode(blake2b(key, digest_size=10).digest()).decode().lower()


def stream(conv: str) -> str:
    """Return the stream with the lines of a conversation."""
    return f"chat/{conv}"


def convs(name: str) -> str:
    """Return the bucket with the conversations of a person, except their notes."""
    return f"convs/{name}"


def members(group: str) -> str:
    """Return the bucket with the members of a group and their ranks."""
    return f"members/{group}"


def waiting(conv: str) -> str:
    """Return the bucket with the people who have not acknowledged lines of a conversation."""
    return f"waiting/{conv}"


def invited(group: str) -> str:
    """Return the bucket with the people invited to a group, each with the member who invited them."""
    return f"invited/{group}"


def friends(name: str) -> str:
    """Return the bucket with the friends of a person."""
    return f"friends/{name}"


def asked(name: str) -> str:
    """Return the bucket with the people who have asked this person to be their friend."""
    return f"asked/{name}"


def blocks(name: str) -> str:
    """Return the bucket with the people whom this person has blocked."""
    return f"blocks/{name}"


def read_by(name: str) -> str:
    """Return the reader whose cursor is how far a person has read; the one under the person's name is how far
    they have received."""
    return f"r:{name}"


def begins_for(name: str) -> str:
    """Return the reader whose cursor is where a conversation begins for a person who joined it."""
    return f"s:{name}"


# ── requests ─────────────────────────────────────────────────────────────────────────────────────

NOT_YOURS: Final = Verdict(
    VerdictKind.REFUSED,
    reason="there is no such conversation or person, or you may not do that there",
    cause="not_allowed",
)
"""The same text whether something does not exist or is not visible to the person, so that nothing leaks."""


REVOKED: Final = Verdict(
    VerdictKind.REFUSED, reason="your login is no longer valid; log in again", cause="not_allowed"
)


class Precondition(Struct, frozen=True, gc=False):
    """A condition of a transaction: an item exists in a bucket (with this body, if one is given), or does
    not."""

    bucket: str
    name: str
    body: bytes | None = None
    wanted: bool = True
    refusal: Verdict = NOT_YOURS


class Request(Struct, frozen=True, eq=False):
    """A frame as a request to the ledger. `line` is the line to append to the stream of `conv`."""

    message: Message
    conv: str
    line: LineFrame
    guards: tuple[Precondition, ...] = ()
    also: tuple[Write, ...] = ()
    joins: tuple[str, ...] = ()
    """people who are in the conversation from this line on"""
    parts: tuple[str, ...] = ()
    """people who are no longer in it after this line"""
    news: tuple[str, ...] = ()
    """other conversations that get something new"""
    live: LineFrame | None = None
    """what connected people are sent, if it is not the line itself"""
    data: bytes = b""
    """the data of the `server_ack`"""
    shown: bool = True
    """whether the sender may see the conversation and the number"""

    def writes(self, until: int, now: int) -> tuple[Write, ...]:
        """Return the one transaction of this request: check, admit, append."""
        message = self.message
        append = AppendEntry(stream(self.conv), encode(self.line), now, message.key, ends=True)
        write: Write = Admit(message, until, now, then=(append, *self.also))
        for guard in reversed(self.guards):
            # A sender who has lost the permission still gets the outcome of earlier requests.
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
    """Decode the `data` of a frame."""
    try:
        return optional_fields.decode(frame.data, as_)
    except (msgspec.DecodeError, ValueError) as problem:
        raise Malformed(f"the data of a {frame.type} does not fit: {problem}") from None


def check_size(frame: Frame) -> None:
    """Raise `TooLarge` if the `data` of a frame exceeds what chat stores."""
    if len(frame.data) > DATA_LIMIT:
        raise TooLarge(f"data has {len(frame.data)} bytes; {DATA_LIMIT} are allowed, send it in parts")


def message_of(frame: Frame, sender: str, recipient: str) -> Message:
    """Return the message in a frame. It carries only a digest of the text; the text itself is in the
    stream. Fields that the protocol does not know are refused, since no reader would get them."""
    if frame.seq_id is None:
        raise Malformed(f"a {frame.type} needs a seq_id: milliseconds, '_', a counter; mint one per message")
    if frame.more:
        raise Malformed(f"a {frame.type} has no field {', '.join(sorted(frame.more))}: put it into data")
    if frame.exp is not None and frame.exp < 10**11:
        raise Malformed(f"exp is a time in milliseconds since 1970, not {frame.exp}")
    said = blake2b(bytes(frame.data), digest_size=16).digest()
    return Message(sender, frame.seq_id, frame.type, recipient, said, expires=(frame.exp or 0) * MS)


def line_of(
    frame: Frame | LineFrame, sender: str, data: Raw | None = None, *, edited: bool = False
) -> LineFrame:
    """Return the stored form of a line: everything but its number, time and conversation, which the stream
    knows."""
    return LineFrame(
        frame.type, frame.seq_id, sender, frame.data if data is None else data, frame.exp, edited
    )


class EditData(Struct, frozen=True, omit_defaults=True):
    """The `data` of an edit: the number of the line, and its new text."""

    n: int
    data: Raw = NOTHING


def edit_of(line: LineFrame) -> int | None:
    """Return the number of the line that this line edits. The new text is stored in that line, so that
    deleting it leaves nothing behind."""
    return _decode_edit(line.data).n if line.type == "edit" else None


def edit_line(frame: Frame | LineFrame, sender: str, n: int, data: Raw) -> LineFrame:
    """Return an edit with the present text of its line; empty if that has been deleted since."""
    return line_of(frame, sender, Raw(msgspec.json.encode(EditData(n, data))))


# ── showing ──────────────────────────────────────────────────────────────────────────────────────

_decode: Final = msgspec.json.Decoder(LineFrame).decode
_decode_edit: Final = msgspec.json.Decoder(EditData).decode


def read_line(entry: StreamEntry) -> LineFrame:
    """Return the line that was stored as this entry, which must not have been deleted."""
    return _decode(entry.body)


def show(conv: str, n: int, line: LineFrame, at: int, attempt: int = 1) -> LineFrame:
    """Return a line as it is sent to its readers."""
    return LineFrame(
        line.type, line.seq_id, line.from_, line.data, line.exp, line.edited,
        conv, n, at // MS, attempt if attempt > 1 else None,
    )  # fmt: skip


def shown_line(entry: StreamEntry, now: int) -> LineFrame:
    """Return the line of an entry as far as it may be shown: a deleted or expired line keeps only its id."""
    if not entry.body:
        return _remains("deleted", entry)
    line = _decode(entry.body)
    return _remains("expired", entry) if is_over(line, now) and line.type != "edit" else line


def is_over(line: LineFrame, now: int) -> bool:
    """Return whether a line has expired, so that its text is no longer shown."""
    return 0 < (line.exp or 0) * MS <= now


def _remains(type_: str, entry: StreamEntry) -> LineFrame:
    scope, id_ = names_in(entry.key)
    return LineFrame(type_, id_, scope)


class _RemovedMember(Struct, frozen=True):
    user: str


_decode_removal: Final = msgspec.json.Decoder(_RemovedMember).decode


def leaver_in(line: LineFrame) -> str | None:
    """Return the person who is no longer in the group after this line."""
    match line.type:
        case "group_leave":
            return line.from_
        case "group_remove":
            return _decode_removal(line.data).user
        case _:
            return None
