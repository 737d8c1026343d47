"""Messages, answers and verdicts.

A `Message` object is always valid: it is checked once, when it is created, and carries its own key and
fingerprint, so that later code need not check again. Its body is bytes, which the kernel never reads.

`key` is (scope, id) as bytes, prefixed with the time in the id (six bytes of milliseconds, zero if there is
none). With the time first, the ledger's tree grows only at its right edge, however large it is. The clear
text after it, unlike a hash, makes it impossible to confuse two different pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from duly.core.ids import read
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
"""The greatest length of a scope, id, kind or recipient, in UTF-8 bytes: enough for any UUID, path or
address."""

BODY_LIMIT: Final = 256 * 1024

TIME_LIMIT: Final = (1 << 48) * MS
"""Times are stored in keys as 48-bit milliseconds: until the year 10889."""

IDS_KEPT: Final = 1_024
"""How many parsed ids are cached: about as many as are under way. More would only use more memory."""

_NO_TIME: Final = bytes(6)
_ORDER_LIMIT: Final = 1 << 62


class Mode(StrEnum):
    """How a lane treats the messages of one order key."""

    REPLAY = "replay"
    """run every message in order"""
    LATEST = "latest"
    """run the newest; the others are superseded"""
    ANY = "any"
    """run at once; its number counts only so that it leaves no gap"""


class Order(Struct, frozen=True, gc=False):
    """The position of a message among those of its sender.

    `n` is the sender's own counter. `after` is set by a hub that relays the message: it is the number before
    it in the lane, so that the receiver does not wait for numbers that went to other recipients.
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
    """when the message was created according to its sender (µs); 0 if not given"""
    expires: int = 0
    """after this time it must not take effect (µs); 0 if it does not expire"""
    order: Order | None = None
    made: int = 0
    """its own creation time: the id's time, else `time`, else 0"""
    key: bytes = b""
    fingerprint: bytes = b""

    def __post_init__(self) -> None:
        body, order = self.body, self.order
        try:
            made, _, lead, id_ = parts_of(self.id)
            key = lead + _scope(self.scope) + id_
            meaning = _address(self.kind, self.recipient)
        except TypeError:  # of what cannot even be looked up
            raise Malformed("scope, id, kind and recipient must be text that UTF-8 can carry") from None
        if type(body) is not bytes:
            raise Malformed(f"body must be bytes, not {type(body).__name__}; encode it first")
        if len(body) > BODY_LIMIT:
            raise TooLarge(f"body has {len(body)} bytes, the limit is {BODY_LIMIT}; send it in parts")
        if not (0 <= self.time < TIME_LIMIT and 0 <= self.expires < TIME_LIMIT):
            raise Malformed(
                "time and expires are microseconds since 1970, or 0; check the units and the sender's clock"
            )
        meaning += body
        if order is not None:
            meaning += _place(order.key, order.mode)
            if not (order.n is None or -1 <= order.n < _ORDER_LIMIT):
                raise _out_of_range(order.n)
            if not (order.after is None or -1 <= order.after < _ORDER_LIMIT):
                raise _out_of_range(order.after)
        force_setattr(self, "made", made or self.time)
        force_setattr(self, "key", key)
        force_setattr(self, "fingerprint", blake2b(meaning, digest_size=8).digest())


def key_of(scope: str, id: str) -> bytes:
    """Return the key of (scope, id) without a message at hand."""
    _, _, lead, id_ = parts_of(id)
    return lead + _scope(scope) + id_


def names_in(key: bytes) -> tuple[str, str]:
    """Return the scope and the id of a key."""
    scope, _, id_ = key[6:].partition(b"\0")
    return scope.decode(), id_.decode()


# The encoded names are cached: names repeat, and an id is used at least once more, with its answer.


