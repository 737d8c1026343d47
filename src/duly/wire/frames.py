"""Incoming frames: JSON text over WebSocket and HTTP. Frames that a hub sends are in `outgoing`.

The law: decoding returns a valid `Frame` or raises a `SenderError` that says what is wrong. `data` is passed
on as raw bytes, checked only for being JSON, its size and its nesting. The two tables of codes are two enums:
their numbers overlap, their types do not.

Fields that the protocol does not know are kept (`Frame.more`) and passed on with commands, acks and pushes.
Frames without such fields pay nothing for that: a decoder that refuses unknown fields is tried first, and
only frames that it refuses are read field by field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from itertools import takewhile
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import astuple, replace

from duly.core.ids import counter_of
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, parts_of
from duly.core.units import MS
from duly.errors import Malformed, TooLarge
from duly.wire import any_json, limits, optional_fields
from duly.wire.fields import NOTHING, Fields, data_in, pack

FRAME_LIMIT: Final = limits.SIZE_LIMIT
BATCH_LIMIT: Final = 1_000
"""The most frames in one array."""

COMMANDS: Final = frozenset(
    {
        "lock_control", "dev_control", "user_mgmt", "system", "face_management", "query",
        "media_download", "media_download_chunk",
    }
)  # fmt: skip
"""The documented types of commands; others work the same way."""
PUSHES: Final = frozenset({"status_report", "event_report", "log_report", "visit_notification"})
"""The documented types of pushes; only the hub sends `device_status`."""
DEVICE_STATUS: Final = "device_status"
OUTCOME: Final = "outcome"
"""The question of an app about the outcome of a command, without sending it again."""
RESERVED: Final = frozenset(
    {
        "auth", "welcome", "ack", "server_ack", OUTCOME, "gap", "watch", "seen", DEVICE_STATUS,
        "one_chat", "group_chat", "edit", "delete", "history", "receipts", "receipt", "conversations",
        "read", "typing", "presence", "friends", "friend_accept", "friend_ask", "friend_remove", "block",
        "unblock", "group_create", "group_info", "group_invite", "group_join", "group_leave",
        "group_remove", "group_role", "alert_event", "alert_update", "alert_cancel",
        "alert_heartbeat",
    }
)  # fmt: skip
"""Types that the protocol uses for other purposes than commands and pushes."""
_TYPE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
TIMEOUT_LIMIT: Final = 86_400_000
"""The longest time (ms) that a command may give its device."""


class ServerCode(IntEnum):
    """The codes of `server_ack`: the hub's verdict on a command."""

    ACCEPTED = 0
    OFFLINE = 1
    BAD_PARAMETERS = 2
    NOT_ALLOWED = 3
    INTERNAL = 4
    DUPLICATE = 5


class DeviceCode(IntEnum):
    """The codes of `ack`: the device's answer to a command."""

    DONE = 0
    BUSY = 1
    BAD_PARAMETERS = 2
    HARDWARE_FAULT = 3
    TIMEOUT = 4
    NOT_AUTHORISED = 5
    OUT_OF_RESOURCES = 6
    NOT_SUPPORTED = 7


class FrameOrder(Struct, frozen=True, omit_defaults=True, gc=False):
    """A command's position in its device's order: its key, how late ones are treated, its predecessor."""

    key: str = ""
    mode: Mode = Mode.REPLAY
    after: int | None = None


