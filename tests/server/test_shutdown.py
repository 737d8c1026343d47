"""The parts of a hub end in reverse order and in a bounded time, whatever each of them does."""

from __future__ import annotations

import asyncio

import pytest

from duly.errors import LedgerUnavailable
from duly.server import shutdown
from duly.server.shutdown import Shutdown


async def test_the_last_part_is_stopped_first() -> None:
    ended: list[str] = []
    parts = Shutdown()

    async def close() -> None:
        ended.append("ledger")

    parts.add("the ledger", close)
    parts.call("the run file", lambda: ended.append("run file"))
    await parts.run()
    assert ended == ["run file", "ledger"]


async def test_a_part_that_waits_for_ever_is_cancelled_and_the_others_are_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "STOP_SECONDS", 0.0)
    monkeypatch.setattr(shutdown, "PART_SECONDS", 0.01)
    ended: list[str] = []
    parts = Shutdown()
    parts.call("the run file", lambda: ended.append("run file"))

    async def wait() -> None:
        await asyncio.Event().wait()

    parts.add("the gateway", wait)
    await parts.run()
    assert ended == ["run file"]
    assert "the gateway did not end in time" in caplog.text


async def test_a_ledger_that_is_away_is_no_failure_and_a_bug_is_raised_after_everything_was_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []
    parts = Shutdown()
    parts.call("the run file", lambda: ended.append("run file"))

    async def away() -> None:
        raise LedgerUnavailable("PostgreSQL cannot be used now")

    async def bug() -> None:
        raise ZeroDivisionError

    parts.add("chat", away)
    parts.add("alerts", bug)
    with pytest.raises(ZeroDivisionError):
        await parts.run()
    assert ended == ["run file"]
    assert "chat ended without the ledger: PostgreSQL cannot be used now" in caplog.text
