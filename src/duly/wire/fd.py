"""The FD dialect: a small task protocol in JSON over MQTT.

The law: decoding returns a valid value or raises a `SenderError` that says what is wrong. A valid sender's
name is safe to build a topic from. Times are seconds on the wire, microseconds here.

`duly.wire.fd_content` defines how the bytes in a message are encoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from math import isinf
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct

from duly.core.messages import NAME_LIMIT, TIME_LIMIT
from duly.core.units import SECOND
from duly.errors import Malformed, TooLarge
from duly.wire import any_json, limits
from duly.wire.fd_content import (
    NOTHING,
    Content,
    Form,
    content_of,
    form_mark,
    read_content,
    write_content,
)
from duly.wire.fields import Fields

__all__ = [
    "FIELDS_OF", "NOTHING", "PREFIX", "SIZE_LIMIT", "Content", "Fd", "FdAck", "FdComplete", "FdFailed",
    "FdKind", "FdPending", "FdStatus", "Form", "check_prefix", "check_username", "content_of", "decode",
    "decode_ack", "decode_complete", "decode_failed", "decode_pending", "decode_status", "encode",
    "is_question", "parse_topic", "question", "read_content", "topic_of",
]  # fmt: skip

T = TypeVar("T")

SIZE_LIMIT: Final = limits.SIZE_LIMIT
PREFIX: Final = "nodes"

NAMES_CACHED: Final = 4_096
"""How many valid names and topics are cached: a node talks to the same few all the time."""


class FdKind(StrEnum):
    """The last level of a topic."""

    PENDING = "pending"
    ACK = "ack"
    COMPLETE = "complete"
    FAILED = "failed"
    STATUS = "status"


class FdPending(Struct, frozen=True, gc=False):
    """A task."""

    sender: str
    receiver: str
    msg_id: str
    action: str
    time: int = 0
    exp: int = 0
    payload: Content = NOTHING
    sig: str = ""
    kid: str = ""
    old_names: bool = False
    """the peer uses the older field names, and is answered with them"""
    order: bytes = b""
    """JSON from a gateway: its position among an app's tasks, for a receiver that orders by itself"""
    traceparent: str = ""
    """W3C trace context; not part of the task's meaning, and not signed"""

    @property
    def form(self) -> Form | None:
        """The form of the payload; None if the payload does not show it."""
        return self.payload.form


class FdAck(Struct, frozen=True, gc=False):
    """The task is durably received. It may be sent again while the task runs, with its progress."""

    msg_id: str
    sig: str = ""
    kid: str = ""
    old_names: bool = False
    progress: Content = NOTHING


class FdComplete(Struct, frozen=True, gc=False):
    """The task is done."""

    msg_id: str
    value: Content = NOTHING
    sig: str = ""
    kid: str = ""
    old_names: bool = False


class FdFailed(Struct, frozen=True, gc=False):
    """The task has failed."""

    msg_id: str
    error: Content = NOTHING
    sig: str = ""
    kid: str = ""
    old_names: bool = False


class FdStatus(Struct, frozen=True):
    """The status of a node. `session` distinguishes a late will from the status of a newer connection;
    `heartbeat` says when the next status is due."""

    time: int = 0
    online: bool | None = None
    battery: int | None = None
    rssi: int | None = None
    ip: str = ""
    version: str = ""
    uptime: int = 0
    session: str = ""
    data: Content = NOTHING
    sig: str = ""
    kid: str = ""
    old_names: bool = False
    heartbeat: int = 0
    """seconds between two reports; 0 if not given"""


_QUESTION: Final = "who."


def question(token: str) -> str:
    """Return the `session` of a status message that asks the node of that name to report its status now.

    Status is the only topic that every account, devices included, may both read and write under its own name.
    """
    return f"{_QUESTION}{token}"


def is_question(status: FdStatus) -> bool:
    """Return whether this status message is only a request for a status."""
    return status.session.startswith(_QUESTION)


Fd: TypeAlias = FdPending | FdAck | FdComplete | FdFailed | FdStatus


_ABSENT: Final = Raw(b"")


class FdTaskFields(Struct, omit_defaults=True, gc=False):
    """The fields of a task, under old and new names. Further fields are the peer's own, even if another kind
    of message uses that name."""

    sender: str | None = None
    sender_client_id: str | None = None
    receiver: str | None = None
    receiver_client_id: str | None = None
    msg_id: str | None = None
    message_id: str | None = None
    action: str | None = None
    time: int | float | None = None
    timestamp: int | float | None = None
    exp: int | float | None = None
    expiration: int | float | None = None
    payload: Raw = _ABSENT
    order: Raw = _ABSENT
    sig: str | None = None
    kid: str | None = None
    enc: str | None = None
    traceparent: Raw = _ABSENT


