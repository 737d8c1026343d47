"""The properties of MQTT 5 packets, as bytes and as values.

The law: properties that the program does not use are skipped; a property that MQTT 5 does not define is an
error, since its length is not known.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, TypeAlias

from duly.errors import Malformed
from duly.wire.publish_properties import PublishProperties

NONE: Final = b"\0"
"""No properties, as they stand in a packet."""

MESSAGE_EXPIRY: Final = 0x02
RESPONSE_TOPIC: Final = 0x08
CORRELATION_DATA: Final = 0x09
SESSION_EXPIRY: Final = 0x11
SERVER_KEEPALIVE: Final = 0x13
REASON_STRING: Final = 0x1F
RECEIVE_MAXIMUM: Final = 0x21
MAXIMUM_QOS: Final = 0x24
USER_PROPERTY: Final = 0x26
MAXIMUM_PACKET_SIZE: Final = 0x27

_BYTES: Final = {
    **dict.fromkeys((0x01, 0x17, 0x19, MAXIMUM_QOS, 0x25, 0x28, 0x29, 0x2A), 1),
    **dict.fromkeys((SERVER_KEEPALIVE, RECEIVE_MAXIMUM, 0x22, 0x23), 2),
    **dict.fromkeys((MESSAGE_EXPIRY, SESSION_EXPIRY, 0x18, MAXIMUM_PACKET_SIZE), 4),
}
"""The properties that are numbers, and how many bytes each has."""
_SIZED: Final = {0x03, RESPONSE_TOPIC, CORRELATION_DATA, 0x12, 0x15, 0x16, 0x1A, 0x1C, REASON_STRING}
"""Those that are texts or bytes, led by their size."""
_SUBSCRIPTION: Final = 0x0B

_LARGEST: Final = 0xFFFF_FFFF
_write_expiry: Final = struct.Struct(">BI").pack
_write_size: Final = struct.Struct(">BH").pack

Numbers: TypeAlias = dict[int, int]


def encode(about: PublishProperties) -> bytes:
    """Return the properties of a PUBLISH, as they stand in the packet.

    >>> encode(PublishProperties(expires=5))
    b'\\x05\\x02\\x00\\x00\\x00\\x05'
    """
    found = b""
    if about.expires is not None:
        found = _write_expiry(MESSAGE_EXPIRY, min(about.expires, _LARGEST))
    if about.response_topic:
        found += _response_topic(about.response_topic)
    if about.correlation:
        found += _sized(CORRELATION_DATA, about.correlation)
    for name, value in about.user:
        found += _sized(USER_PROPERTY, name.encode()) + _counted(value.encode())
    return packed(found)


@lru_cache(1_024)
def _response_topic(topic: str) -> bytes:
    """Return the property for a topic, which is the same in all tasks of one sender."""
    return _sized(RESPONSE_TOPIC, topic.encode())


def number(property: int, value: int) -> bytes:
    """Return a property that is a number; what is too large becomes the largest.

    >>> number(SESSION_EXPIRY, 60)
    b'\\x11\\x00\\x00\\x00<'
    """
    size = _BYTES[property]
    return bytes((property,)) + min(value, (1 << 8 * size) - 1).to_bytes(size, "big")


def packed(found: bytes) -> bytes:
    """Return properties led by their size, as they stand in a packet."""
    size = len(found)
    return (bytes((size,)) if size < 0x80 else varint(size)) + found


def varint(value: int) -> bytes:
    """Return a number of one to four bytes, seven bits in each.

    >>> varint(321)
    b'\\xc1\\x02'
    """
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def skip(data: bytes, at: int, end: int) -> int:
    """Return where the properties that begin at `at` end; at most at `end`."""
    size = data[at] if at < end else 0x80
    if size < 0x80:
        after = at + 1 + size
    else:
        size, at = _varint(data, at, end)
        after = at + size
    if after > end:
        raise Malformed("properties that are cut short")
    return after


def read(data: bytes, at: int, end: int) -> tuple[Numbers, str, int]:
    """Return the numbers among the properties that begin at `at`, the broker's text, and where they end.
    Raises `Malformed` if they are invalid.
    """
    found: Numbers = {}
    said = ""
    size, at = _varint(data, at, end)
    if at + size > end:
        raise Malformed("properties that are cut short")
    end = at + size
    while at < end:
        property, at = data[at], at + 1
        if property in _BYTES:
            after = at + _BYTES[property]
            found[property] = int.from_bytes(data[at:after], "big")
        elif property in _SIZED:
            after = _after_sized(data, at)
            if property == REASON_STRING:
                said = data[at + 2 : after].decode(errors="replace")
        elif property == USER_PROPERTY:
            after = _after_sized(data, _after_sized(data, at))
        elif property == _SUBSCRIPTION:
            _, after = _varint(data, at, end)
        else:
            raise Malformed(f"a property 0x{property:02X}, which MQTT 5 does not have")
        if after > end:
            raise Malformed("a property that is cut short")
        at = after
    return found, said, end


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift <= 21:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise Malformed("a size that is cut short, or takes more than four bytes")


def _after_sized(data: bytes, at: int) -> int:
    return at + 2 + int.from_bytes(data[at : at + 2], "big")


def _sized(property: int, value: bytes) -> bytes:
    size = len(value)
    if size > 0xFFFF:
        raise Malformed(f"{size} bytes where MQTT has room for 65535")
    return _write_size(property, size) + value


def _counted(value: bytes) -> bytes:
    if len(value) > 0xFFFF:
        raise Malformed(f"{len(value)} bytes where MQTT has room for 65535")
    return len(value).to_bytes(2, "big") + value
