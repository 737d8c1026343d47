"""Conversions of messages, records and deliveries to and from rows, for both SQL ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import astuple, replace

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Order, names_in, unpack_answer
from duly.core.operations import (
    Admit,
    Delivery,
    DeliveryKind,
    DeliveryNames,
    DeliveryRef,
    OpenDelivery,
    RecordRefusal,
)
from duly.core.trusted_time import Floor
from duly.storage.ledger import AgedMessage, Record

FetchedRow: TypeAlias = Sequence[Any]
"""A row as a database returns it; the statement decides the types of its columns."""

_encode_order: Final = msgspec.msgpack.Encoder().encode
_decode_order: Final = msgspec.msgpack.Decoder(Order).decode

STATE_NUMBERS: Final = {state: int(state) for state in State}
"""The numbers of states in the database; looking one up is five times cheaper than converting it."""

STATES: Final = {int(state): state for state in State}
"""The states by these numbers."""

_KINDS: Final = tuple(DeliveryKind)
_KIND_NUMBERS: Final = {kind: int(kind) for kind in DeliveryKind}


# ── values to rows ───────────────────────────────────────────────────────────────────────────────


def admission_row(write: Admit) -> tuple[object, ...]:
    """Return the row of a message that is admitted."""
    m = write.message
    at = write.at
    return (
        m.key,
        m.fingerprint,
        m.kind,
        m.recipient,
        STATE_NUMBERS[write.state],
        write.until,
        at,
        at,
        m.time,
        m.expires,
        None if m.order is None else _encode_order(m.order),
        m.body,
        write.listed,
    )


def fixed_row(write: Admit) -> tuple[Any, ...]:
    """Return the columns of a message that never change, as a SQLite ledger orders them."""
    m, order = write.message, write.message.order
    return (
        m.key,
        m.fingerprint,
        m.kind,
        m.recipient,
        write.until,
        write.at,
        m.time,
        m.expires,
        None if order is None else _encode_order(order),
        m.body,
        write.listed,
    )


def names(ref: DeliveryRef) -> DeliveryNames:
    """Return the columns that name a delivery."""
    return ref.key, ref.channel, ref.recipient, ref.round


def row_of(d: Delivery) -> tuple[object, ...]:
    """Return the row of a delivery."""
    ref, error = d.ref, d.error and plain(d.error)
    kind, state = _KIND_NUMBERS[ref.kind], STATE_NUMBERS[d.state]
    name = (ref.key, ref.channel, ref.recipient, ref.round)
    return (*name, state, d.attempt, d.due, d.expires, d.worker, error, kind, d.in_doubt)


def sqlite_row_of(d: Delivery) -> tuple[object, ...]:
    """Return the row of a delivery in the order of its fields; SQLite takes enums for numbers."""
    if d.error and not d.error.isprintable():
        d = replace(d, error=plain(d.error))
    return astuple(d.ref) + astuple(d)[1:]


def floor_row(floor: Floor) -> tuple[int, int, int, int, int, int]:
    """Return the row of the floor."""
    return floor.until, floor.trusted, floor.claim, floor.mended, floor.barrier, floor.restored


def refusal_row(write: RecordRefusal) -> tuple[object, ...]:
    """Return the row of a refusal."""
    return plain(write.scope), plain(write.id), write.word, plain(write.reason), write.at


def plain(text: str) -> str:
    """Return text with the characters replaced that a database cannot store, so that no stranger's text makes
    a commit fail."""
    return text if text.isprintable() else text.encode(errors="replace").decode().replace("\0", "\ufffd")


# ── rows to values ───────────────────────────────────────────────────────────────────────────────


def message_of(row: FetchedRow) -> Message:
    """Return a message from key, kind, recipient, body, time, expires, position."""
    key, kind, recipient, body, time, expires, position = row
    scope, id_ = names_in(key)
    order = None if position is None else _decode_order(position)
    return Message(scope, id_, kind, recipient, bytes(body), time, expires, order)


def answer_of(raw: bytes | None) -> Answer | None:
    """Return an answer from its column."""
    return None if raw is None else unpack_answer(raw)


def record_of(row: FetchedRow) -> Record:
    """Return a record: the columns of a message, then state, answer and times."""
    state, answer, until, accepted_at, moved_at = row[7:]
    return Record(message_of(row[:7]), STATES[state], answer_of(answer), until, accepted_at, moved_at)


def delivery_of(row: FetchedRow) -> Delivery:
    """Return a delivery from its row."""
    key, channel, recipient, round_, state, attempt, due, expires, worker, error, kind, in_doubt = row
    ref = DeliveryRef(key, channel, recipient, round_, _KINDS[kind])
    return Delivery(ref, STATES[state], attempt, due, expires, worker, error, bool(in_doubt))


def open_of(row: FetchedRow) -> OpenDelivery:
    """Return an open delivery: the columns of its message, the message's state and time of acceptance, its
    own columns."""
    return OpenDelivery(message_of(row[:7]), STATES[row[7]], delivery_of(row[9:]), row[8])


def aged_of(found: Iterable[FetchedRow]) -> list[AgedMessage]:
    """Return aged messages from accepted_at, a message's key, and a delivery's columns, which are null if
    there is none."""
    aged: dict[bytes, AgedMessage] = {}
    for accepted_at, key, *row in found:
        one = aged.setdefault(key, AgedMessage(accepted_at, key, []))
        if row[0] is not None:
            one.deliveries.append(delivery_of(row))
    return [*aged.values()]