class FdAnswerFields(Struct, omit_defaults=True, gc=False):
    """The fields of an answer."""

    msg_id: str | None = None
    message_id: str | None = None
    value: Raw = _ABSENT
    error: Raw = _ABSENT
    sig: str | None = None
    kid: str | None = None
    progress: Raw = _ABSENT
    enc: str | None = None


class FdStatusFields(Struct, omit_defaults=True, gc=False):
    """The fields of a status."""

    time: int | float | None = None
    timestamp: int | float | None = None
    online: bool | None = None
    battery: int | None = None
    rssi: int | None = None
    ip: str | None = None
    version: str | None = None
    uptime: int | float | None = None
    session: str | None = None
    heartbeat: int | float | None = None
    data: Raw = _ABSENT
    sig: str | None = None
    kid: str | None = None
    enc: str | None = None


FIELDS_OF: Final[dict[FdKind, type[Struct]]] = {
    FdKind.PENDING: FdTaskFields,
    FdKind.ACK: FdAnswerFields,
    FdKind.COMPLETE: FdAnswerFields,
    FdKind.FAILED: FdAnswerFields,
    FdKind.STATUS: FdStatusFields,
}
"""The type that decodes and encodes each kind of message."""

_read_task: Final = msgspec.json.Decoder(FdTaskFields).decode
_read_answer: Final = msgspec.json.Decoder(FdAnswerFields).decode
_read_status: Final = msgspec.json.Decoder(FdStatusFields).decode
_read_fields: Final = msgspec.json.Decoder(Fields).decode
_NUMBERS: Final = frozenset({"time", "timestamp", "exp", "expiration", "uptime", "heartbeat"})
_LARGE, _SMALL = Raw(b"1e300"), Raw(b"-1e300")
_write: Final = msgspec.json.Encoder().encode
_TRACE: Final = re.compile(rb'"[0-9a-f-]{55}"')
_FORMS: Final = {form.value: form for form in Form}
# ── in ───────────────────────────────────────────────────────────────────────────────────────────


def decode(kind: FdKind, text: bytes, form: Form | None = None) -> Fd | None:
    """Return the message in these bytes; `form` is the known form of this peer. Returns None for an empty
    status, by which a node removes its own.

    >>> decode(FdKind.ACK, b'{"msg_id": "1"}').msg_id
    '1'
    """
    match kind:
        case FdKind.PENDING:
            return decode_pending(text, form)
        case FdKind.ACK:
            return decode_ack(text, form)
        case FdKind.COMPLETE:
            return decode_complete(text, form)
        case FdKind.FAILED:
            return decode_failed(text, form)
        case FdKind.STATUS:
            return decode_status(text, form)


def decode_pending(text: bytes, form: Form | None = None) -> FdPending:
    """Decode a task; raises `Malformed`."""
    w = _wire(text, _read_task)
    msg_id, old = _id(w)
    receiver = w.receiver or w.receiver_client_id or ""
    return FdPending(
        check_username(w.sender or w.sender_client_id or "", "sender"),
        check_username(receiver, "receiver") if receiver else "",
        msg_id,
        _name(w.action or "", "action"),
        _time(w.time if w.time is not None else w.timestamp),
        _expiry(w.exp if w.exp is not None else w.expiration),
        _content(w, w.payload, form),
        w.sig or "",
        w.kid or "",
        old,
        b"" if w.order is _ABSENT else bytes(w.order),
        "" if w.traceparent is _ABSENT else _trace_in(bytes(w.traceparent)),
    )


def _trace_in(raw: bytes) -> str:
    """Return the trace of a task; empty if the field is invalid, which never makes a task malformed."""
    return raw[1:-1].decode() if _TRACE.fullmatch(raw) else ""


def decode_ack(text: bytes, form: Form | None = None) -> FdAck:
    """Decode the ack of a task; raises `Malformed`."""
    w = _wire(text, _read_answer)
    msg_id, old = _id(w)
    return FdAck(msg_id, w.sig or "", w.kid or "", old, _content(w, w.progress, form))


