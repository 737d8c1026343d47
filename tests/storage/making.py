"""Messages and writes for the tests of ledgers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from duly.core import operations as w
from duly.core.messages import Message
from duly.core.units import FOREVER
from tests.guard import GUARD


def message(n: int = 0, *, ms: int = 1_700_000_000_000, scope: str = "app-1", **more: Any) -> Message:
    fields: dict[str, Any] = {"kind": "lock_control", "recipient": "lock-1", "body": b'{"open":true}'} | more
    return Message(scope=scope, id=f"{ms}_{n}", **fields)


def admit(m: Message, at: int = 1, **more: Any) -> w.Admit:
    return w.Admit(m, until=FOREVER, at=at, **more)


async def until(condition: Callable[[], bool]) -> None:
    """Come back when it holds; for what has no event to wait on."""
    async with asyncio.timeout(GUARD):
        while not condition():
            await asyncio.sleep(0.001)
