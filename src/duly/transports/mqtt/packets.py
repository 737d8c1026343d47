"""MQTT 3.1.1 and 5 as bytes: what a client says, and where the packets in a stream begin and end.

The law: nothing here knows a socket, and nothing that a broker sends is believed before it was measured. A
stream is taken apart in one pass, as many packets as it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, TypeAlias

from duly.errors import Malformed

CONNACK: Final = 0x20
PUBLISH: Final = 0x30
PUBACK: Final = 0x40
SUBACK: Final = 0x90
UNSUBACK: Final = 0xB0
KIND: Final = 0xF0
"""Of a packet's first byte; the rest are flags."""

RETAIN: Final = 0x01
QOS_1: Final = 0x02
QOS: Final = 0x06
DUP: Final = 0x08

PINGREQ: Final = bytes((0xC0, 0))
DISCONNECT: Final = bytes((0xE0, 0))
DISCONNECTED: Final = 0xE0
"""The kind of a DISCONNECT, which a broker sends only in MQTT 5."""
LAST_NUMBER: Final = 0xFFFF
TEXT_LIMIT: Final = 0xFFFF
TOPICS_CACHED: Final = 4_096
"""How many topics have their text cached: most messages use the same few."""

_SUBSCRIBE: Final = 0x82
_UNSUBSCRIBE: Final = 0xA2
_MORE: Final = 0x80
_PROTOCOL: Final = b"\x00\x04MQTT"

_read_number: Final = Struct(">H").unpack_from
_write_acknowledged: Final = Struct(">BBH").pack

Packet: TypeAlias = tuple[int, int, int]
"""First byte, and where the body begins and ends."""


def connect(
    client_id: str,
    *,
    keepalive: int,
    clean: bool,
    username: str = "",
    password: str = "",
    will: tuple[str, bytes, bool] | None = None,
    properties: bytes | None = None,
) -> bytes:
    """Return a CONNECT. `will` is (topic, payload, retain), and goes out at QoS 1. With `properties` it
    is one of MQTT 5."""
    level, no_properties = (4, b"") if properties is None else (5, b"\0")
    flags = 0x02 * clean
    body = (properties or b"") + text(client_id)
    if will is not None:
        topic, payload, retain = will
        flags |= 0x0C | 0x20 * retain
        body += no_properties + text(topic) + _sized(payload)
    if username:
        flags |= 0xC0
        body += text(username) + text(password)
    return _packet(0x10, _PROTOCOL + bytes((level, flags)) + keepalive.to_bytes(2, "big") + body)


RETAIN_AS_PUBLISHED: Final = 0x08
"""The option of a subscription by which a message says whether its sender wanted it to be retained."""


def subscribe(number: int, filters: Mapping[str, int], properties: bytes = b"", options: int = 0) -> bytes:
    """Return a SUBSCRIBE to these filters, each at its QoS. `options`, and `properties` here and below, are
    those of MQTT 5; 3.1.1 has none."""
    wanted = b"".join(text(each) + bytes((qos | options,)) for each, qos in filters.items())
    return _packet(_SUBSCRIBE, number.to_bytes(2, "big") + properties + wanted)


def unsubscribe(number: int, filters: Sequence[str], properties: bytes = b"") -> bytes:
    """Return an UNSUBSCRIBE from these filters."""
    return _packet(_UNSUBSCRIBE, number.to_bytes(2, "big") + properties + b"".join(text(f) for f in filters))


def publish(
    topic: bytes, number: int, payload: bytes, *, retain: bool = False, properties: bytes = b""
) -> bytes:
    """Return a PUBLISH at QoS 1. `topic` is a `text`, made once for many.

    >>> publish(text("a"), 7, b"hi")
    b'2\\x07\\x00\\x01a\\x00\\x07hi'
    """
    size = len(topic) + 2 + len(properties) + len(payload)
    head = bytes((PUBLISH | QOS_1 | retain, size)) if size < _MORE else _head(PUBLISH | QOS_1 | retain, size)
    return b"%b%b%b%b%b" % (head, topic, number.to_bytes(2, "big"), properties, payload)


def acknowledge(numbers: Iterable[int]) -> bytes:
    """Return a PUBACK for each of these numbers.

    >>> acknowledge([7, 8])
    b'@\\x02\\x00\\x07@\\x02\\x00\\x08'
    """
    return b"".join([_write_acknowledged(PUBACK, 2, number) for number in numbers])


def text(value: str) -> bytes:
    """Return a text as it stands in packets: led by its size.

    >>> text("ö")
    b'\\x00\\x02\\xc3\\xb6'
    """
    return _sized(value.encode())


def split(data: bytes) -> tuple[list[Packet], int, int]:
    """Return the complete packets in these bytes, where the rest begins, and how many bytes it needs before
    another try is useful. Raises `Malformed` if this is not MQTT.
    """
    found: list[Packet] = []
    at, size = 0, len(data)
    while size - at >= 2:
        length, start = data[at + 1], at + 2
        if length & _MORE:
            length &= _MORE - 1
            shift = 7
            while True:
                if start == size:
                    return found, at, start - at + 1
                byte = data[start]
                start += 1
                length |= (byte & _MORE - 1) << shift
                shift += 7
                if byte < _MORE:
                    break
                if shift > 21:
                    raise Malformed("a packet whose length takes more than four bytes")
        end = start + length
        if end > size:
            return found, at, end - at
        found.append((data[at], start, end))
        at = end
    return found, at, 2


def published(first: int, data: bytes, start: int, end: int) -> tuple[str | bytes, int, int]:
    """Return the topic of a PUBLISH, its number (0: it has none, and wants no PUBACK), and where what follows
    begins. A topic that is not text is given as its bytes. Raises `Malformed` for all but a PUBLISH at QoS 0
    or 1.

    >>> packet = publish(text("a"), 7, b"hi")
    >>> published(packet[0], packet, 2, len(packet))
    ('a', 7, 7)
    """
    topic = start + 2
    body = topic + _read_number(data, start)[0] if topic <= end else end + 1
    qos = first & QOS
    if body + qos > end:  # at QoS 1, which is 2 here, as many bytes are its number
        raise Malformed("a PUBLISH that is cut short")
    if not qos:
        return _topic(data[topic:body]), 0, body
    if qos != QOS_1:
        raise Malformed("a PUBLISH at a QoS that was not asked for")
    found = _read_number(data, body)[0]
    if not found:
        raise Malformed("a packet without its number")
    return _topic(data[topic:body]), found, body + 2


@lru_cache(TOPICS_CACHED)
def _topic(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def number(data: bytes, start: int, end: int) -> int:
    """Return a packet's number, in these two bytes. Raises `Malformed` for any other size, and for 0.

    >>> number(acknowledge([7]), 2, 4)
    7
    """
    found: int = _read_number(data, start)[0] if end - start == 2 else 0
    if not found:
        raise Malformed("a packet without its number")
    return found


def _packet(first: int, body: bytes) -> bytes:
    return _head(first, len(body)) + body


def _head(first: int, size: int) -> bytes:
    if _MORE <= size < _MORE * _MORE:
        return bytes((first, size & _MORE - 1 | _MORE, size >> 7))
    head = bytearray((first,))
    while size >= _MORE:
        head.append(size & _MORE - 1 | _MORE)
        size >>= 7
    head.append(size)
    return bytes(head)


def _sized(value: bytes) -> bytes:
    if len(value) > TEXT_LIMIT:
        raise Malformed(f"{len(value)} bytes where MQTT has room for {TEXT_LIMIT}")
    return len(value).to_bytes(2, "big") + value