def decode_complete(text: bytes, form: Form | None = None) -> FdComplete:
    """Decode the result of a task that is done; raises `Malformed`."""
    w = _wire(text, _read_answer)
    msg_id, old = _id(w)
    return FdComplete(msg_id, _content(w, w.value, form), w.sig or "", w.kid or "", old)


def decode_failed(text: bytes, form: Form | None = None) -> FdFailed:
    """Decode the error of a task that has failed; raises `Malformed`."""
    w = _wire(text, _read_answer)
    msg_id, old = _id(w)
    return FdFailed(msg_id, _content(w, w.error, form), w.sig or "", w.kid or "", old)


def decode_status(text: bytes, form: Form | None = None) -> FdStatus | None:
    """Decode the status of a node; None if it is empty, by which a node removes its own."""
    if not text:
        return None
    w = _wire(text, _read_status)
    return FdStatus(
        time=_time(w.time if w.time is not None else w.timestamp),
        online=w.online,
        battery=w.battery,
        rssi=w.rssi,
        ip=w.ip or "",
        version=w.version or "",
        uptime=_time(w.uptime),
        session=w.session or "",
        heartbeat=_time(w.heartbeat),
        data=_content(w, w.data, form),
        sig=w.sig or "",
        kid=w.kid or "",
        old_names=w.time is None and w.timestamp is not None,
    )


# ── out ──────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Fd, form: Form = Form.BASE64) -> bytes:
    """Return the bytes of a message, with its contents in this form.

    >>> encode(FdComplete("1", Content(b"done")), Form.JSON)
    b'{"msg_id":"1","value":"done"}'
    """
    text = _write(_FIELDS[type(message)](message, form))
    if len(text) > SIZE_LIMIT:
        raise TooLarge(f"this message takes {len(text)} bytes, the limit is {SIZE_LIMIT}; send it in parts")
    return text


def _pending(m: FdPending, form: Form) -> FdTaskFields:
    check_username(m.sender, "sender")
    check_username(m.receiver, "receiver")
    _name(m.msg_id, "msg_id")
    _name(m.action, "action")
    payload = write_content(m.payload, form)
    time, exp = m.time // SECOND, m.exp // SECOND
    w = FdTaskFields(
        action=m.action,
        payload=Raw(payload),
        order=Raw(m.order) if m.order else _ABSENT,
        traceparent=Raw(_write(m.traceparent)) if m.traceparent else _ABSENT,
        sig=m.sig or None,
        kid=m.kid or None,
        enc=form_mark(payload, form),
    )
    if m.old_names:
        w.sender_client_id, w.receiver_client_id, w.message_id = m.sender, m.receiver, m.msg_id
        w.timestamp, w.expiration = time, exp
    else:
        w.sender, w.receiver, w.msg_id, w.time, w.exp = m.sender, m.receiver, m.msg_id, time, exp
    return w


def _ack(m: FdAck, form: Form) -> FdAnswerFields:
    w = _answer(m)
    if m.progress is not NOTHING:
        raw = write_content(m.progress, form)
        w.progress, w.enc = Raw(raw), form_mark(raw, form)
    return w


def _complete(m: FdComplete, form: Form) -> FdAnswerFields:
    w, raw = _answer(m), write_content(m.value, form)
    w.value, w.enc = Raw(raw), form_mark(raw, form)
    return w


def _failed(m: FdFailed, form: Form) -> FdAnswerFields:
    w, raw = _answer(m), write_content(m.error, form)
    w.error, w.enc = Raw(raw), form_mark(raw, form)
    return w


def _answer(m: FdAck | FdComplete | FdFailed) -> FdAnswerFields:
    msg_id = _name(m.msg_id, "msg_id")
    w = FdAnswerFields(message_id=msg_id) if m.old_names else FdAnswerFields(msg_id)
    if m.sig or m.kid:
        w.sig, w.kid = m.sig or None, m.kid or None
    return w


def _status(m: FdStatus, form: Form) -> FdStatusFields:
    w = FdStatusFields(
        online=m.online,
        battery=m.battery,
        rssi=m.rssi,
        ip=m.ip or None,
        version=m.version or None,
        uptime=m.uptime // SECOND or None,
        session=m.session or None,
        heartbeat=_seconds(m.heartbeat) or None,
        data=Raw(write_content(m.data, form)) if m.data.data else _ABSENT,
        sig=m.sig or None,
        kid=m.kid or None,
    )
    if m.old_names:
        w.timestamp = m.time // SECOND
    else:
        w.time = m.time // SECOND
    return w


