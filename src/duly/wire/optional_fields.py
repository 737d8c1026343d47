"""Optional fields of what clients send: null means that the field is absent.

Many JSON libraries write a field that was not set as null. Where a type gives null a meaning of its own, it
keeps it; a field that is required must not be null.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec
from msgspec import Raw, inspect

T = TypeVar("T")


def decode(text: bytes | Raw, as_: type[T]) -> T:
    """Decode JSON as this type; optional fields may be null.

    >>> class Page(msgspec.Struct):
    ...     limit: int = 50
    >>> decode(b'{"limit": null}', Page), decode(b'{"limit": 7}', Page)
    (Page(limit=50), Page(limit=7))

    JSON that is nested too deeply raises `msgspec.DecodeError`, as other invalid JSON does.
    """
    try:
        return _decode(text, as_)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def _decode(text: bytes | Raw, as_: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=as_)
    except msgspec.ValidationError:
        said = bytes(text)
        if b"null" not in said:
            raise
        return msgspec.json.decode(without_nulls(said, as_), type=as_)


def without_nulls(text: bytes, as_: type) -> bytes:
    """Return the JSON without its optional fields that are null, for a type in which null has no meaning.

    >>> class Page(msgspec.Struct):
    ...     before: int | None = None
    ...     limit: int = 50
    >>> without_nulls(b'{"before":null,"limit":null,"more":null}', Page)
    b'{"before":null,"more":null}'
    """
    return _pruned(text.strip(), _type_info(as_))


@cache
def _type_info(as_: type) -> inspect.Type:
    return inspect.type_info(as_)


def _pruned(text: bytes, info: inspect.Type) -> bytes:
    if isinstance(info, inspect.UnionType):
        info = next((one for one in info.types if isinstance(one, inspect.StructType)), info)
    if isinstance(info, inspect.StructType) and text[:1] == b"{":
        fields = msgspec.json.decode(text, type=dict[str, Raw])
        for field in info.fields:
            raw = fields.get(field.encode_name)
            if raw is None:
                continue
            said = bytes(raw)
            if said != b"null":
                fields[field.encode_name] = Raw(_pruned(said, field.type))
            elif not field.required and not _may_be_null(field.type):
                del fields[field.encode_name]
        return msgspec.json.encode(fields)
    if isinstance(info, inspect.ListType) and text[:1] == b"[":
        items = msgspec.json.decode(text, type=list[Raw])
        return msgspec.json.encode([Raw(_pruned(bytes(item), info.item_type)) for item in items])
    return text


def _may_be_null(info: inspect.Type) -> bool:
    if isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        return any(_may_be_null(one) for one in info.types)
    return isinstance(info, inspect.NoneType | inspect.RawType | inspect.AnyType)
