"""The cache of rows stays within its limits, and drops no more than it has to at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.core import operations as w
from duly.core.messages import Message
from duly.core.units import FOREVER
from duly.storage.sqlite import cached_rows
from duly.storage.sqlite.cached_rows import SHARE, CachedRows
from duly.storage.sqlite.ledger import SqliteLedger

AT = 1_700_000_000_000_000


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    async with await SqliteLedger.open(tmp_path / "app.db") as opened:
        yield opened


def message(n: int, size: int = 1) -> Message:
    return Message("app", f"{AT // 1000 + n}_{n}", "work", "lamp", b"x" * size)


async def rows_after(ledger: SqliteLedger, *messages: Message) -> CachedRows:
    """The cache once these messages are in the tables."""
    await ledger.write(*(w.Admit(one, FOREVER, AT) for one in messages))
    assert ledger._flushes is not None
    await ledger._flushes.settled()
    return ledger._flushes.rows


async def test_the_oldest_messages_are_dropped_beyond_the_limit(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedRows, "rows_kept", 64)
    await ledger.write(w.RaiseMark("mark", 1, 1))
    await rows_after(ledger, *map(message, range(64)))
    rows = await rows_after(ledger, message(64))
    assert [*rows.messages] == [message(n).key for n in range(1 + 64 // SHARE, 65)]
    assert "mark" in rows._marks, "there are few marks, and all stay"
    repeats = await ledger.commit([(w.Admit(message(n), FOREVER, AT),) for n in range(65)])
    assert not any(results.values[0].fresh for results in repeats)


async def test_messages_with_large_bodies_are_dropped_by_their_bytes(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_rows, "BYTES_KEPT", 64_000)
    for n in range(0, 320, 32):
        rows = await rows_after(ledger, *(message(n + more, 1_000) for more in range(32)))
        assert len(rows.messages) <= 64
    assert message(319).key in rows.messages
