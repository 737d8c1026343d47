"""Reads and writes JSON of every kind, also numbers that no integer or float of a program holds.

JSON sets numbers no limit. msgspec refuses those beyond a double (`1e400`) and integers of thousands of
digits, and then the whole text. A frame passes on what it contains, so a reader must not fail by a number in
it: here such a number is an infinity, as it is for other readers of JSON, and an infinity is written as such
a number. msgspec alone would write it as null.
"""

from __future__ import annotations

import json
from math import isinf
from typing import Final, NoReturn

import msgspec
from msgspec import Raw

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_check: Final = msgspec.json.Decoder(Raw).decode
_DIGITS: Final = 4_000
"""Integers with more digits are read as floats: Python does not read them as integers."""


def read(text: bytes | str | Raw) -> object:
    """Return the value of a JSON text; raises `msgspec.DecodeError` if it is none.

    >>> read(b'{"speed": 1e400, "mass": 7}')
    {'speed': inf, 'mass': 7}
    """
    try:
        return _decode(text)
    except msgspec.ValidationError:  # a number that is out of range
        return _read_again(text if isinstance(text, str) else bytes(text))


def read_object(text: bytes | str | Raw) -> dict[str, object]:
    """Return a JSON object; raises `msgspec.DecodeError` if the text is none."""
    value = read(text)
    if not isinstance(value, dict):
        raise msgspec.DecodeError("it is not a JSON object")
    return value


def write(value: object) -> bytes:
    """Return the JSON of a value; an infinity is written as a number that is read as one.

    >>> write({"speed": float("inf"), "mass": None})
    b'{"speed":1e999,"mass":null}'
    """
    text = _encode(value)  # an infinity is null in it; most values need no second look
    return _encode(_spelled(value)) if b"null" in text else text


def _spelled(value: object) -> object:
    match value:
        case float() if isinf(value):
            return Raw(b"1e999" if value > 0 else b"-1e999")
        case dict():
            return {name: _spelled(one) for name, one in value.items()}
        case list() | tuple():
            return [_spelled(one) for one in value]
    return value


def _read_again(text: bytes | str) -> object:
    _check(text)  # what follows also reads nan
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters
    except ValueError as problem:
        raise msgspec.DecodeError(str(problem)) from None
    return value


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else float(digits)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
