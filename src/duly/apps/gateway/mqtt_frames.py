"""Translates messages of MQTT devices into frames, and the hub's answers to their pushes into FD messages.

The law: the content of a device's message reaches the apps unchanged; values without a field in a frame go
into its detail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from duly.errors import Malformed
from duly.wire import fd
from duly.wire.fd import FdKind
from duly.wire.fields import NOTHING, Fields
from duly.wire.frames import DeviceCode, Frame, ServerCode
from duly.wire.outgoing import ServerAck

_decode_fields: Final = msgspec.json.Decoder(Fields).decode
_PUSH: Final = ("type", "data", "seq_id")


class HeardMessage(Struct, frozen=True):
    """A message from the broker. `old`: it may have been sent before the broker started. `again`: the broker
    had retained it or may have sent it before. `connection` is that of the link for reports. `dropped` has
    the ids of the pushes of its sender that were dropped just before it."""

    topic: str
    kind: FdKind
    payload: bytes
    old: bool
    again: bool
    connection: int
    ack: Callable[[], None]
    dropped: tuple[str, ...] = ()


class MqttPush(NamedTuple):
    """A push of an MQTT device; one with an id is acknowledged."""

    kind: str
    data: Raw
    seq_id: str | None
    more: Fields
    said: bytes = b""
    """the status that contained it, as it was sent"""


def push_in(status: fd.FdStatus, said: bytes = b"") -> MqttPush | None:
    """Return the push in a status message, or None: a device has no separate topic for pushes."""
    match status.data.value if status.data.data else None:
        case {"type": str(kind), **rest}:
            seq_id = rest.get("seq_id")
            if seq_id is not None and not isinstance(seq_id, str):
                raise Malformed(f"seq_id {str(seq_id)[:80]} of a push is not text; write it as a string")
            more = _decode_fields(status.data.json)
            data = NOTHING if rest.get("data") is None else more["data"]
            more = {name: raw for name, raw in more.items() if name not in _PUSH}
            return MqttPush(kind, data, seq_id, more, said)
        case _:
            return None


def answer_to_push(seq_id: str, said: ServerAck) -> tuple[FdKind, bytes]:
    """Return the answer to a device's push and the topic for it."""
    if said.code in (ServerCode.ACCEPTED, ServerCode.DUPLICATE):
        return FdKind.ACK, fd.encode(fd.FdAck(seq_id))
    why: dict[str, object] = {"code": said.code, "error": said.error, "detail": said.detail}
    if said.retry_after is not None:
        why["retry_after"] = said.retry_after
    return FdKind.FAILED, fd.encode(fd.FdFailed(seq_id, fd.Content(msgspec.json.encode(why))))


def data_of(content: fd.Content) -> bytes:
    """Return a node's bytes as the JSON data of an ack."""
    return content.json


def failure_of(content: fd.Content) -> Frame:
    """Return the ack for a failure, with its code, if it has one, and its text."""
    match content.value:
        case {"code": int(code), **rest} if 1 <= code <= 0xFFFF and code is not True:
            said = rest.get("state")
            return Frame(
                "ack",
                code=code,
                detail=str(rest.get("detail", rest.get("error", "")))[:500],
                state=said if isinstance(said, str) else None,
            )
        case None:
            return Frame("ack", code=DeviceCode.HARDWARE_FAULT)
        case value:
            return Frame("ack", code=DeviceCode.HARDWARE_FAULT, detail=str(value)[:500])
