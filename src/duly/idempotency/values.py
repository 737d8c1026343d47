"""Arguments and results as bytes: plain data, dataclasses, msgspec Structs, attrs classes, enums, UUID,
datetime, Decimal, and pydantic's models where pydantic is installed.

The law: what the first caller gets, a repeat gets. So how a result is read back is worked out before the
function runs, and what could not be read back is refused before anything happens.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast

import msgspec
import msgspec.inspect

from duly.core.finite import check_finite, holds_not_finite
from duly.core.messages import Answer
from duly.errors import Malformed, ProgramError
from duly.idempotency.runs import ERROR, OK, UNSTORABLE

RESULT_LIMIT: Final = 1024 * 1024
DETAIL_LIMIT: Final = 10_000
STORABLE: Final = (
    "return plain data (None, numbers, texts, bytes, lists, dicts, dates) or a dataclass, msgspec Struct, "
    "attrs class or pydantic model of it"
)


AnyFunction: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def name_of(function: AnyFunction) -> str:
    """Return the name of a function, as people know it."""
    return getattr(function, "__qualname__", repr(function))


def key_text(key: object) -> str:
    """Return the text of a key; a key that would name every call, or no call ever again, is refused."""
    empty = key == "" if isinstance(key, str) else key is None
    if isinstance(key, str) and not empty:
        return key
    if isinstance(key, Coroutine):
        key.close()  # it will not be awaited
    plain = type(key).__str__ is object.__str__ and type(key).__repr__ is object.__repr__
    # The text of these is where they lie in memory: no repeat would ever have the same.
    if empty or plain or isinstance(key, Awaitable | Iterator) or callable(key):
        raise Malformed(f"the key of a call cannot be {key!r}; let key=… return text that names the call")
    return str(key)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


def takes_object(function: AnyFunction) -> bool:
    """Say whether a function is a method, or a class's: whether its first argument is the object or the class
    that it belongs to."""
    first = next(iter(inspect.signature(function).parameters), "")
    return first in ("self", "cls") and "." in name_of(function)


def arguments_by_name(function: AnyFunction, *, given: int) -> Callable[[Args, Kwargs], Mapping[str, object]]:
    """Return the function that maps a call's arguments to their names, so that `f(1)` and `f(a=1)` are the
    same call. An argument that equals the default of its parameter is omitted, whether it was given or not:
    `f(1)` and `f(1, b=2)` are the same call if 2 is the default, and a parameter added later does not turn
    every repeat into a conflict. The object or class of a method is omitted as well: only the arguments
    count."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    of_method = takes_object(function)
    first = parameters[0] if of_method else None
    del parameters[of_method : of_method + given]
    signature = signature.replace(parameters=parameters)
    places = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    simple = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in places) and not of_method
    names = [p.name for p in places]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def by_name(args: Args, kwargs: Kwargs) -> Mapping[str, object]:
        if simple and not kwargs and len(args) == len(names):
            bound: dict[str, object] = dict(zip(names, args, strict=True))
        else:
            bound = signature.bind(*args, **kwargs).arguments
            if first is not None:
                del bound[first.name]
        for name, default in defaults.items():
            if name in bound and _means_the_same(bound[name], default):
                del bound[name]
        return bound

    return by_name


def _means_the_same(value: object, default: object) -> bool:
    """Say whether a value is written as the default is; what is not comparable as JSON is only itself."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    try:
        return _as_json(value) == _as_json(default)
    except Exception:
        return False


def _as_json(counts: object) -> bytes:
    """Return what must be the same in a repeat as text. Raises if it is not plain data."""
    try:
        text = msgspec.json.encode(counts, enc_hook=_plain_form, order="deterministic")
    except TypeError:  # perhaps of keys in dicts that are no text: as JSON has them, they are
        text = msgspec.json.encode(_builtins(counts), order="deterministic")
    if b"null" in text and holds_not_finite(counts):  # nan is not None, and not infinity
        return json.dumps(_builtins(counts)).encode()
    return text


def _builtins(counts: object) -> object:
    return msgspec.to_builtins(counts, enc_hook=_plain_form, str_keys=True, order="deterministic")


def digest_of(counts: object, what: str, instead: str) -> bytes:
    """Return the digest of what must be the same in a repeat; an error says what to pass instead."""
    try:
        text = _as_json(counts)
    except Exception as problem:
        raise Malformed(f"{what} cannot be compared in a repeat ({problem}); {instead}") from None
    return blake2b(text, digest_size=16).digest()


class _NotPlainError(TypeError):
    """A value is not plain data; the text says which."""


def _plain_form(value: Any) -> object:
    """Return a value that msgspec does not know as plain data."""
    if _is_model(type(value)):
        # By the names of its fields, and without what is computed: so it can be read back.
        return value.model_dump(mode="json", by_alias=False, round_trip=True)
    raise _NotPlainError(f"it contains a value of the type {type(value).__qualname__!r}")


def _model_from(kind: Any, value: object) -> object:
    """Return a pydantic model that lies in plain data."""
    return _by_name(kind.model_validate_json)(msgspec.json.encode(value))


def _by_name(validate: Callable[..., object]) -> Callable[[bytes], object]:
    """Return how JSON with the names of fields is read: aliases are for other texts than ours."""
    return functools.partial(validate, by_alias=False, by_name=True)


def _is_model(kind: object) -> bool:
    """Say whether this is a pydantic model, without importing pydantic where it is not used."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


