"""CloudEvents 1.0 over HTTP, in and out: structured, binary and batched in; structured and binary out.

The law: `source` and `id` together identify an event and become the id of its frame, so an event that is sent
again is the same message. `type` is the type of the frame (the part up to the last dot is the sender's
domain, and is left out), `subject` its recipient, `data` its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, Final
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta, Raw, Struct, structs

from duly.core.messages import NAME_LIMIT
from duly.core.units import DAY, MINUTE, MS
from duly.errors import Malformed
from duly.wire import limits, optional_fields
from duly.wire.fields import NOTHING
from duly.wire.frames import Frame, decode_batch, encode

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
VERSION: Final = "1.0"
PREFIX: Final = "ce-"
"""The prefix of an event's headers in binary mode."""
LASTS: Final = 5 * MINUTE
"""How long after its `time` a command without `expirytime` may take effect; a day if it may wait."""
_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
"""The characters that need no escape in a header."""

Moment = Annotated[datetime, Meta(tz=True)]


class CloudEvent(Struct, frozen=True):
    """An event with the attributes that are used; others are ignored."""

    id: str
    source: str
    type: str
    specversion: str
    subject: str | None = None
    time: Moment | None = None
    datacontenttype: str = "application/json"
    data: Raw = NOTHING
    data_base64: bytes | None = None
    expirytime: Moment | None = None
    queue: bool = False
    traceparent: str | None = None


def media_type(content_type: str) -> str:
    """Return a content type without its parameters.

    >>> media_type("application/CloudEvents+JSON; charset=utf-8")
    'application/cloudevents+json'
    """
    return content_type.partition(";")[0].strip().lower()


def read_events(headers: Mapping[str, str], body: bytes) -> list[CloudEvent] | CloudEvent:
    """Return the event in a request, or the events of a batch; raises `Malformed` if it is invalid. Header
    names are lower case."""
    form = media_type(headers.get("content-type", ""))
    if form == BATCH:
        parts = decode_batch(body, "events")
        if parts is None:
            raise Malformed(f"a batch of events of CloudEvents {VERSION} is an array")
        return [_structured(part, f"event {n} of {len(parts)}") for n, part in enumerate(parts, 1)]
    if form == STRUCTURED:
        return _structured(body)
    limits.check_depth(body, "an event")
    try:
        return _checked(_binary(headers, body))
    except (msgspec.DecodeError, ValueError) as problem:
        raise _malformed("this", problem) from None


def _structured(text: bytes, which: str = "this") -> CloudEvent:
    limits.check_depth(text, "an event" if which == "this" else which)
    try:
        return _checked(optional_fields.decode(text, CloudEvent))
    except (msgspec.DecodeError, ValueError) as problem:
        raise _malformed(which, problem) from None


def _malformed(which: str, problem: Exception) -> Malformed:
    none = "" if which == "this" else "; no event of the batch was stored"
    return Malformed(f"{which} is not an event of CloudEvents {VERSION}: {problem}{none}")


def _binary(headers: Mapping[str, str], body: bytes) -> CloudEvent:
    """Return an event from its headers, with the body as data."""
    named = {
        name.removeprefix(PREFIX): unquote(value)
        for name, value in headers.items()
        if name.startswith(PREFIX) and name not in ("ce-data", "ce-data_base64")
    }
    if "specversion" not in named:
        raise ValueError(
            f"it has neither the content type {STRUCTURED} nor the header ce-specversion; "
            "send structured or binary mode"
        )
    named["datacontenttype"] = headers.get("content-type") or "application/json"
    event = msgspec.convert(named, CloudEvent, strict=False)
    return structs.replace(event, data_base64=body or None)


def _checked(event: CloudEvent) -> CloudEvent:
    """Return the event with its data as JSON."""
    if event.specversion != VERSION:
        raise ValueError(f"its specversion is {event.specversion[:20]!r}")
    if not (event.id and event.source and event.type):
        raise ValueError("id, source and type must not be empty")
    if any(ch.isspace() for ch in event.source):
        raise ValueError("source is a URI: it has no spaces")
    form = media_type(event.datacontenttype)
    if bytes(event.data) or event.data_base64 is None:
        return event
    if form.endswith(("/json", "+json", "/octet-stream")):  # the last is the default of many HTTP clients
        msgspec.json.decode(event.data_base64, type=Raw)
        return structs.replace(event, data=Raw(event.data_base64))
    if form.startswith("text/"):
        return structs.replace(event, data=Raw(msgspec.json.encode(event.data_base64.decode())))
    raise ValueError(f"its data is {form[:80]}; only JSON and text are passed on")


def frame_of(event: CloudEvent) -> bytes:
    """Return the frame of an event. A command with a `time` also gets an expiry, so that its id need not be
    remembered for ever and an old event has no effect."""
    type_ = event.type.rpartition(".")[2]
    alert = type_.startswith("alert_")
    made = None if event.time is None else _micros(event.time)
    exp: int | None = None
    if event.expirytime is not None:
        exp = _micros(event.expirytime)
    elif made is not None and not alert and event.subject:
        exp = made + (DAY if event.queue else LASTS)
    return encode(
        Frame(
            type_,
            _id_of(event),
            to=event.subject,
            data=event.data,
            exp=None if exp is None else exp // MS,
            queue=event.queue,
            traceparent=event.traceparent,
            time=made // MS if alert and made is not None else None,
        )
    )


def _id_of(event: CloudEvent) -> str:
    """Return the id of an event's frame: its source and its id, or a hash of both if they are long. A source
    contains no space, so two events never share an id."""
    both = f"{event.source} {event.id}"
    return both if len(both) <= NAME_LIMIT else f"ce:{blake2b(both.encode(), digest_size=16).hexdigest()}"


def _micros(at: datetime) -> int:
    return round(at.timestamp() * 1_000_000)


class OutgoingEvent(Struct, frozen=True):
    """An event to send; its data is JSON."""

    id: str
    source: str
    type: str
    subject: str
    time: str
    data: object


def structured(event: OutgoingEvent) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an event in structured mode."""
    whole = {"specversion": VERSION, "datacontenttype": "application/json"} | msgspec.to_builtins(
        event, builtin_types=(Raw,)
    )
    return msgspec.json.encode(whole), {"Content-Type": STRUCTURED}


def binary(event: OutgoingEvent) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an event in binary mode."""
    named = {name: getattr(event, name) for name in ("id", "source", "type", "subject", "time")}
    headers = {f"{PREFIX}{name}": quote(value, safe=_SAFE) for name, value in named.items()}
    headers |= {f"{PREFIX}specversion": VERSION, "Content-Type": "application/json"}
    return msgspec.json.encode(event.data), headers
