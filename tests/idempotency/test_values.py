"""Arguments and results of `duly.once` as bytes, through the decorator as users meet them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from math import inf, nan
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

import duly
from duly.errors import Conflict, Malformed, ProgramError, Unstorable
from duly.idempotency.blocking import BlockingTransaction
from duly.idempotency.runs import DeclaredEffect
from duly.idempotency.values import digest_of

AT = datetime(2026, 11, 17, tzinfo=UTC)


class LampSize(Enum):
    """A size of a lamp."""

    SMALL = "small"


class Lamp(BaseModel):
    """A pydantic model that lies in other things."""

    id: UUID
    made: datetime


@dataclass
class Shelf:
    """A dataclass with a model in it."""

    lamps: list[Lamp]
    best: Lamp | None = None


class Box(msgspec.Struct):
    """A Struct with a model in it."""

    lamp: Lamp


class AliasedOrder(BaseModel):
    """A model whose texts elsewhere have other names, and that takes no others."""

    model_config = ConfigDict(extra="forbid")

    id: int = Field(alias="orderId")
    price: float | None = Field(None, validation_alias="cost", serialization_alias="total")

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way
    @property
    def name(self) -> str:
        """The name of the order."""
        return f"order {self.id}"


class LampPower(msgspec.Struct):
    """A Struct with a number."""

    watts: float


class Measured(BaseModel):
    """A model that is told how to write what is no number."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    value: float
    note: str | None = None


@dataclass
class Basket:
    """A dataclass with such a model in it."""

    order: AliasedOrder


@dataclass
class LargeShelf(Shelf):
    """More than what was promised."""

    rows: int = 3


ORDER = AliasedOrder.model_validate({"orderId": 7, "cost": 1.5})
LAMP = Lamp(id=UUID(int=7), made=AT)


def once_of(
    path: Path, function: Callable[..., Any], effect: DeclaredEffect = "at_most_once"
) -> Callable[..., Any]:
    return duly.once(f"sqlite:///{path}/app.db", scope="s", key=lambda *_: "k", effect=effect)(function)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (dict, {"at": AT, "pair": (1, 2)}),
        (dict[str, Any], {"id": UUID(int=7)}),
        (dict, {1: 2}),
        (list, [LampSize.SMALL]),
        (float, 1),
        (Shelf, LargeShelf([LAMP])),
        (Shelf, Shelf([LAMP], LAMP)),
        (Box, Box(LAMP)),
    ],
)
@pytest.mark.parametrize("effect", ["at_most_once", "exactly_once"])
def test_the_first_caller_gets_what_a_repeat_gets(
    tmp_path: Path, kind: object, result: object, effect: DeclaredEffect
) -> None:
    def made(*_: object) -> object:
        return result

    made.__annotations__ = {"return": kind}
    function = once_of(tmp_path, made, effect)
    first, again = function(), function()
    assert repr(first) == repr(again)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (AliasedOrder, ORDER),
        (list[AliasedOrder], [ORDER]),
        (Basket, Basket(ORDER)),
        (Measured, Measured(value=nan)),
        (Measured, Measured(value=-inf)),
    ],
)
def test_a_model_comes_back_as_it_was(tmp_path: Path, kind: object, result: object) -> None:
    def made() -> object:
        return result

    made.__annotations__ = {"return": kind}
    function = once_of(tmp_path, made)
    assert repr(function()) == repr(function()) == repr(result)


@pytest.mark.parametrize("kind", [Any, float, float | None])
@pytest.mark.parametrize("result", [nan, inf, -inf])
@pytest.mark.parametrize("effect", ["at_most_once", "exactly_once"])
def test_a_number_that_json_does_not_have_is_told_and_not_taken_for_none(
    tmp_path: Path, kind: object, result: float, effect: DeclaredEffect
) -> None:
    def made(*_: object) -> object:
        return result

    made.__annotations__ = {"return": kind}
    function = once_of(tmp_path, made, effect)
    for _ in range(2):
        with pytest.raises(Unstorable, match="it contains nan or an infinity, which JSON does not have"):
            function()


@pytest.mark.parametrize(
    "result",
    [
        {"a": [None, nan]},
        [(1, inf)],
        LampPower(nan),
        AliasedOrder.model_validate({"orderId": 7, "cost": nan}),
    ],
    ids=repr,
)
def test_such_a_number_is_found_wherever_it_lies(tmp_path: Path, result: object) -> None:
    function = once_of(tmp_path, lambda: result)
    with pytest.raises(Unstorable, match="it contains nan or an infinity"):
        function()
    url = f"sqlite:///{tmp_path}/block.db"
    with pytest.raises(Unstorable), duly.once_block(url, scope="s", key="k") as block:
        block.result = result


@pytest.mark.parametrize("other", [None, inf, -inf, "NaN", [nan]])
def test_such_an_argument_is_only_itself(tmp_path: Path, other: object) -> None:
    def shown(value: object) -> str:
        return repr(value)

    function = once_of(tmp_path, shown)
    assert function(nan) == function(nan) == "nan"
    with pytest.raises(Conflict):
        function(other)


def test_a_block_has_the_same_result_every_time(tmp_path: Path) -> None:
    seen, url = [], f"sqlite:///{tmp_path}/app.db"
    effects: tuple[DeclaredEffect, ...] = ("at_most_once", "exactly_once")
    for effect in effects:
        for _ in range(2):
            with duly.once_block(url, scope=effect, key="k", effect=effect) as block:
                if block.fresh:
                    block.result = {"at": AT, "pair": (1, 2)}
            seen.append(repr(block.result))
    assert set(seen) == {"{'at': '2026-11-17T00:00:00Z', 'pair': [1, 2]}"}


def test_dicts_with_numbers_and_enums_as_keys_are_compared() -> None:
    same = digest_of({1: {2, 3}, LampSize.SMALL: [LAMP]}, "f", "pass another")
    assert digest_of({LampSize.SMALL: [LAMP], 1: {3, 2}}, "f", "pass another") == same
    assert digest_of({1: {2, 4}, LampSize.SMALL: [LAMP]}, "f", "pass another") != same
    with pytest.raises(Malformed, match="cannot be compared"):
        digest_of({(1, 2): 3}, "f", "pass another")


def order_once(url: str, effect: DeclaredEffect) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A decorator of which type checkers know only that it takes any function."""
    return duly.once(url, scope="b", key=lambda _, order: order, effect=effect)


def test_methods_of_a_class_run_once_whichever_way_they_are_called(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    runs = []

    class Shop:
        @classmethod
        @duly.once(url, scope="s", key=lambda _, order: order)
        def charge(cls, order: str) -> str:
            runs.append(cls)
            return order

        @classmethod
        @order_once(url, "exactly_once")
        def book(cls, tx: BlockingTransaction, order: str) -> int:
            runs.append(cls)
            return len(tx.fetch("SELECT 1"))

    assert (Shop.charge("o-1"), Shop().charge("o-1")) == ("o-1", "o-1")
    assert (Shop.book("o-1"), Shop().book("o-1")) == (1, 1)
    assert runs == [Shop, Shop]


def test_a_coroutine_that_a_plain_function_returns_has_not_run_and_burns_no_key(tmp_path: Path) -> None:
    async def charge(order: str) -> str:
        return order

    def hidden(order: str) -> Any:
        return charge(order)

    function = once_of(tmp_path, hidden)
    for _ in range(2):
        with pytest.raises(ProgramError, match="decorate the async function itself"):
            function("o-1")