# ── results ──────────────────────────────────────────────────────────────────────────────────────


class ResultCodec:
    """How the results of one type are stored and read back."""

    def __init__(self, kind: object) -> None:
        self._read: Callable[[bytes], object]
        self._write: Callable[[Any], bytes]
        if _mentions_model(kind):
            from pydantic import TypeAdapter

            adapter: Any = TypeAdapter(cast("Any", kind))
            self._read = _by_name(adapter.validate_json)
            self._write = functools.partial(adapter.dump_json, by_alias=False, round_trip=True)
        else:
            self._read = msgspec.json.Decoder(kind, dec_hook=_model_from).decode
            _check_readable(msgspec.inspect.type_info(kind), set())
            self._write = _encode

    @classmethod
    def of(cls, function: AnyFunction) -> ResultCodec:
        """Return how the results of a function are stored, by its annotation."""
        inner = inspect.unwrap(function)
        # Of the annotations only this one: the others may name what is imported for the type checker.
        only = {"return": getattr(inner, "__annotations__", {}).get("return", Any)}
        try:
            hints = typing.get_type_hints(
                SimpleNamespace(__annotations__=only), globalns=getattr(inner, "__globals__", {})
            )
            return cls(hints["return"])
        except Exception as problem:
            raise ProgramError(
                f"a repeat of {name_of(function)} could not be given its result: {problem}; "
                "annotate what it returns as plain data, a dataclass, a pydantic model or a msgspec Struct"
            ) from None

    def read(self, data: bytes) -> object:
        """Return a stored result. Raises `ValueError` if it does not fit the type."""
        return self._read(data)

    def _read_back(self, result: object, data: bytes) -> object:
        """Return what a result has become as JSON; raise if that is something else. A pydantic model may be
        told to write nan in a way of its own, and to read that."""
        try:
            read = self._read(data)
        except ValueError:
            check_finite(result, data)
            raise
        if b"null" in data and not holds_not_finite(read):
            check_finite(result, data)
        return read

    def answer(self, result: object) -> tuple[Answer, object]:
        """Return the answer that stores a result, and the result as a repeat reads it, which the first caller
        gets too; of one that cannot be stored, an answer that says so."""
        try:
            data = self._write(result)
            read = self._read_back(result, data)
        except Exception as problem:
            told = isinstance(problem, _NotPlainError) or type(problem) is ValueError
            why = str(problem) if told else said(problem)
            why = f"it ran, but its result cannot be stored: {why}; {STORABLE}"
            return Answer(UNSTORABLE, b"", why), None
        if len(data) > RESULT_LIMIT:
            why = f"it ran, but its result has {len(data)} bytes; the limit is {RESULT_LIMIT}"
            return Answer(UNSTORABLE, b"", why), None
        return Answer(OK, data), read


def _encode(result: object) -> bytes:
    return msgspec.json.encode(result, enc_hook=_plain_form)


def _mentions_model(kind: object) -> bool:
    """Say whether a type is a pydantic model, or is made of one."""
    return _is_model(kind) or any(_mentions_model(part) for part in typing.get_args(kind))


def _check_readable(kind: object, seen: set[int]) -> None:
    """Raise a `TypeError` for a class that msgspec takes, but cannot read back: that would show after the
    run."""
    if isinstance(kind, msgspec.inspect.CustomType) and not _is_model(kind.cls):
        raise TypeError(f"{kind.cls.__qualname__} cannot be read back")
    if isinstance(kind, tuple):
        parts = kind
    elif isinstance(kind, msgspec.inspect.Type | msgspec.inspect.Field) and id(kind) not in seen:
        seen.add(id(kind))
        parts = tuple(getattr(kind, name) for name in kind.__struct_fields__)
    else:
        return
    for part in parts:
        _check_readable(part, seen)


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────


def error_answer(problem: Exception) -> Answer:
    """Return the answer that stores an exception."""
    data = msgspec.json.encode((type(problem).__qualname__, _text_of(problem, str)))
    return Answer(ERROR, data, said(problem))


def said(problem: BaseException) -> str:
    """Return what an exception says, in at most 500 characters."""
    return _text_of(problem, repr)[:500]


def _text_of(problem: BaseException, say: Callable[[object], str]) -> str:
    """Return what an exception says, as text that can be stored whatever it holds."""
    try:
        text = say(problem)
    except Exception:
        text = f"{type(problem).__qualname__}, which cannot be shown"
    return text[:DETAIL_LIMIT].encode(errors="replace").decode()
