"""What a sender wants to happen, and how it ended.

The law: a message that exists is valid. It is checked once, when it is made, and carries its own
key and fingerprint, so nobody downstream asks again. The body is bytes: the kernel never reads it.

`key` is (scope, id) as bytes, led by the time the id itself carries (six bytes of milliseconds, zero
if it carries none). Time first keeps the ledger's tree growing at its right edge however large it is;
the clear text behind it makes two different pairs impossible to confuse, which no hash can promise.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from duly.core.ids import time_of
from duly.core.lifecycle import State
from duly.core.units import MS
from duly.errors import (
    Conflict,
    Expired,
    FromTheFuture,
    LedgerUnavailable,
    Malformed,
    SenderError,
    Stale,
    TooLarge,
)

NAME_LIMIT: Final = 200
"""Longest scope, id, kind or recipient, in UTF-8 bytes: enough for any UUID, path or address."""

BODY_LIMIT: Final = 256 * 1024

TIME_LIMIT: Final = (1 << 48) * MS
"""Times are written into keys as 48-bit milliseconds; the year 10889."""

_NO_TIME: Final = bytes(6)
_ORDER_LIMIT: Final = 1 << 62


class Mode(Enum):
    """What a lane does with the messages of one order key."""

    REPLAY = "replay"
    """run every message, in order"""
    LATEST = "latest"
    """run the newest, mark the others superseded"""
    ANY = "any"
    """run at once; only its number counts, so that it leaves no gap"""


_MODES: Final = {mode: mode.value.encode() for mode in Mode}


class Order(Struct, frozen=True, gc=False):
    """Where a message stands among its sender's others.

    `n` is the sender's own counter. `after` is set by a hub that passes the message on: the number
    that came before it in the lane, so that the receiver need not wait for numbers that went elsewhere.
    """

    key: str = ""
    mode: Mode = Mode.REPLAY
    n: int | None = None
    after: int | None = None


class Message(Struct, frozen=True, gc=False):
    """What a sender wants to happen.

    >>> m = Message(scope="app-1", id="1702234567890_7", kind="lock_control", recipient="lock-1", body=b"{}")
    >>> m.key[6:]
    b'app-1\\x001702234567890_7'
    """

    scope: str
    id: str
    kind: str
    recipient: str
    body: bytes = b""
    time: int = 0
    """when the sender says it was made (µs); 0 if it does not say"""
    expires: int = 0
    """after this it must not take effect (µs); 0 if it never expires by itself"""
    order: Order | None = None
    made: int = 0
    """when it was made, by its own account: the id's time, else `time`, else 0"""
    key: bytes = b""
    fingerprint: bytes = b""

    def __post_init__(self) -> None:
        scope = _known_name("scope", self.scope)
        id_ = _name("id", self.id)
        kind = _known_name("kind", self.kind)
        recipient = _known_name("recipient", self.recipient)
        body = self.body
        if not isinstance(body, bytes):
            raise Malformed(f"body must be bytes, not {type(body).__name__}; encode it first")
        if len(body) > BODY_LIMIT:
            raise TooLarge(f"body has {len(body)} bytes, the limit is {BODY_LIMIT}; send it in parts")
        if not (0 <= self.time < TIME_LIMIT and 0 <= self.expires < TIME_LIMIT):
            raise Malformed(
                "time and expires are microseconds since 1970, or 0; check the units and the sender's clock"
            )
        order = self.order
        if order is not None:
            _check_order(order)
        made = time_of(self.id)
        lead = _NO_TIME if made is None else (made // MS).to_bytes(6, "big")
        force_setattr(self, "made", made or self.time)
        force_setattr(self, "key", b"%b%b\0%b" % (lead, scope, id_))
        meaning = b"%b\0%b\0%b" % (kind, recipient, body)
        if order is not None:
            meaning += b"\0%b\0%b" % (order.key.encode(), _MODES[order.mode])
        force_setattr(self, "fingerprint", blake2b(meaning, digest_size=8).digest())


def key_of(scope: str, id: str) -> bytes:
    """The key of (scope, id) without a message at hand."""
    made = time_of(id)
    lead = _NO_TIME if made is None else (made // MS).to_bytes(6, "big")
    return b"%b%b\0%b" % (lead, _known_name("scope", scope), _name("id", id))


def names_in(key: bytes) -> tuple[str, str]:
    """(scope, id) of a key."""
    scope, _, id_ = key[6:].partition(b"\0")
    return scope.decode(), id_.decode()


def _name(field: str, value: str) -> bytes:
    try:
        raw = value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise Malformed(f"{field} must be text that UTF-8 can carry, not {value!r}") from None
    if not raw:
        raise Malformed(f"{field} is empty; every message names its {field}")
    if len(raw) > NAME_LIMIT:
        raise TooLarge(f"{field} has {len(raw)} bytes, the limit is {NAME_LIMIT}; use a shorter one")
    if b"\0" in raw:
        raise Malformed(f"{field} contains a NUL character; remove it")
    return raw


@lru_cache(maxsize=4096)
def _remembered_name(field: str, value: str) -> bytes:
    return _name(field, value)


def _known_name(field: str, value: str) -> bytes:
    """The same, for names that come again and again, unlike ids."""
    return _remembered_name(field, value) if type(value) is str else _name(field, value)


def _check_order(order: Order) -> None:
    if len(order.key) > NAME_LIMIT:
        raise TooLarge(
            f"order key has {len(order.key)} characters, the limit is {NAME_LIMIT}; use a shorter one"
        )
    try:
        clear = not order.key or b"\0" not in order.key.encode()
    except UnicodeEncodeError:
        clear = False
    if not clear:
        raise Malformed(f"order key must be text that UTF-8 can carry, without NUL, not {order.key!r}")
    for n in (order.n, order.after):
        if n is not None and not -1 <= n < _ORDER_LIMIT:
            raise Malformed(f"order number {n} is out of range; count up from 0")


class Answer(Struct, frozen=True, gc=False):
    """How a message ended: a code the dialect understands, data, and a sentence for people."""

    code: int = 0
    data: bytes = b""
    reason: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Answer)


def pack_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def unpack_answer(raw: bytes) -> Answer:
    return _decoder.decode(raw)


class Word(Enum):
    """What admission says."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    STALE = "stale"
    EXPIRED = "expired"
    REFUSED = "refused"


class Verdict(Struct, frozen=True, gc=False):
    """What admission said of one message. A duplicate carries how far the first one has come."""

    word: Word
    state: State | None = None
    answer: Answer | None = None
    reason: str = ""
    retry: bool = False
    """refused for now only: the same message may be accepted later"""
    cause: str = ""
    """why it was refused, in one word: future, ageless, offline, denied, …"""

    def require(self) -> Verdict:
        """This verdict if the message was taken (now or before), else the error that says whose fault
        it is and what to do.

        >>> CONFLICT.require()
        Traceback (most recent call last):
        duly.errors.Conflict: this id was used before for something else; nothing was run; use a new id
        """
        match self.word:
            case Word.FRESH | Word.DUPLICATE:
                return self
            case Word.CONFLICT:
                raise Conflict(self.reason)
            case Word.STALE:
                raise Stale(self.reason)
            case Word.EXPIRED:
                raise Expired(self.reason)
            case Word.REFUSED if self.retry:
                raise LedgerUnavailable(self.reason)
            case Word.REFUSED:
                raise (FromTheFuture if self.cause == "future" else SenderError)(self.reason)

    @property
    def fresh(self) -> bool:
        return self.word is Word.FRESH

    @property
    def named(self) -> str:
        """The word under which a refusal is counted and recorded."""
        return self.cause or self.word.value


FRESH: Final = Verdict(Word.FRESH)

CONFLICT: Final = Verdict(
    Word.CONFLICT,
    reason="this id was used before for something else; nothing was run; use a new id",
)

FORGOTTEN: Final = Verdict(
    Word.STALE, reason="its id may have been forgotten already; send it again with a new id"
)
