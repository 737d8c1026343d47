"""Fields of a frame that the protocol does not define, kept together with its `data`.

The law: such fields are passed on unchanged and belong to the message: they are part of the body, and so of
the fingerprint and of the stored answer. A body with only `data` is that JSON; a body with more begins with a
byte that no JSON text begins with, so the two cannot be confused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec import Raw, Struct

from duly.wire import any_json

Fields: TypeAlias = dict[str, Raw]
"""Fields by name, as raw JSON."""

NOTHING: Final = Raw(b"")
"""No `data`."""
MORE: Final = b"\x1e"
"""The first byte of a body that has more than `data`."""


class Body(Struct, frozen=True, omit_defaults=True, gc=False):
    """The parts of a body."""

    data: Raw = NOTHING
    fields: Fields = {}
    timeout: int = 0
    """how long its recipient may take (ms), if given"""


_decode: Final = msgspec.json.Decoder(Body).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def pack(data: Raw, fields: Fields, timeout: int = 0) -> bytes:
    """Return the body of a message, or the data of an answer.

    >>> pack(Raw(b"1"), {}), pack(NOTHING, {"command": Raw(b'"unlock"')})
    (b'1', b'\\x1e{"fields":{"command":"unlock"}}')
    """
    return MORE + _encode(Body(data, fields, timeout)) if fields or timeout else bytes(data)


def unpack(body: bytes) -> Body:
    """Return the parts of a body that `pack` encoded."""
    if body[:1] != MORE:
        return Body(Raw(body)) if body else _EMPTY
    return _decode(memoryview(body)[1:])


def data_in(body: bytes) -> bytes:
    """Return the `data` alone."""
    return bytes(unpack(body).data) if body[:1] == MORE else body


def timeout_in(body: bytes) -> int:
    """Return how long the recipient may take (ms); 0 if not given."""
    return unpack(body).timeout if body[:1] == MORE else 0


def values_in(body: bytes) -> dict[str, object]:
    """Return the values of the fields beside `data`."""
    return load_fields(unpack(body).fields) if body[:1] == MORE else {}


def load_fields(fields: Mapping[str, Raw]) -> dict[str, object]:
    """Return the values of fields by name."""
    return {name: any_json.read(raw) for name, raw in fields.items()}


_EMPTY: Final = Body()