class Frame(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One frame of a client. The application that handles it decides which fields a type needs."""

    type: Annotated[
        str, Meta(extra_json_schema={"pattern": f"^{_TYPE.pattern}$", "examples": sorted(COMMANDS)})
    ]
    seq_id: Annotated[
        str | None,
        Meta(description="{milliseconds}_{counter}, minted by the sender, the same in every resend"),
    ] = None
    to: Annotated[str | None, Meta(description="the device; of a command")] = None
    from_: str | None = msgspec.field(default=None, name="from")
    data: Annotated[Raw, Meta(description="anything; passed on untouched")] = NOTHING
    exp: Annotated[
        int | None, Meta(description="milliseconds since 1970; after this it must not take effect")
    ] = None
    queue: Annotated[bool, Meta(description="keep it for an offline device until exp")] = False
    order: FrameOrder | bool | None = None
    timeout: Annotated[
        int | None, Meta(description="milliseconds that the device may take, instead of the hub's patience")
    ] = None
    traceparent: Annotated[
        str | None, Meta(description="W3C trace context; passed on, no part of what the command means")
    ] = None
    code: int | None = None
    progress: Raw = NOTHING
    state: str | None = None
    detail: str | None = None
    error: str | None = None
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
    retry_after: Annotated[float | None, Meta(description="seconds to wait before the next try")] = None
    online: list[str] | None = None

    @property
    def more(self) -> Fields:
        """The fields that the protocol does not know."""
        return _NO_FIELDS


class FullFrame(Frame, frozen=True, omit_defaults=True, gc=False):
    """A frame with fields that the protocol does not know."""

    more: Fields = msgspec.field(default_factory=dict)


_NO_FIELDS: Final[Fields] = {}
_COMMAND: Final = frozenset(
    {"type", "seq_id", "to", "from", "data", "exp", "queue", "order", "timeout", "traceparent"}
)
_ACK: Final = frozenset({"type", "seq_id", "to", "from", "data", "code", "state", "detail", "progress"})
_PUSH: Final = frozenset({"type", "seq_id", "data", "from", "time", "cursor"})
"""The fields that mean something in a command, an ack and a push; others are passed on."""
_NAMES_IN_ORDER: Final = Frame.__struct_encode_fields__
_NAMES: Final = frozenset(_NAMES_IN_ORDER)
_DEFAULTS: Final = dict(zip(Frame.__struct_encode_fields__, astuple(Frame("")), strict=True))
_ABSENT: Final = astuple(Frame(""))
_ONLY_COMMAND: Final = slice(_NAMES_IN_ORDER.index("exp"), _NAMES_IN_ORDER.index("code"))
_AFTER_COMMAND: Final = _NAMES_IN_ORDER.index("code")
_AFTER_ACK: Final = _NAMES_IN_ORDER.index("error")
"""The order of a frame's fields: those of every frame, those of commands, those of acks, those of other
frames."""
_NO_COMMAND: Final = _ABSENT[_ONLY_COMMAND]
_NO_MORE_THAN_COMMAND: Final = _ABSENT[_AFTER_COMMAND:]
_NO_MORE_THAN_ACK: Final = _ABSENT[_AFTER_ACK:]
_BY_TYPE: Final = {"ack": _ACK | {"conv", "n"}} | dict.fromkeys(RESERVED - {"ack"}, _NAMES)


class _FrameId(Struct, frozen=True, gc=False):
    """A frame of which only the id is read."""

    seq_id: str | int | float | None = None


_decode: Final = msgspec.json.Decoder(Frame).decode
_decode_fields: Final = msgspec.json.Decoder(Fields).decode
_decode_name: Final = msgspec.json.Decoder(_FrameId).decode
_decode_id: Final = msgspec.json.Decoder(str | int | float).decode
_ABSENT_PART: Final = Raw(b"")
_encode: Final = msgspec.json.Encoder().encode


def decode(text: bytes | str) -> Frame:
    """Return the frame in these bytes.

    >>> decode('{"type": "query", "seq_id": "1702234567890_0", "to": "lock-1", "data": {"what": "log"}}').to
    'lock-1'
    """
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError:
            raise Malformed("a frame must be UTF-8") from None
    if len(text) > limits.FLAT or not text.isascii():  # a short one cannot be too large, nor too deep
        limits.check(text, "a frame")
    try:
        return _decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as problem:
        return _decode_more(text, problem)


def _decode_more(text: bytes, problem: Exception) -> Frame:
    """Decode a text that the decoder of known fields has refused: it has other fields, or an optional field
    that is null, or is not a frame."""
    try:
        fields = _decode_fields(text)
        type_ = _type_in(fields)
        is_push = "cursor" in fields and "seq_id" not in fields
        known = _BY_TYPE.get(type_, _PUSH if is_push else _COMMAND)
        more = {name: raw for name, raw in fields.items() if name not in known and not _is_absent(name, raw)}
        kept = _encode({name: raw for name, raw in fields.items() if name in known})
        try:
            frame = _decode(kept)
        except msgspec.ValidationError:
            frame = _decode(optional_fields.without_nulls(kept, Frame))
        if not more:
            return frame
        whole: tuple[Any, ...] = (*astuple(frame), more)
        return FullFrame(*whole)
    except (msgspec.DecodeError, RecursionError, ValueError) as other:
        if isinstance(problem, msgspec.ValidationError):
            problem = other
    raise Malformed(f"not a frame: {_mild(problem)}") from None


def _is_absent(name: str, raw: Raw) -> bool:
    """Return whether a field of other frames has a value that means its absence; null means it for all but
    `progress`, which can be anything."""
    default = _DEFAULTS.get(name, NOTHING)
    return default is not NOTHING and bytes(raw) in (b"null", _encode(default))


def _type_in(fields: Fields) -> str:
    try:
        return msgspec.json.decode(fields.get("type", b"null"), type=str)
    except msgspec.ValidationError:
        raise msgspec.ValidationError("its `type` is missing, or not a text") from None


def seq_id_in(text: bytes | str) -> str | float | None:
    """Return the id of a refused frame, whatever else is wrong with it; None if it cannot be read.

    >>> seq_id_in('{"type": 7, "seq_id": "1702234567890_0"}'), seq_id_in('{"seq_id": 17}'), seq_id_in("?")
    ('1702234567890_0', 17, None)
    >>> seq_id_in('{"data": {"seq_id": "2_0", "speed": NaN}, "seq_id": "1_0"')
    '1_0'
    """
    try:
        try:
            found = _decode_name(text).seq_id
        except (msgspec.DecodeError, RecursionError, ValueError):
            found = _decode_id(_id_text(text if isinstance(text, bytes) else text.encode(errors="replace")))
    except (msgspec.DecodeError, ValueError):
        return None
    return found if not isinstance(found, str) or len(found) <= _ID_SHOWN else None


def _id_text(text: bytes) -> bytes:
    """Return the value of the field `seq_id` of a text that is not JSON; empty if there is none."""
    depth, found = 0, b""
    for value, bracket in _IDS.findall(text):
        if bracket:
            depth += 1 if bracket in b"{[" else -1
        elif value and depth == 1:
            found = value
    return found


_IDS: Final = re.compile(
    rb'"seq_id"\s*+:\s*+("(?:[^"\\]++|\\.)*+"|-?[0-9][-+.0-9eE]*+)|' + limits.STRINGS + rb"|([\[\]{}])",
    re.DOTALL,
)
_ID_SHOWN: Final = 1_000
"""The longest id that is repeated to its sender."""


def is_own_type(type: str) -> bool:
    """Return whether a type may be that of a command or a push."""
    return type not in RESERVED and _TYPE.fullmatch(type) is not None


def decode_batch(text: bytes, what: str = "frames") -> list[bytes] | None:
    """Return the undecoded frames of a JSON array; None if it is not an array, as its first byte shows. An
    array of more than `BATCH_LIMIT` is refused when one more is met, not when millions are decoded."""
    if text.lstrip()[:1] != b"[":
        return None
    try:
        parts = astuple(_batch_decoder()(text))
    except msgspec.ValidationError:
        raise TooLarge(f"more than {BATCH_LIMIT} {what} in one request; send fewer at once") from None
    except (msgspec.DecodeError, RecursionError, ValueError) as problem:
        raise Malformed(f"not an array of {what}: {_mild(problem)}") from None
    return [bytes(part) for part in takewhile(_ABSENT_PART.__ne__, parts)]


@cache
def _batch_decoder() -> Callable[[bytes], Struct]:
    """Return the decoder of an array of at most `BATCH_LIMIT` parts: to msgspec it is a struct whose fields
    have no names on the wire, since a list has no limit before it is complete."""
    fields = [(f"part_{i}", Raw, _ABSENT_PART) for i in range(BATCH_LIMIT)]
    batch = msgspec.defstruct("Batch", fields, array_like=True, forbid_unknown_fields=True, frozen=True)
    return msgspec.json.Decoder(batch).decode


def check(text: bytes) -> None:
    """Refuse a text that is too large, too deep or not UTF-8, before decoding it."""
    limits.check(text, "a frame")


def _mild(problem: Exception) -> str:
    return str(problem).replace("JSON is malformed: ", "") or type(problem).__name__


def encode(frame: Frame) -> bytes:
    """Return the JSON of a client's frame; a hub's frames are encoded by `duly.wire.outgoing`."""
    return _encode(frame.more | _fields_of(frame) if type(frame) is FullFrame else frame)


def with_traceparent(text: bytes, traceparent: str) -> bytes:
    """Return the JSON of the same frame as part of a trace.

    >>> with_traceparent(b'{"type":"query","seq_id":"1_0"}', "00-0af7-b7ad-01")
    b'{"type":"query","seq_id":"1_0","traceparent":"00-0af7-b7ad-01"}'
    """
    return encode(replace(decode(text), traceparent=traceparent))


def _fields_of(frame: Frame) -> dict[str, object]:
    """Return the known fields of a frame by name, without omitted ones."""
    pairs = zip(_NAMES_IN_ORDER, astuple(frame), strict=False)
    return {name: value for name, value in pairs if name == "type" or value != _DEFAULTS[name]}


def _more_of(frame: Frame, own: frozenset[str]) -> Fields:
    """Return the fields of a frame that do not belong to it: unknown ones, and those of other frames."""
    more = {name: raw for name, raw in frame.more.items() if name not in own}
    for name, value in zip(frame.__struct_encode_fields__, astuple(frame), strict=True):
        if name not in own and name in _DEFAULTS and value != _DEFAULTS[name]:
            more[name] = Raw(_encode(value))
    return more


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def message_of(frame: Frame, sender: str, expires: int = 0) -> Message:
    """Return the message of a command frame; `expires` is its expiry if it has none. The sender is the
    authenticated account, whatever the frame claims."""
    if frame.seq_id is None:
        raise Malformed(f"a {frame.type} needs a seq_id: milliseconds, '_', a counter; mint one per command")
    if frame.to is None:
        raise Malformed(f"a {frame.type} needs 'to': the device it is for")
    _, n, _, _ = parts_of(frame.seq_id)
    if n is None:
        n = counter_of(frame.seq_id)  # it says what is wrong with an invalid number
    if frame.exp is not None and frame.exp < 10**11:
        raise Malformed(
            f"exp is a time in milliseconds since 1970, not {frame.exp}; multiply seconds by 1000"
        )
    return Message(
        sender,
        frame.seq_id,
        frame.type,
        frame.to,
        _body_of(frame),
        expires=expires if frame.exp is None else frame.exp * MS,
        order=_order(frame, n),
    )


def _body_of(frame: Frame) -> bytes:
    """Return the body of a command: usually its data, without copying."""
    timeout = frame.timeout
    if timeout is None and type(frame) is Frame and astuple(frame)[_AFTER_COMMAND:] == _NO_MORE_THAN_COMMAND:
        return bytes(frame.data)
    if timeout is not None and not 1 <= timeout <= TIMEOUT_LIMIT:
        raise Malformed(f"timeout is milliseconds, from 1 to {TIMEOUT_LIMIT} (a day), not {timeout}")
    return pack(frame.data, _more_of(frame, _COMMAND), timeout or 0)


_REPLAY: Final = Mode.REPLAY


def _order(frame: Frame, n: int | None) -> Order | None:
    wanted = frame.order
    if wanted is None or wanted is True:
        # By default a sender's commands to a device take effect in order.
        return None if n is None else Order("", _REPLAY, n)
    if wanted is False:
        return None if n is None else Order("", Mode.ANY, n)
    return Order(wanted.key, wanted.mode, n, wanted.after)


def received_command(frame: Frame, device: str) -> Message:
    """Return the message in a command that a hub passed on to this device. Its key is (from, seq_id)."""
    if frame.from_ is None:
        raise Malformed(f"a {frame.type} from a hub must name its sender in 'from'")
    return message_of(replace(frame, to=device), frame.from_)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def more_in_push(frame: Frame) -> Fields:
    """Return the fields of a push that are passed on with it."""
    return _more_of(frame, _PUSH)


_DONE: Final = State.DONE
_FAILED: Final = State.FAILED
_ENDS: Final = {state.word: state for state in (State.SUPERSEDED, State.EXPIRED, State.CANCELLED)}


def answer_of(frame: Frame) -> tuple[State, Answer]:
    """Return the outcome of a command from a device's `ack`. A device that orders commands by itself reports
    in `state` that one was superseded."""
    if frame.code is None or not 0 <= frame.code <= 0xFFFF:
        raise Malformed("an ack needs a code: 0 if it is done, or the code of what went wrong")
    state = _ENDS.get(frame.state or "", _FAILED) if frame.code else _DONE
    data = bytes(frame.data) if _is_bare(frame) else pack(frame.data, _more_of(frame, _ACK))
    return state, Answer(frame.code, data, frame.detail or "")


def _is_bare(frame: Frame) -> bool:
    """Return whether an ack has only its own fields."""
    if type(frame) is not Frame:
        return False
    fields = astuple(frame)
    return fields[_AFTER_ACK:] == _NO_MORE_THAN_ACK and fields[_ONLY_COMMAND] == _NO_COMMAND


def more_in(frame: Frame) -> Fields:
    """Return the fields of an ack that are passed on with it."""
    return _NO_FIELDS if _is_bare(frame) else _more_of(frame, _ACK)


def is_working(frame: Frame) -> bool:
    """Return whether an ack says that the device is working on the command. Firmware that fills in the `code`
    of every ack sends 0, but the command has not ended."""
    return frame.state == _DELIVERED and not frame.code


_DELIVERED: Final = State.DELIVERED.word


def dump_order(order: FrameOrder | bool | None) -> bytes:
    """Return a command's position in its lane as text, for a dialect without a field for it."""
    return _encode(order) if isinstance(order, FrameOrder) else b""


def load_order(text: bytes) -> FrameOrder | Literal[False]:
    """Return the position that `dump_order` wrote; None if it is missing or cannot be read."""
    try:
        return msgspec.json.decode(text, type=FrameOrder) if text else False
    except msgspec.DecodeError:
        return False


def own_fields(values: Mapping[str, object]) -> Fields:
    """Return a sender's own fields; one whose name the protocol uses is refused."""
    taken = sorted(_COMMAND & values.keys())
    if taken:
        raise Malformed(f"{', '.join(taken)}: a field of the protocol; give your own field another name")
    return {name: Raw(msgspec.json.encode(value)) for name, value in values.items()}


def raw(text: bytes) -> Raw:
    """Return JSON text as `data`; empty text means no data."""
    return Raw(text) if text else NOTHING


def load(data: Raw | bytes) -> object:
    """Return the value of a frame's `data`, or of a body's."""
    text = data_in(data) if type(data) is bytes else data
    return any_json.read(text) if text else None


def dump(value: object) -> Raw:
    """Return a value as `data`; None means no data."""
    return NOTHING if value is None else Raw(any_json.write(value))
