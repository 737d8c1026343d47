"""Coroutines that run without a loop, and the tests that must use them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.at_once import at_once

LOOP = "asyncio" + ".run("


async def _double(n: int) -> int:
    return 2 * n


def test_it_returns_what_the_coroutine_returns() -> None:
    assert at_once(_double(4)) == 8


def test_it_refuses_to_wait() -> None:
    with pytest.raises(AssertionError, match="sleep waited"):
        at_once(asyncio.sleep(0))


def test_what_hypothesis_drives_makes_no_loop_for_every_step() -> None:
    """Each one costs a walk over every task of the worker, so such a test takes longer the later it runs."""
    files = Path(__file__).parent.rglob("*.py")
    driven = {file.name: text for file in files if "\nfrom hypothesis" in (text := file.read_text())}
    assert "test_inbox.py" in driven
    assert [name for name, text in driven.items() if LOOP in text] == []
    for helper in ("driving.py", "monitor/watching.py"):
        assert LOOP not in (Path(__file__).parent / "core" / helper).read_text()