@lru_cache(maxsize=IDS_KEPT)
def parts_of(id: str) -> tuple[int | None, int | None, bytes, bytes]:
    """Return the parts of an id: its time (µs), its counter, and the prefix and suffix of its key."""
    try:
        made, n = read(id)
    except TypeError:
        made = n = None  # not text, and refused as such
    raw = _name("id", id) if n is None else id.encode()  # digits and an underscore need no check
    return made, n, _NO_TIME if made is None else (made // MS).to_bytes(6, "big"), raw


@lru_cache(maxsize=4096)
def _scope(scope: str) -> bytes:
    return _name("scope", scope) + b"\0"


@lru_cache(maxsize=4096)
def _address(kind: str, recipient: str) -> bytes:
    return b"%b\0%b\0" % (_name("kind", kind), _name("recipient", recipient))


@lru_cache(maxsize=4096)
def _place(key: str, mode: Mode) -> bytes:
    if len(key) > NAME_LIMIT:
        raise TooLarge(f"order key has {len(key)} characters, the limit is {NAME_LIMIT}; use a shorter one")
    try:
        raw = key.encode()
    except UnicodeEncodeError:
        raw = b"\0"
    if b"\0" in raw:
        raise Malformed(f"order key must be text that UTF-8 can carry, without NUL, not {key!r}")
    return b"\0%b\0%b" % (raw, mode.value.encode())


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


def _out_of_range(n: int) -> Malformed:
    return Malformed(f"order number {n} is out of range; count up from 0")


class Answer(Struct, frozen=True, gc=False):
    """The outcome of a message: a code of its dialect, data, and a sentence for people."""

    code: int = 0
    data: bytes = b""
    reason: str = ""


pack_answer: Final[Callable[[Answer], bytes]] = msgspec.msgpack.Encoder().encode
"""Packs an answer into the bytes that are stored."""
unpack_answer: Final[Callable[[bytes], Answer]] = msgspec.msgpack.Decoder(Answer).decode
"""Unpacks an answer from stored bytes."""


class VerdictKind(StrEnum):
    """The kinds of verdicts on a message at admission."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    STALE = "stale"
    EXPIRED = "expired"
    REFUSED = "refused"


_NAMES: Final = {kind: kind.value for kind in VerdictKind}
"""Cached, because an enum computes its value at every access."""


class Verdict(Struct, frozen=True, gc=False):
    """The verdict on a message at admission. For a duplicate it carries the state of the first one."""

    kind: VerdictKind
    state: State | None = None
    answer: Answer | None = None
    reason: str = ""
    retry: bool = False
    """refused only for now: the same message may be accepted later"""
    cause: str = ""
    """why it was refused, in one word: future, ageless, offline, denied, rate_limited, …"""
    wait: int = 0
    """how long to wait before the next try (µs); 0 if not given"""

    def require(self) -> Verdict:
        """Return this verdict if the message was accepted, now or earlier; otherwise raise the error that
        says what to do.

        >>> CONFLICT.require()
        Traceback (most recent call last):
        duly.errors.Conflict: this id was used before for something else; nothing was run; use a new id
        """
        match self.kind:
            case VerdictKind.FRESH | VerdictKind.DUPLICATE:
                return self
            case VerdictKind.CONFLICT:
                raise Conflict(self.reason)
            case VerdictKind.STALE:
                raise Stale(self.reason)
            case VerdictKind.EXPIRED:
                raise Expired(self.reason)
            case VerdictKind.REFUSED if self.retry:
                raise LedgerUnavailable(self.reason)
            case VerdictKind.REFUSED:  # pragma: no branch
                raise (FromTheFuture if self.cause == "future" else SenderError)(self.reason)

    @property
    def fresh(self) -> bool:
        """Whether the message was admitted just now."""
        return self.kind is VerdictKind.FRESH

    @property
    def named(self) -> str:
        """The word under which a refusal is counted and recorded."""
        return self.cause or _NAMES[self.kind]


FRESH: Final = Verdict(VerdictKind.FRESH)

CONFLICT: Final = Verdict(
    VerdictKind.CONFLICT,
    reason="this id was used before for something else; nothing was run; use a new id",
)

FORGOTTEN: Final = Verdict(
    VerdictKind.STALE, reason="its id may have been forgotten already; send it again with a new id"
)
