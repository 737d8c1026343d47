"""What callers hand over while a flush is under way becomes the next flush, within limits."""

from __future__ import annotations

import asyncio

import pytest

from duly.core.operations import Group, Results
from duly.errors import Stopped
from duly.storage.group_commit import GROUP_LIMIT, CommitBatch, GroupCommit


class AloneBatch(CommitBatch):
    alone = True


class HeldFlushes:
    """Takes flushes, and ends each when the test says so."""

    def __init__(self) -> None:
        self.flushes: list[list[CommitBatch]] = []
        self.learned: list[Results] = []
        self.commits = GroupCommit(self.flushes.append, self.learned.extend)

    def end(self) -> list[CommitBatch]:
        """End the flush that is under way; returns what was in it."""
        flush = self.flushes.pop(0)
        for batch in flush:
            if batch.error is None:
                batch.results = [Results([], [at]) for at, _ in enumerate(batch.groups)]
        self.commits.flushed(flush)
        return flush


def batch(groups: int) -> CommitBatch:
    many: list[Group] = [()] * groups
    return CommitBatch(many)


async def test_all_that_wait_share_a_flush_up_to_the_limit() -> None:
    store = HeldFlushes()
    many = [batch(GROUP_LIMIT // 2) for _ in range(5)]
    for each in many:
        store.commits.add(each)
    await asyncio.sleep(0)
    assert [store.end() for _ in range(3)] == [many[:2], many[2:4], many[4:]]
    few = [batch(1) for _ in range(100)]
    for each in few:
        store.commits.add(each)
    await asyncio.sleep(0)
    assert store.end() == few
    assert not store.flushes
    assert all(each.future.result() is each.results for each in many + few)
    assert len(store.learned) == GROUP_LIMIT // 2 * 5 + 100


async def test_what_is_flushed_by_itself_waits_its_turn() -> None:
    store = HeldFlushes()
    waiting = [batch(1), AloneBatch(()), AloneBatch(()), batch(1), batch(2)]
    for each in waiting:
        store.commits.add(each)
    await asyncio.sleep(0)
    assert [store.end() for _ in range(4)] == [waiting[:1], [waiting[1]], [waiting[2]], waiting[3:]]


async def test_what_failed_is_not_learned_and_nothing_is_taken_after_the_end() -> None:
    store = HeldFlushes()
    good, bad = batch(1), batch(1)
    bad.error = RuntimeError("no")
    told = [store.commits.add(good), store.commits.add(bad)]
    await asyncio.sleep(0)
    store.end()
    assert await told[0] == good.results == store.learned
    with pytest.raises(RuntimeError, match="no"):
        await told[1]
    await store.commits.close()
    with pytest.raises(Stopped):
        store.commits.add(batch(1))
