"""Numbers that JSON does not have: nan and the infinities. msgspec and pydantic write them as `null`, and a
reader would take a number for nothing."""

from __future__ import annotations

from math import isfinite

import msgspec


def check_finite(value: object, text: bytes) -> None:
    """Raise `ValueError` if a value, of which `text` is the JSON, holds a number that JSON does not have."""
    if b"null" in text and holds_not_finite(value):
        raise ValueError("it contains nan or an infinity, which JSON does not have")


def holds_not_finite(value: object) -> bool:
    """Say whether there is a number in a value that is nan or infinite."""
    return _holds(msgspec.to_builtins(value, str_keys=True, enc_hook=_own_fields))


def _own_fields(value: object) -> object:
    """Return an object that msgspec does not know as plain data: a pydantic model, or one without numbers."""
    dump = getattr(value, "model_dump", None)
    return None if dump is None else dump()


def _holds(plain: object) -> bool:
    match plain:
        case float():
            return not isfinite(plain)
        case dict():
            return any(map(_holds, plain.values()))
        case list() | tuple():
            return any(map(_holds, plain))
    return False
