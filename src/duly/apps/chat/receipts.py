"""Receipts: who has received and read a line, and how many lines a reader has not read.

The law: everything here is read from the ledger, so every hub gives the same answer, also after a restart.
Each reader has two cursors: how far they have acknowledged, and how far they have read. If a reader does not
acknowledge a line, their hub stores a note (`AwaitedReceipt`) a second after it was sent, and updates it at
every further attempt; most readers acknowledge sooner and get no note. A note that the reader's cursor has
passed is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from duly.apps.chat import conversations as c
from duly.core.messages import Message, names_in
from duly.core.operations import DropItem, PutItem, Write
from duly.core.units import MS
from duly.runtime.trail import Hop, Trail, begin_of
from duly.storage.ledger import Ledger, Record, StreamEntry

SHOWN: Final = 1_000
"""How many recipients a trace names; beyond that it shows numbers."""
UNREAD_COUNTED: Final = 1_000
"""Unread lines are counted up to this number."""
PAGE: Final = 200
DELIVERED, READ, AGAIN = "delivered", "read", "sent again"


class AwaitedReceipt(Struct, frozen=True, array_like=True):
    """Unacknowledged lines of a reader: after which, up to which, how often sent, since when
    (milliseconds)."""

    acked: int
    told: int
    attempt: int
    since: int


class Recipient(Struct, frozen=True, omit_defaults=True):
    """The receipt of one recipient of a line. `state` is `read`, `delivered`, `sent` (not acknowledged) or
    `waiting` (not sent yet, because the recipient was not connected). Times are in milliseconds."""

    name: str
    state: str
    acknowledged: int = 0
    """up to which line of the conversation"""
    read: int = 0
    attempts: int = 0
    """how often it was sent"""
    since: int = 0
    """since when it waits: for the acknowledgement, or to be sent"""


_decode: Final = msgspec.json.Decoder(AwaitedReceipt).decode


def note_waiting(conv: str, name: str, waiting: AwaitedReceipt | None) -> Write:
    """Return the operation that notes a reader who does not acknowledge; None removes the note."""
    bucket = c.waiting(conv)
    return DropItem(bucket, name) if waiting is None else PutItem(bucket, name, msgspec.json.encode(waiting))


def author_of(entry: StreamEntry) -> str:
    """Return the sender of a line."""
    return names_in(entry.key)[0] if entry.key else ""


async def recipients(ledger: Ledger, conv: str, entry: StreamEntry) -> list[Recipient]:
    """Return the receipts of an entry of a conversation, one for each recipient. A member who joined later
    and may not see it is none, though their cursor is beyond it."""
    if c.is_group(conv):
        names = set(await ledger.bucket(c.members(conv)))
    else:
        names = set(c.pair_in(conv)) or {conv.removeprefix("~")}
    cursors = await ledger.cursors(c.stream(conv))
    notes = await ledger.bucket(c.waiting(conv))
    found = []
    for name in sorted(names - {author_of(entry)}):
        if cursors.get(c.begins_for(name), 0) > entry.n:
            continue
        note = _decode(notes[name]) if name in notes else None
        acknowledged, read = cursors.get(name, 0), cursors.get(c.read_by(name), 0)
        found.append(_recipient(name, entry, max(acknowledged, read), read, note))
    return found


def _recipient(
    name: str, entry: StreamEntry, acknowledged: int, read: int, note: AwaitedReceipt | None
) -> Recipient:
    n = entry.n
    if read >= n:
        return Recipient(name, "read", acknowledged, read)
    if acknowledged >= n:
        return Recipient(name, "delivered", acknowledged, read)
    if note is not None and note.acked < n <= note.told:
        return Recipient(name, "sent", acknowledged, read, note.attempt, note.since)
    return Recipient(name, "waiting", acknowledged, read, since=entry.at // MS)


async def trace(ledger: Ledger, record: Record, for_: str | None = None) -> dict[str, object] | None:
    """Return where a chat message is stored, and the receipts of its recipients, those without it first.
    Returns None for any other message, or if `for_` is a person who is not in the conversation."""
    conv = conversation_of(record.message)
    answer = record.answer
    if conv is None or answer is None or not answer.data.isdigit():
        return None
    if for_ is not None and c.is_group(conv) and await ledger.item(c.members(conv), for_) is None:
        return None
    n = int(answer.data)
    found = await ledger.entries(c.stream(conv), n - 1, 1)
    if not found or found[0].n != n or found[0].key != record.message.key:
        return None
    addressed = await recipients(ledger, conv, found[0])
    addressed.sort(key=lambda one: one.state in ("delivered", "read"))
    states = [one.state for one in addressed]
    return {
        "conv": conv,
        "n": n,
        "of": len(addressed),
        "delivered": sum(state in ("delivered", "read") for state in states),
        "read": states.count("read"),
        "recipients": [msgspec.to_builtins(one) for one in addressed[:SHOWN]],
    }


async def hops(trail: Trail, record: Record) -> list[Hop]:
    """Return when a line was sent to recipients again, and when they first received and read it."""
    conv, answer = conversation_of(record.message), record.answer
    if conv is None or answer is None or not answer.data.isdigit():
        return []
    n, found = int(answer.data), []
    seen: set[tuple[str, str]] = set()
    for hop in await trail.of(trail_key(conv), begin_of(record)):
        if hop.what == AGAIN:
            name, _, after = hop.detail.rpartition(" ")
            stored = hop.time >= record.accepted_at // MS  # else it was about lines before this one
            if stored and int(after) < n and (DELIVERED, name) not in seen:
                found.append(msgspec.structs.replace(hop, what="sent", detail=name))
        elif hop.attempt >= n and (hop.what, hop.detail) not in seen:
            seen.add((hop.what, hop.detail))
            found.append(msgspec.structs.replace(hop, attempt=0))
    return found


def note_receipts(trail: Trail, conv: str, readers: Iterable[tuple[str, int]]) -> None:
    """Note up to which line readers have come."""
    hops = [
        (READ, n, reader[2:]) if reader.startswith("r:") else (DELIVERED, n, reader) for reader, n in readers
    ]
    trail.note_all(trail_key(conv), hops)


def note_again(trail: Trail, conv: str, name: str, attempt: int, acked: int) -> None:
    """Note that the lines after `acked` are sent to a reader once more."""
    trail.note(trail_key(conv), AGAIN, attempt, f"{name} {acked}")


def trail_key(conv: str) -> bytes:
    """Return the key under which the trail records what readers do in a conversation; no message has such a
    key."""
    return b"\0\0\0\0\0\0\0chat\0" + conv.encode()


def conversation_of(message: Message) -> str | None:
    """Return the conversation of a line, from its message."""
    match message.kind:
        case "one_chat":
            return c.direct(message.scope, message.recipient)
        case "group_chat" | "edit" | "delete":
            return message.recipient
        case _:
            return None


async def unread(ledger: Ledger, conv: str, me: str, read: int, last: int) -> int:
    """Return the number of later lines by others, up to `UNREAD_COUNTED`. Deleted and expired lines do not
    count."""
    count, now = 0, ledger.clock.now()
    while read < last and count < UNREAD_COUNTED:
        page = await ledger.entries(c.stream(conv), read, PAGE)
        if not page:
            break
        read = page[-1].n
        count += sum(_is_news(entry, me, now) for entry in page)
    return min(count, UNREAD_COUNTED)


def _is_news(entry: StreamEntry, me: str, now: int) -> bool:
    if not entry.body or author_of(entry) == me:
        return False
    line = c.read_line(entry)
    return line.type in c.LINES and not c.is_over(line, now)