_FIELDS: Final[dict[type[Fd], Callable[..., Struct]]] = {
    FdPending: _pending,
    FdAck: _ack,
    FdComplete: _complete,
    FdFailed: _failed,
    FdStatus: _status,
}
"""Converts a message of each kind into the fields of the wire."""


# ── topics and names ─────────────────────────────────────────────────────────────────────────────


@lru_cache(NAMES_CACHED)
def topic_of(prefix: str, username: str, kind: FdKind) -> str:
    """
    >>> topic_of("nodes", "lamp", FdKind.PENDING)
    'nodes/lamp/pending'
    """
    return f"{prefix}/{check_username(username)}/{kind}"


def parse_topic(prefix: str, topic: str) -> tuple[str, FdKind]:
    """Return (username, kind) of a topic.

    >>> parse_topic("nodes", "nodes/lamp/ack")
    ('lamp', <FdKind.ACK: 'ack'>)
    """
    username, slash, word = topic.removeprefix(f"{prefix}/").rpartition("/")
    if not topic.startswith(f"{prefix}/") or not slash:
        raise Malformed(f"{_short(topic)} is not a topic of {prefix}/…")
    try:
        kind = FdKind(word)
    except ValueError:
        raise Malformed(f"{_short(topic)} ends in none of {', '.join(k.value for k in FdKind)}") from None
    return check_username(username), kind


@lru_cache(NAMES_CACHED)
def check_username(name: str, field: str = "username") -> str:
    """Return a name that is one valid level of a topic; raise `Malformed` otherwise."""
    _name(name, field)
    if any(c in name for c in "/+#"):
        raise Malformed(f"{field} {_short(name)} contains / + or #, which mean something else in a topic")
    return name


def check_prefix(prefix: str) -> str:
    """Return the prefix if it is one or more valid topic levels; raise `Malformed` otherwise."""
    for level in prefix.split("/"):
        check_username(level, "a level of the prefix")
    return prefix


# ── small things ─────────────────────────────────────────────────────────────────────────────────


def _wire(text: bytes, read: Callable[[bytes], T]) -> T:
    limits.check(text, "a message")
    try:
        try:
            return read(text)
        except msgspec.ValidationError:
            return read(_bounded(text))
    except (msgspec.DecodeError, RecursionError, ValueError) as problem:
        raise Malformed(f"not an FD message: {str(problem)[:200]}") from None


def _bounded(text: bytes) -> bytes:
    """Return a message in which numbers of the protocol that no float holds are very large ones: a wrong time
    makes no message malformed."""
    fields = _read_fields(text)
    for name in _NUMBERS & fields.keys():
        value = any_json.read(fields[name])
        if isinstance(value, float) and isinf(value):
            fields[name] = _LARGE if value > 0 else _SMALL
    return msgspec.json.encode(fields)


def _id(w: FdTaskFields | FdAnswerFields) -> tuple[str, bool]:
    old = w.msg_id is None and w.message_id is not None
    return _name(w.msg_id or w.message_id or "", "msg_id"), old


def _name(value: str, field: str) -> str:
    if value.isascii() and 0 < len(value) <= NAME_LIMIT and "\0" not in value:
        return value
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise Malformed(f"{field} is not text that UTF-8 can carry") from None
    if not size:
        raise Malformed(f"{field} is missing or empty")
    if size > NAME_LIMIT:
        raise TooLarge(f"{field} has {size} bytes, the limit is {NAME_LIMIT}; use a shorter one")
    if "\0" in value:
        raise Malformed(f"{field} contains a NUL character; remove it")
    return value


def _time(seconds: float | None) -> int:
    """Return a time, or 0 if it cannot be one: clocks of small devices are often wrong."""
    if seconds is None or not 0 <= seconds < TIME_LIMIT // SECOND:
        return 0
    return int(seconds * SECOND)


def _seconds(length: int) -> int | float:
    return length // SECOND if length % SECOND == 0 else length / SECOND


def _expiry(seconds: float | None) -> int:
    if seconds is None:
        return 0
    if seconds < 0:
        raise Malformed("exp is before 1970; it is a time in seconds, or 0 for none")
    return int(min(seconds, TIME_LIMIT // SECOND - 1)) * SECOND


def _content(w: FdTaskFields | FdAnswerFields | FdStatusFields, raw: Raw, form: Form | None) -> Content:
    if raw is _ABSENT:
        return NOTHING
    said = _FORMS.get(w.enc) if w.enc else None
    return read_content(raw, said or form, sure=said is not None)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "…")
