"""Exports and copies: everything arrives as it was, in any database, or nothing does."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from duly.core.operations import AppendEntry
from duly.errors import LedgerError, LedgerInUse, LedgerTooNew, LedgerUnavailable, Malformed
from duly.storage import file_url, open_ledger, open_snapshot
from duly.storage.bulk_load import fill
from duly.storage.copy import copy_ledger, empty_ledger
from duly.storage.export import ExportReader, export_lines
from duly.storage.snapshot import Summaries, summarize
from duly.testing import ManualClock
from tests import servers
from tests.small_disk import small_disk
from tests.storage.whole_ledger import fill_up


@pytest.fixture
async def ledger(tmp_path: Path) -> str:
    """The URL of a ledger with something in every table."""
    url = file_url(tmp_path / "ledger.db")
    async with await open_ledger(url, clock=ManualClock()) as made:
        await fill_up(made, tmp_path)
    return url


async def lines_of(url: str, **options: Any) -> list[bytes]:
    async with await open_snapshot(url) as snapshot:
        return [line async for line in export_lines(snapshot, 5, **options)]


async def digests_of(url: str) -> Summaries:
    async with await open_snapshot(url) as snapshot:
        return await summarize(snapshot)


async def load(lines: list[bytes], url: str) -> None:
    async with empty_ledger(url) as target:
        await fill(target, ExportReader(lines).rows)


async def test_a_ledger_goes_to_postgres_and_back_unchanged(
    ledger: str, postgres_server: servers.Postgres, tmp_path: Path
) -> None:
    there, back = postgres_server.create_database(), file_url(tmp_path / "back.db")
    first = await copy_ledger(ledger, there)
    second = await copy_ledger(there, back)
    assert first == second == await digests_of(ledger)
    assert first["entries"].rows == 6
    with pytest.raises(LedgerError, match="not empty"):
        await copy_ledger(ledger, there)
    async with await open_ledger(back, clock=ManualClock()) as again:
        assert len(await again.open_deliveries("device")) == 1


async def test_a_ledger_in_use_is_not_copied(
    ledger: str, postgres_server: servers.Postgres, tmp_path: Path
) -> None:
    url = postgres_server.create_database()
    for used in (ledger, url):
        async with await open_ledger(used):
            with pytest.raises(LedgerInUse, match=r"stop|in this process"):
                await copy_ledger(used, file_url(tmp_path / "copy.db"))
    assert not (tmp_path / "copy.db").exists()


async def test_a_ledger_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="check the path"):
        await copy_ledger(file_url(tmp_path / "wrong.db"), file_url(tmp_path / "copy.db"))
    assert list(tmp_path.iterdir()) == []
    Path(tmp_path, "empty.db").touch()
    with pytest.raises(LedgerUnavailable, match="no ledger"):
        await copy_ledger(file_url(tmp_path / "empty.db"), file_url(tmp_path / "copy.db"))
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("empty.db", 0)]


async def test_a_copy_that_fails_leaves_nothing(ledger: str, tmp_path: Path) -> None:
    def stop(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await copy_ledger(ledger, file_url(tmp_path / "copy.db"), stop)
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == []


async def test_a_copy_to_a_disk_with_almost_enough_room_is_whole_or_leaves_nothing(tmp_path: Path) -> None:
    """The log of the new ledger fits, but it and the database together do not."""
    url = file_url(tmp_path / "ledger.db")
    async with await open_ledger(url, clock=ManualClock()) as made:
        for n in range(20):
            await made.write(AppendEntry("large", secrets.token_bytes(100_000), n))
    ends = []
    for size in range(1_600, 6_000, 400):
        with small_disk(tmp_path / f"disk{size}", f"{size}k") as disk:
            with suppress(LedgerUnavailable):
                await copy_ledger(url, file_url(disk / "copy.db"))
            ends.append("whole" if list(disk.iterdir()) else "nothing")
    assert sorted(ends) == ends
    assert set(ends) == {"nothing", "whole"}


async def test_an_export_is_imported_unchanged(ledger: str, tmp_path: Path) -> None:
    lines = await lines_of(ledger)
    rows = [json.loads(line) for line in lines]
    (command,) = (one["row"] for one in rows if one.get("table") == "messages" and one["row"]["state"] == 10)
    assert command["key"] == {"scope": "app-1", "id": "1700000000001_1"}
    assert command["body"] == '{"open":true}'
    await load(lines, file_url(tmp_path / "new.db"))
    assert await digests_of(file_url(tmp_path / "new.db")) == await digests_of(ledger)


async def test_secrets_are_sealed_or_left_out(ledger: str, tmp_path: Path) -> None:
    assert b"sealed:1:" in b"".join(await lines_of(ledger))
    bare = await lines_of(ledger, secrets=False)
    assert b"sealed:1:" not in b"".join(bare)
    await load(bare, file_url(tmp_path / "bare.db"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[:-1], "cut off"),
        (lambda lines: lines[:3] + lines[4:], "was changed"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "out of order"),
        (lambda lines: [lines[0], b'{"table":"floor","row":{}}\n', *lines[1:]], "not have the columns"),
        (lambda lines: [lines[0], lines[1].replace(b'"until":0', b'"until":"0"'), *lines[2:]], "not int"),
        (lambda lines: [lines[0], b"[1]\n"], "not a JSON object"),
        (lambda lines: [lines[0], b"\xff\n"], "not JSON"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "line 4 of this export is out of order"),
        (lambda lines: [*lines, *lines], "goes on after its last line"),
        (lambda lines: [b"{}\n"], "not an export of duly"),
        (lambda lines: [], "cut off"),
    ],
)
async def test_an_export_that_was_changed_is_refused_and_nothing_is_stored(
    ledger: str, tmp_path: Path, change: Any, said: str
) -> None:
    lines = change(await lines_of(ledger))
    with pytest.raises(Malformed, match=said):
        await load(lines, file_url(tmp_path / "new.db"))
    assert not (tmp_path / "new.db").exists()


async def test_an_export_of_a_newer_format_is_refused() -> None:
    with pytest.raises(LedgerTooNew, match="upgrade duly"):
        ExportReader([b'{"duly_export":2}\n'])
