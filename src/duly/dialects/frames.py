"""The frames dialect: JSON text over WebSocket and HTTP, seed 000's wire (see DESIGN section 6).

The law: whatever comes in is either a `Frame` that fits, or a `SenderError` that says what is wrong with
it. `data` is never looked into: it is passed on as the bytes it came in, checked only for being JSON, not
too large and not nested too deeply. The two tables of codes are two enums: their numbers overlap, their
types do not.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from duly.core.ids import counter_of
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, Verdict, Word, parts_of
from duly.core.units import MS
from duly.dialects import limits
from duly.errors import Malformed, RateLimited

FRAME_LIMIT: Final = limits.SIZE_LIMIT

COMMANDS: Final = frozenset(
    {
        "lock_control", "dev_control", "user_mgmt", "system", "face_management", "query",
        "media_download", "media_download_chunk",
    }
)  # fmt: skip
PUSHES: Final = frozenset({"status_report", "event_report", "log_report", "visit_notification"})
"""What a device may push; `device_status` is made by the hub alone."""
DEVICE_STATUS: Final = "device_status"


class ServerCode(IntEnum):
    """`server_ack`: what the hub says of a command."""

    ACCEPTED = 0
    OFFLINE = 1
    BAD_PARAMETERS = 2
    NOT_ALLOWED = 3
    INTERNAL = 4
    DUPLICATE = 5


class DeviceCode(IntEnum):
    """`ack`: what the device says of a command."""

    DONE = 0
    BUSY = 1
    BAD_PARAMETERS = 2
    HARDWARE_FAULT = 3
    TIMEOUT = 4
    NOT_AUTHORISED = 5
    OUT_OF_RESOURCES = 6
    NOT_SUPPORTED = 7


NOTHING: Final = Raw(b"")
"""No `data`."""


class FrameOrder(Struct, frozen=True, omit_defaults=True, gc=False):
    key: str = ""
    mode: Mode = Mode.REPLAY
    after: int | None = None


class Frame(Struct, frozen=True, omit_defaults=True, gc=False):
    """One frame, either way. Which fields belong to which type, the users of frames know."""

    type: str
    seq_id: str | None = None
    to: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    data: Raw = NOTHING
    exp: int | None = None
    queue: bool = False
    order: FrameOrder | bool | None = None
    code: int | None = None
    state: str | None = None
    error: str | None = None
    detail: str | None = None
    cursor: int | None = None
    after: int | None = None
    first: int | None = None
    token: str | None = None
    cursors: dict[str, int] | None = None
    you: str | None = None
    time: int | None = None
    conv: str | None = None
    n: int | None = None
    attempt: int | None = None
    edited: bool = False
    retry_after: float | None = None
    """seconds to wait before the next try"""


# What goes out by the thousand, as frames of only the fields that they have: written in half the time.


class Command(Struct, frozen=True, omit_defaults=True, gc=False):
    """A command, on its way to its device."""

    type: str
    seq_id: str
    to: str
    from_: str = msgspec.field(name="from")
    data: Raw = NOTHING
    exp: int | None = None
    order: FrameOrder | None = None


class ServerAck(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="server_ack", gc=False):
    """What the hub says of a frame."""

    seq_id: str | None = None
    code: int | None = None
    state: str | None = None
    error: str | None = None
    detail: str | None = None
    retry_after: float | None = None
    """seconds"""


class Ack(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="ack", gc=False):
    """How a command ended."""

    seq_id: str
    from_: str = msgspec.field(name="from")
    data: Raw = NOTHING
    code: int | None = None
    state: str | None = None
    detail: str | None = None


_decode: Final = msgspec.json.Decoder(Frame).decode
_decode_many: Final = msgspec.json.Decoder(list[Raw]).decode
_encode: Final = msgspec.json.Encoder().encode


def decode(text: bytes | str) -> Frame:
    """The frame in these bytes.

    >>> decode('{"type": "query", "seq_id": "1702234567890_0", "to": "lock-1", "data": {"what": "log"}}').to
    'lock-1'
    """
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError:
            raise Malformed("a frame must be UTF-8") from None
    limits.check(text, "a frame")
    try:
        return _decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as problem:
        raise Malformed(f"not a frame: {_mild(problem)}") from None


def decode_batch(text: bytes) -> list[bytes] | None:
    """The frames of a JSON array, still undecoded; None if it is not an array."""
    if text.lstrip()[:1] != b"[":
        return None
    try:
        return [bytes(part) for part in _decode_many(text)]
    except (msgspec.DecodeError, RecursionError, ValueError) as problem:
        raise Malformed(f"not an array of frames: {_mild(problem)}") from None


def check(text: bytes) -> None:
    """Refuse what is too large, too deep or not UTF-8, before anything is read out of it."""
    limits.check(text, "a frame")


def _mild(problem: Exception) -> str:
    return str(problem).replace("JSON is malformed: ", "") or type(problem).__name__


def encode(frame: Frame | ServerAck | Ack) -> bytes:
    return _encode(frame)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def message_of(frame: Frame, sender: str, expires: int = 0) -> Message:
    """The message a command frame means; `expires` is its end if it names none. The sender is who has
    authenticated, whatever the frame claims."""
    if frame.seq_id is None:
        raise Malformed(f"a {frame.type} needs a seq_id: milliseconds, '_', a counter; mint one per command")
    if frame.to is None:
        raise Malformed(f"a {frame.type} needs 'to': the device it is for")
    _, n, _, _ = parts_of(frame.seq_id)
    if n is None:
        n = counter_of(frame.seq_id)  # it says what is wrong with a number that is none
    if frame.exp is not None and frame.exp < 10**11:
        raise Malformed(
            f"exp is a time in milliseconds since 1970, not {frame.exp}; multiply seconds by 1000"
        )
    return Message(
        sender,
        frame.seq_id,
        frame.type,
        frame.to,
        bytes(frame.data),
        expires=expires if frame.exp is None else frame.exp * MS,
        order=_order(frame, n),
    )


def _order(frame: Frame, n: int | None) -> Order | None:
    wanted = frame.order
    if wanted is False:
        return None if n is None else Order("", Mode.ANY, n)
    if isinstance(wanted, FrameOrder):
        return Order(wanted.key, wanted.mode, n, wanted.after)
    # By default a sender's commands to a device take effect in its order.
    return None if n is None else Order("", Mode.REPLAY, n)


def command(message: Message, after: int) -> bytes:
    """A command, passed on to its device: as sent, with `from` added; `queue` was for the hub alone."""
    order = message.order
    return _encode(
        Command(
            message.kind,
            message.id,
            message.recipient,
            message.scope,
            raw(message.body),
            message.expires // MS if message.expires else None,
            None if order is None else FrameOrder(order.key, order.mode, after),
        )
    )


def received_command(frame: Frame, device: str) -> Message:
    """The message in a command that a hub passed on to this device. Its key is (from, seq_id)."""
    if frame.from_ is None:
        raise Malformed(f"a {frame.type} from a hub says whom it is from")
    return message_of(msgspec.structs.replace(frame, to=device), frame.from_)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────

_ACCEPTED: Final = int(ServerCode.ACCEPTED)
_WORDS: Final = {
    Word.CONFLICT: "id_conflict",
    Word.STALE: "stale",
    Word.EXPIRED: "expired",
}
_CAUSES: Final = {
    "offline": ServerCode.OFFLINE,
    "denied": ServerCode.NOT_ALLOWED,
    "not_allowed": ServerCode.NOT_ALLOWED,
    "not_authenticated": ServerCode.NOT_ALLOWED,
    "internal": ServerCode.INTERNAL,
    RateLimited.word: ServerCode.INTERNAL,
}


def server_ack(seq_id: str | None, verdict: Verdict) -> ServerAck:
    """What the hub says of a command."""
    if verdict.word is Word.FRESH:  # most of them
        return ServerAck(seq_id, _ACCEPTED)
    match verdict.word:
        case Word.DUPLICATE:
            state = verdict.state.word if verdict.state is not None else None
            return ServerAck(seq_id, ServerCode.DUPLICATE, state)
        case Word.REFUSED if verdict.retry:
            return trouble(seq_id, ServerCode.INTERNAL, "internal", verdict.reason)
        case _:
            code = _CAUSES.get(verdict.cause, ServerCode.BAD_PARAMETERS)
            error = verdict.cause or _WORDS.get(verdict.word, verdict.word.value)
            return trouble(seq_id, code, error, verdict.reason, verdict.wait)


def trouble(seq_id: str | None, code: ServerCode, error: str, detail: str, wait: int = 0) -> ServerAck:
    """That a frame was not taken; `wait` (µs) is how long to wait before the next try, 0 if nobody knows."""
    return ServerAck(seq_id, code, None, error, detail, seconds_of(wait) if wait else None)


def seconds_of(wait: int) -> float:
    """A wait (µs) as the wire says it: seconds, to the millisecond, never too early.

    >>> seconds_of(1_500_000), seconds_of(1), seconds_of(2_000_000)
    (1.5, 0.001, 2)
    """
    ms = -(-wait // MS)
    return ms // 1000 if ms % 1000 == 0 else ms / 1000


def ack(seq_id: str, device: str, state: State, answer: Answer) -> Ack:
    """How a command ended, passed on to its app."""
    return Ack(seq_id, device, raw(answer.data), answer.code, state.word, answer.reason or None)


_ENDS: Final = {state.word: state for state in (State.SUPERSEDED, State.EXPIRED, State.CANCELLED)}


def answer_of(frame: Frame) -> tuple[State, Answer]:
    """How a command ended, by the device's word. A device that orders for itself says so in `state`."""
    if frame.code is None or not 0 <= frame.code <= 0xFFFF:
        raise Malformed("an ack needs a code: 0 done, or what went wrong")
    state = State.DONE if frame.code == DeviceCode.DONE else _ENDS.get(frame.state or "", State.FAILED)
    return state, Answer(frame.code, bytes(frame.data), frame.detail or "")


def dump_order(order: FrameOrder | bool | None) -> bytes:
    """A command's place in its lane, for a dialect that has no field of its own for it."""
    return _encode(order) if isinstance(order, FrameOrder) else b""


def load_order(text: bytes) -> FrameOrder | Literal[False]:
    """The place that `dump_order` wrote; what cannot be read, or was not written, is none."""
    try:
        return msgspec.json.decode(text, type=FrameOrder) if text else False
    except msgspec.DecodeError:
        return False


def raw(text: bytes) -> Raw:
    """JSON text as `data`; no text is no data."""
    return Raw(text) if text else NOTHING


def load(data: Raw | bytes) -> Any:
    """What is in a frame's `data`, for those who want to look."""
    return msgspec.json.decode(data) if data else None


def dump(value: object) -> Raw:
    return NOTHING if value is None else Raw(msgspec.json.encode(value))
