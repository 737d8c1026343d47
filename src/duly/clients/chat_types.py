"""The values of `duly.Chat`: lines, receipts, typing and presence.

The law: these are values; nothing here talks to a hub.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from duly.errors import Malformed
from duly.wire import frames
from duly.wire.frames import Frame

JsonObject: TypeAlias = dict[str, Any]


class SentLine(Struct, frozen=True):
    """Where a line was stored: its conversation and its number there."""

    conv: str
    n: int
    data: Any = None


class Line(Struct, frozen=True):
    """One entry of a conversation. `type` is `one_chat`, `group_chat`, `edit`, `delete`, `group_join` …; of a
    line that was deleted or has expired it is `deleted` or `expired`.

    >>> Line("ann+bob", 1, "one_chat", "ann", {"text": "hello"}).text
    'hello'
    """

    conv: str
    n: int
    type: str
    sender: str
    data: Any = None
    time: int = 0
    """milliseconds since 1970"""
    id: str = ""
    edited: bool = False

    @property
    def text(self) -> str:
        """The text of the line; empty if it has none."""
        return str(self.data.get("text", "")) if isinstance(self.data, dict) else str(self.data or "")


class Receipt(Struct, frozen=True):
    """A member has received everything up to `n`, or has read it."""

    conv: str
    n: int
    reader: str
    state: Literal["delivered", "read"]


class _ReceiptState(Struct, frozen=True):
    state: Literal["delivered", "read"]


class Typing(Struct, frozen=True):
    """A member is typing."""

    conv: str
    sender: str


class Presence(Struct, frozen=True):
    """A friend went online or offline."""

    sender: str
    data: Any


class Receipts(Struct, frozen=True):
    """How many of a conversation's members have received a line, and how many have read it."""

    conv: str
    n: int
    state: Literal["accepted", "delivered", "read"]
    of: int
    delivered: int
    read: int
    attempts: int = 0
    delivered_to: list[str] = []
    read_by: list[str] = []


class ConversationPage(Struct, frozen=True):
    """A page of a conversation, as the hub sends it."""

    lines: list[Frame]


class ConversationList(Struct, frozen=True):
    """A page of the conversations of a person; `next` is the last one on it, if there are more."""

    conversations: list[JsonObject]
    next: str = ""


News: TypeAlias = Line | Receipt | Typing | Presence


def line_of(frame: Frame) -> Line:
    """Decode a line from its frame."""
    return Line(
        frame.conv or "",
        frame.n or 0,
        frame.type,
        frame.from_ or "",
        frames.load(frame.data),
        frame.time or 0,
        frame.seq_id or "",
        frame.edited,
    )


def receipt_of(frame: Frame) -> Receipt:
    """Decode a receipt from its frame; raises `Malformed` for a state that this version does not know."""
    try:
        state = msgspec.json.decode(frame.data, type=_ReceiptState).state
    except msgspec.DecodeError as problem:
        raise Malformed(f"a receipt says {bytes(frame.data)[:80]!r}: {problem}") from None
    return Receipt(frame.conv or "", frame.n or 0, frame.from_ or "", state)
