"""Commits events of the tower: hands one to the engine, and waits until what follows from it is stored."""

from __future__ import annotations

import asyncio

from duly.core.steps import Arrived, MachineEvent
from duly.runtime.engine import Engine


async def commit(engine: Engine, event: Arrived | MachineEvent) -> None:
    """Hand an event to the engine; returns when what follows from it is stored."""
    stored = asyncio.Event()
    await engine.put(event, stored.set)
    await stored.wait()
