"""The frames that a hub sends, as values, and their JSON.

The laws. Applications push these values to sessions, and the transport converts them: a WebSocket encodes
JSON, an MQTT session makes an FD message, and an HTTP request that waits reads the fields. `data` is the JSON
text that a user sent (`msgspec.Raw`), and the hub never parses it. A value never changes, so a frame for many
sessions is encoded once.

Each kind of frame has only the fields that it needs, which halves the time to encode it compared with a whole
`Frame`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind
from duly.core.units import MS
from duly.errors import Malformed, RateLimited
from duly.wire.fields import MORE, NOTHING, Fields, unpack
from duly.wire.frames import FrameOrder, ServerCode, raw


class CommandFrame(Struct, frozen=True, omit_defaults=True, gc=False):
    """A command on its way to its device."""

    type: str
    seq_id: str
    to: str
    from_: str = msgspec.field(name="from")
    data: Raw = NOTHING
    exp: int | None = None
    order: FrameOrder | None = None
    timeout: int | None = None
    traceparent: str | None = None


class ServerAck(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="server_ack", gc=False):
    """The hub's answer to a frame: accepted, already known, or refused with a reason."""

    seq_id: str | float | None = None
    code: int | None = None
    state: str | None = None
    error: str | None = None
    detail: str | None = None
    retry_after: Annotated[float | None, Meta(description="seconds to wait before the next try")] = None
    conv: str | None = None
    n: int | None = None
    """`conv` and `n`, for a line of chat: its conversation, and its number there"""
    data: Raw = NOTHING
    """the answer to a question"""
    time: int | None = None
    """for an alert whose time was not plausible: the hub's clock (ms), so that the sentinel can compare its
    own"""


class AckFrame(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="ack", gc=False):
    """The outcome of a command, or its device's progress."""

    seq_id: str
    from_: str = msgspec.field(name="from")
    data: Raw = NOTHING
    code: int | None = None
    state: str | None = None
    detail: str | None = None
    progress: Raw = NOTHING


class AnsweredServerAck(ServerAck, frozen=True, omit_defaults=True, tag="server_ack", gc=False):
    """A `server_ack` together with the `ack` that followed it: the answer to an HTTP request that waited."""

    ack: Annotated[object, Meta(extra_json_schema={"description": "how it ended, if it has"})] = NOTHING
    """an `OutgoingFrame`, encoded with the rest"""


