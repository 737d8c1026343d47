"""What `duly.once_block` promises, as `async with` and as plain `with`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest

import duly
from duly.errors import Failed, Malformed, ProgramError, TooLarge, Unstorable
from duly.idempotency.ledgers import close_ledgers


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    yield f"sqlite:///{tmp_path}/app.db"
    await close_ledgers()


async def test_the_first_run_stores_its_result_and_a_repeat_finds_it(url: str) -> None:
    found = []
    for _ in range(3):
        async with duly.once_block(url, scope="shop", key="o-1", meaning={"total": 12}) as block:
            if block.fresh:
                block.result = {"paid": 12}
        found.append((block.fresh, block.result))
    assert found == [(True, {"paid": 12}), (False, {"paid": 12}), (False, {"paid": 12})]


async def test_another_meaning_under_the_same_key_is_a_conflict(url: str) -> None:
    async with duly.once_block(url, scope="shop", key="o-1", meaning=1):
        pass
    with pytest.raises(duly.Conflict):
        async with duly.once_block(url, scope="shop", key="o-1", meaning=2):
            pytest.fail("it ran")


async def test_a_result_is_of_the_type_that_it_returns(url: str) -> None:
    for _ in range(2):
        async with duly.once_block(url, scope="shop", key="o-1", returns=tuple[int, str]) as block:
            if block.fresh:
                block.result = (1, "a")
        assert block.result == (1, "a")


async def test_an_exception_frees_the_key_or_is_stored(url: str) -> None:
    with pytest.raises(ValueError, match="no"):
        async with duly.once_block(url, scope="shop", key="o-1"):
            raise ValueError("no")
    async with duly.once_block(url, scope="shop", key="o-1") as block:
        assert block.fresh
    with pytest.raises(ValueError, match="no"):
        async with duly.once_block(url, scope="shop", key="o-2", errors="store"):
            raise ValueError("no")
    with pytest.raises(Failed, match="no"):
        async with duly.once_block(url, scope="shop", key="o-2", errors="store"):
            pytest.fail("it ran")


@pytest.mark.parametrize("errors", ["retry", "store"])
async def test_a_block_joins_the_ledgers_transaction(url: str, errors: Literal["retry", "store"]) -> None:
    async def book(key: str, problem: Exception | None = None) -> int:
        block = duly.once_block(
            url,
            scope="shop",
            key=key,
            effect="exactly_once",
            errors=errors,
        )
        async with block:
            if block.fresh:
                await block.tx.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT)")
                await block.tx.execute("INSERT INTO bookings VALUES (?)", key)
                if problem is not None:
                    raise problem
                ((count,),) = await block.tx.fetch("SELECT count(*) FROM bookings")
                block.result = count
        return int(block.result)

    with pytest.raises(ValueError, match="no"):
        await book("o-1", ValueError("no"))
    if errors == "store":
        with pytest.raises(Failed, match="no"):
            await book("o-1")
    else:
        assert await book("o-1") == 1
    assert [await book("o-2"), await book("o-2")] == [2 if errors == "retry" else 1] * 2


async def test_a_result_that_cannot_be_stored_is_told_and_undone_in_a_transaction(url: str) -> None:
    with pytest.raises(Unstorable):
        async with duly.once_block(url, scope="shop", key="o-1") as block:
            block.result = object()
    with pytest.raises(Unstorable):
        async with duly.once_block(url, scope="shop", key="o-2", effect="exactly_once") as block:
            block.result = object()
    async with duly.once_block(url, scope="shop", key="o-2", effect="exactly_once") as block:
        assert block.fresh


def test_a_plain_with_does_the_same(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    for n in range(2):
        with duly.once_block(url, scope="shop", key="o-1") as block:
            if block.fresh:
                block.result = "paid"
        assert (block.fresh, block.result) == (n == 0, "paid")
    for n in range(2):
        with duly.once_block(url, scope="shop", key="o-2", effect="exactly_once") as block:
            if block.fresh:
                block.tx.execute("CREATE TABLE bookings (id TEXT)")
                block.result = block.tx.fetch("SELECT count(*) FROM bookings")[0][0]
        assert (block.fresh, block.result) == (n == 0, 0)
    with pytest.raises(KeyboardInterrupt), duly.once_block(url, scope="shop", key="o-3"):
        raise KeyboardInterrupt
    with pytest.raises(duly.Unknown), duly.once_block(url, scope="shop", key="o-3"):
        pytest.fail("it ran")


async def test_wrong_use_is_told(url: str) -> None:
    block = duly.once_block(url, scope="shop", key="o-1")
    for look in (lambda: block.fresh, lambda: block.result):
        with pytest.raises(ProgramError, match="enter the block first"):
            look()
    with pytest.raises(Malformed, match="pass plain data as meaning="):
        duly.once_block(url, scope="shop", key="o-1", meaning=object())
    with pytest.raises(Malformed, match="the key of a call cannot be ''"):
        duly.once_block(url, scope="shop", key="")
    with pytest.raises(TooLarge, match="use a hash of it"):
        duly.once_block(url, scope="shop", key="k" * 201)
    async with block:
        with pytest.raises(ProgramError, match="exactly_once"):
            _ = block.tx
    with pytest.raises(ProgramError, match="entered once"):
        async with block:
            pytest.fail("it ran")
    async with duly.once_block(url, scope="shop", key="o-1") as again:
        with pytest.raises(ProgramError, match=r"if block\.fresh"):
            again.result = 2
    with pytest.raises(ProgramError, match="the key itself"):
        duly.once_block(url, scope="shop", key=lambda order: order)
    with pytest.raises(ProgramError, match="could not be read back"):
        duly.once_block(url, scope="shop", key="o-1", returns=type(block))
    async with await duly.open_ledger("memory:") as ledger:
        with pytest.raises(Malformed, match="'async with'"), duly.once_block(ledger, scope="s", key="k"):
            pytest.fail("it ran")


async def test_a_block_within_itself_is_told_instead_of_waiting_for_its_own_end(url: str) -> None:
    effects: tuple[Literal["at_most_once", "exactly_once"], ...] = ("at_most_once", "exactly_once")

    async def nest(effect: Literal["at_most_once", "exactly_once"]) -> None:
        outer = duly.once_block(url, scope=effect, key="o-1", effect=effect)
        async with outer, duly.once_block(url, scope=effect, key="o-1", effect=effect):
            pytest.fail("it ran")

    for effect in effects:
        for _ in range(2):  # the key is free again
            with pytest.raises(ProgramError, match="would wait for its own end"):
                await nest(effect)
        async with duly.once_block(url, scope=effect, key="o-1", effect=effect) as block:
            assert block.fresh


def test_a_plain_block_within_itself_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    told = pytest.raises(ProgramError, match="would wait for its own end")
    outer, inner = (duly.once_block(url, scope="shop", key="o-1") for _ in range(2))
    with told, outer, inner:
        pytest.fail("it ran")
    with duly.once_block(url, scope="shop", key="o-1") as block:
        assert block.fresh


async def test_a_function_within_a_block_of_its_key_is_told(url: str) -> None:
    @duly.once(url, scope="shop", key=str)
    async def charge(order: str) -> None:
        pytest.fail("it ran")

    with pytest.raises(ProgramError, match="would wait for its own end"):
        async with duly.once_block(url, scope="shop", key="o-1"):
            await charge("o-1")


async def test_a_result_that_cannot_be_stored_is_named_in_plain_words(url: str) -> None:
    with pytest.raises(Unstorable) as refused:
        async with duly.once_block(url, scope="shop", key="o-1") as block:
            block.result = {"found": object()}
    assert "it contains a value of the type 'object'; return plain data (None, numbers" in str(refused.value)
    assert "Error(" not in str(refused.value)
