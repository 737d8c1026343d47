"""A number that JSON does not have is found wherever it is, and never written as nothing."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from duly.core.finite import check_finite, holds_not_finite


class MaybeNumber(msgspec.Struct):
    value: float | None
    more: tuple[object, ...] = ()


class DumpingModel:
    """An object of a library that writes itself as plain data, as pydantic's do."""

    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, object]:
        return self.fields


NAN, INFINITY = float("nan"), float("inf")


FOUND: Final = (
    NAN,
    -INFINITY,
    [1, [INFINITY]],
    {"a": {"b": NAN}},
    MaybeNumber(NAN),
    MaybeNumber(1, (2, NAN)),
)
OTHERS: Final = (None, 1.5, "nan", [None], {"a": (1,)}, MaybeNumber(None), DumpingModel(at=2.5), object())


@pytest.mark.parametrize("value", [*FOUND, DumpingModel(at=NAN)])
def test_it_is_found(value: Any) -> None:
    assert holds_not_finite(value)
    with pytest.raises(ValueError, match="JSON does not have"):
        check_finite(value, b"null")


@pytest.mark.parametrize("value", OTHERS)
def test_nothing_else_is(value: Any) -> None:
    assert not holds_not_finite(value)
    check_finite(value, b"null")


def test_a_text_without_null_is_not_searched() -> None:
    check_finite(NAN, b"[1.5]")