class PushFrame(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A report from a device to its apps. It is stored without `cursor`, which is the number of the push in
    the device's stream."""

    type: str
    from_: str = msgspec.field(name="from")
    data: Raw = NOTHING
    time: int | None = None
    cursor: int | None = None


class GapFrame(Struct, frozen=True, tag_field="type", tag="gap", gc=False):
    """Tells an app that the pushes of a device between `after` and `first` are no longer kept."""

    from_: str = msgspec.field(name="from")
    after: int
    first: int


class WelcomeFrame(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="welcome"):
    """The first frame to every client that has authenticated."""

    you: str
    time: int
    cursors: dict[str, int] | None = None
    """for each stream, the number after which the client is sent what it missed"""
    online: list[str] | None = None


class LineFrame(Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of chat. It is stored without its conversation, number and time, which its stream holds."""

    type: str
    seq_id: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    data: Raw = NOTHING
    exp: int | None = None
    edited: bool = False
    conv: str | None = None
    n: int | None = None
    time: int | None = None
    attempt: int | None = None
    """how many times the line has been sent, if more than once"""


class ReceiptFrame(Struct, frozen=True, tag_field="type", tag="receipt"):
    """A reader's position in a conversation: `data` is `{"state": "delivered"}` or `"read"`."""

    from_: str = msgspec.field(name="from")
    conv: str
    n: int
    data: dict[str, str]


class TypingFrame(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="typing", gc=False):
    """Tells the members of a conversation that a person is typing."""

    from_: str = msgspec.field(name="from")
    conv: str
    data: Raw = NOTHING


class PresenceFrame(Struct, frozen=True, tag_field="type", tag="presence", gc=False):
    """The presence of a friend, as the friend or the hub sets it: `{"online": true}`."""

    from_: str = msgspec.field(name="from")
    data: Raw


class SeenFrame(Struct, frozen=True, tag_field="type", tag="seen"):
    """An event that has just happened at the hub, sent to admins who watch."""

    data: dict[str, object]
    time: int


F = TypeVar("F", CommandFrame, AckFrame, PushFrame)


class FrameWithFields(Generic[F]):
    """A frame with additional fields that the protocol does not define; the frame's own fields take
    precedence."""

    __slots__ = ("fields", "frame")

    def __init__(self, frame: F, fields: Fields) -> None:
        self.frame: F = frame
        self.fields = fields


OutgoingFrame: TypeAlias = (
    CommandFrame
    | ServerAck
    | AckFrame
    | PushFrame
    | GapFrame
    | WelcomeFrame
    | LineFrame
    | ReceiptFrame
    | TypingFrame
    | PresenceFrame
    | SeenFrame
    | FrameWithFields[CommandFrame]
    | FrameWithFields[AckFrame]
    | FrameWithFields[PushFrame]
)
"""The values that an application may push to a session."""


def _fields_of(whole: object) -> dict[str, object]:
    """Return all fields of a frame with additional fields, by name, without those at their defaults."""
    if not isinstance(whole, FrameWithFields):
        raise NotImplementedError(f"no frame: {type(whole).__name__}")
    frame: CommandFrame | AckFrame | PushFrame = whole.frame
    kind = type(frame)
    config, defaults = kind.__struct_config__, kind.__struct_defaults__
    fields: dict[str, object] = {} if config.tag_field is None else {config.tag_field: config.tag}
    values = msgspec.structs.astuple(frame)
    required = len(values) - len(defaults)
    for i, (name, value) in enumerate(zip(kind.__struct_encode_fields__, values, strict=True)):
        if i < required or value != defaults[i - required]:
            fields[name] = value
    return whole.fields | fields


_encode: Final = msgspec.json.Encoder(enc_hook=_fields_of).encode


class FrameEncoder:
    """Encodes frames as JSON, and caches the last one: a frame for many sessions is encoded once. A transport
    may cache frames as they go over its wire: `header` returns what precedes so many bytes of JSON."""

    __slots__ = ("_header", "_last")

    def __init__(self, header: Callable[[int], bytes] | None = None) -> None:
        self._header = header
        self._last: tuple[OutgoingFrame | None, bytes] = (None, b"")

    def encode(self, frame: OutgoingFrame) -> bytes:
        """Return the JSON of a frame, after its header if there is one."""
        last = self._last
        if last[0] is frame:
            return last[1]
        text = _encode(frame)
        if self._header is not None:
            text = self._header(len(text)) + text
        self._last = (frame, text)  # one assignment, since hubs of one process may run in several threads
        return text


encode: Final = FrameEncoder().encode


def encode_all(frames: Sequence[OutgoingFrame]) -> bytes:
    """Return the JSON of several frames, as an array."""
    return _encode(frames)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def command(
    message: Message, after: int, traceparent: str = ""
) -> CommandFrame | FrameWithFields[CommandFrame]:
    """Return a command as its device gets it: as sent, with `from` added and without `queue`, which is for
    the hub alone."""
    order, body = message.order, message.body
    more: Fields = {}
    timeout = None
    if body[:1] == MORE:
        whole = unpack(body)
        body, more, timeout = bytes(whole.data), whole.fields, whole.timeout or None
    frame = CommandFrame(
        message.kind,
        message.id,
        message.recipient,
        message.scope,
        Raw(body) if body else NOTHING,
        message.expires // MS if message.expires else None,
        None if order is None else FrameOrder(order.key, order.mode, after),
        timeout,
        traceparent or None,
    )
    return FrameWithFields(frame, more) if more else frame


def payload_of(command: CommandFrame, fields: Fields) -> bytes:
    """Return the content of a command for a dialect with a single field for it: the command's `data`, or, if
    it has additional fields, an object of these and `data`."""
    if not fields:
        return bytes(command.data)
    return _encode(fields | {"data": command.data} if command.data else fields)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────

_ACCEPTED: Final = int(ServerCode.ACCEPTED)
_FRESH: Final = VerdictKind.FRESH
_WORDS: Final = {
    VerdictKind.CONFLICT: "id_conflict",
    VerdictKind.STALE: "stale",
    VerdictKind.EXPIRED: "expired",
}
BUG: Final = "a bug in the hub; its log says more"
"""What the sender of a frame or a request is told if a bug ends it."""
_CAUSES: Final = {
    "offline": ServerCode.OFFLINE,
    "denied": ServerCode.NOT_ALLOWED,
    "not_allowed": ServerCode.NOT_ALLOWED,
    "not_authenticated": ServerCode.NOT_ALLOWED,
    "internal": ServerCode.INTERNAL,
    RateLimited.word: ServerCode.INTERNAL,
}


def server_ack(seq_id: str | float | None, verdict: Verdict) -> ServerAck:
    """Return the `server_ack` for a verdict on a message."""
    if verdict.kind is _FRESH:  # the usual case
        return ServerAck(seq_id, _ACCEPTED)
    match verdict.kind:
        case VerdictKind.DUPLICATE:
            state = verdict.state.word if verdict.state is not None else None
            return ServerAck(seq_id, ServerCode.DUPLICATE, state)
        case VerdictKind.REFUSED if verdict.retry:
            return trouble(seq_id, ServerCode.INTERNAL, "internal", verdict.reason)
        case _:
            code = _CAUSES.get(verdict.cause, ServerCode.BAD_PARAMETERS)
            error = verdict.cause or _WORDS.get(verdict.kind, verdict.kind.value)
            return trouble(seq_id, code, error, verdict.reason, verdict.wait)


def trouble(
    seq_id: str | float | None, code: ServerCode, error: str, detail: str, wait: int = 0
) -> ServerAck:
    """Return a `server_ack` for a frame that was not accepted; `wait` (µs) is how long to wait before the
    next try, 0 if that is not known."""
    return ServerAck(seq_id, code, None, error, detail, seconds_of(wait) if wait else None)


def seconds_of(wait: int) -> float:
    """Return a wait (µs) as it is sent: in seconds, rounded up to the millisecond.

    >>> seconds_of(1_500_000), seconds_of(1), seconds_of(2_000_000)
    (1.5, 0.001, 2)
    """
    ms = -(-wait // MS)
    return ms // 1000 if ms % 1000 == 0 else ms / 1000


def ack(seq_id: str, device: str, state: State, answer: Answer) -> AckFrame | FrameWithFields[AckFrame]:
    """Return the frame that tells an app the outcome of its command."""
    data, reason = answer.data, answer.reason or None
    if data[:1] != MORE:
        return AckFrame(seq_id, device, raw(data), answer.code, state.word, reason)
    said = unpack(data)
    return FrameWithFields(AckFrame(seq_id, device, said.data, answer.code, state.word, reason), said.fields)


def working(seq_id: str, device: str, progress: Raw, more: Fields) -> AckFrame | FrameWithFields[AckFrame]:
    """Return the frame that tells an app the progress of its command."""
    frame = AckFrame(seq_id, device, state=State.DELIVERED.word, progress=progress)
    return FrameWithFields(frame, more) if more else frame


def with_ack(said: ServerAck, ended: OutgoingFrame) -> AnsweredServerAck:
    """Return a `server_ack` that contains the `ack`."""
    return AnsweredServerAck(
        said.seq_id, said.code, said.state, said.error, said.detail, said.retry_after, said.conv, said.n,
        said.data, said.time, ended,
    )  # fmt: skip


# ── pushes ───────────────────────────────────────────────────────────────────────────────────────

AnyPush: TypeAlias = PushFrame | FrameWithFields[PushFrame]

_decode_push: Final = msgspec.json.Decoder(PushFrame).decode
_decode_fields: Final = msgspec.json.Decoder(Fields).decode
_PUSH_FIELDS: Final = frozenset(PushFrame.__struct_encode_fields__)


def read_push(text: bytes) -> AnyPush:
    """Return the push that was stored as these bytes."""
    try:
        return _decode_push(text)
    except msgspec.ValidationError:  # it has additional fields
        fields = _decode_fields(text)
    try:
        own = {name: value for name, value in fields.items() if name in _PUSH_FIELDS}
        frame = _decode_push(_encode(own))
    except msgspec.DecodeError as problem:
        raise Malformed(f"not a stored push: {problem}") from None
    return FrameWithFields(frame, {name: value for name, value in fields.items() if name not in own})


def numbered(push: AnyPush, cursor: int) -> AnyPush:
    """Return a push with its number in the device's stream."""
    if isinstance(push, FrameWithFields):
        return FrameWithFields(msgspec.structs.replace(push.frame, cursor=cursor), push.fields)
    return PushFrame(push.type, push.from_, push.data, push.time, cursor)
