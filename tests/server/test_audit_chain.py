"""The audit chain: entries follow each other, and no change of one goes unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duly.core.operations import AppendEntry, PutItem, RewriteEntry
from duly.server.audit_chain import BUCKET, HEAD, STREAM, AuditChain
from duly.storage import file_url, open_ledger
from duly.storage.ledger import Ledger


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    async with await open_ledger(file_url(tmp_path / "ledger.db")) as book:
        yield book


async def written(ledger: Ledger, count: int) -> AuditChain:
    chain = AuditChain(ledger)
    for n in range(count):
        await chain.add("ann", "operator", "alert.ack", f"watch e{n}", "on my way")
    return chain


async def test_an_entry_says_who_did_what_and_names_the_one_before(ledger: Ledger) -> None:
    chain = await written(ledger, 2)
    (second, first), following = await chain.newest(10)
    assert (first["actor"], first["role"], first["action"]) == ("ann", "operator", "alert.ack")
    assert (first["target"], first["detail"], first["result"]) == ("watch e0", "on my way", "done")
    assert second["before"] == first["hash"]
    assert following is None


async def test_entries_are_paged_newest_first(ledger: Ledger) -> None:
    chain = await written(ledger, 5)
    page, following = await chain.newest(2)
    assert [one["n"] for one in page] == [5, 4]
    page, following = await chain.newest(2, following or 0)
    assert [one["n"] for one in page] == [3, 2]
    page, following = await chain.newest(2, following or 0)
    assert ([one["n"] for one in page], following) == ([1], None)


async def test_an_unbroken_chain_is_verified_and_so_is_an_empty_one(ledger: Ledger) -> None:
    assert (await AuditChain(ledger).verify()).problem is None
    check = await (await written(ledger, 3)).verify()
    assert (check.entries, check.problem) == (3, None)


async def test_entries_of_many_at_once_and_of_several_hubs_follow_each_other(ledger: Ledger) -> None:
    chains = [AuditChain(ledger), AuditChain(ledger)]
    await asyncio.gather(*(chains[n % 2].add("ann", "admin", "grant", f"d{n}") for n in range(20)))
    check = await chains[0].verify()
    assert (check.entries, check.problem) == (20, None)


async def test_a_changed_entry_is_noticed(ledger: Ledger) -> None:
    chain = await written(ledger, 3)
    (entry,) = await ledger.entries(STREAM, 1, 1)
    await ledger.write(RewriteEntry(STREAM, 2, entry.body.replace(b"ann", b"bob")))
    check = await chain.verify()
    assert check.problem is not None
    assert "entry 3 does not follow entry 2" in check.problem


async def test_a_changed_last_entry_is_noticed(ledger: Ledger) -> None:
    chain = await written(ledger, 3)
    (entry,) = await ledger.entries(STREAM, 2, 1)
    await ledger.write(RewriteEntry(STREAM, 3, entry.body.replace(b"ann", b"bob")))
    assert (await chain.verify()).problem is not None


async def test_removed_and_inserted_entries_are_noticed(ledger: Ledger) -> None:
    chain = await written(ledger, 3)
    await ledger.trim(STREAM, 1)
    assert "entry 1 is missing" in str((await chain.verify()).problem)
    await ledger.write(AppendEntry(STREAM, b'{"before":"x"}', 0))
    assert (await chain.verify()).problem is not None


async def test_a_chain_written_anew_is_noticed_by_the_hash_that_was_kept(
    ledger: Ledger, tmp_path: Path
) -> None:
    kept = (await (await written(ledger, 3)).verify()).head
    assert (await AuditChain(ledger).verify(kept)).problem is None
    async with await open_ledger(file_url(tmp_path / "other.db")) as other:
        forged = await written(other, 5)
        assert (await forged.verify()).problem is None
        assert "written anew" in str((await forged.verify(kept)).problem)


async def test_a_cut_end_is_noticed(ledger: Ledger) -> None:
    chain = await written(ledger, 2)
    head = (await chain.verify()).head
    await chain.add("eve", "admin", "profile.remove", "home")
    await ledger.write(PutItem(BUCKET, HEAD, head.encode()))
    assert (await chain.verify()).problem is not None


async def test_text_that_utf8_cannot_carry_is_stored_all_the_same(ledger: Ledger) -> None:
    chain = AuditChain(ledger)
    await chain.add("ann", "admin", "alert.ack", "\ud800" * 600, "x" * 10_000)
    assert (await chain.verify()).problem is None
