"""Background work that does not die quietly, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from duly.runtime.logs import RateLimitedLog
from duly.runtime.tasks import STABLE, UNSTEADY, Supervisor
from duly.testing.loops import VirtualLoop


async def for_ever() -> None:
    await asyncio.Event().wait()


def virtual(program: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(program)


def test_work_that_fails_is_started_again_and_counted() -> None:
    async def program() -> None:
        tasks, starts = Supervisor(), 0

        async def work() -> None:
            nonlocal starts
            starts += 1
            if starts < 3:
                raise KeyError("a bug")
            await asyncio.sleep(1_000)

        tasks.spawn("reader", work)
        await asyncio.sleep(1)
        assert starts == 3
        assert tasks.failures == {"reader": 2}
        assert tasks.problems == {}
        await tasks.stop()

    virtual(program())


def test_a_task_that_is_cancelled_from_outside_is_started_again() -> None:
    async def program() -> None:
        tasks = Supervisor()
        life = tasks.spawn("reader", for_ever)
        await asyncio.sleep(0)
        first = life.task
        assert first is not None
        first.cancel()
        await asyncio.sleep(1)
        assert life.task is not first
        assert life.task is not None
        assert not life.task.done()
        assert tasks.failures == {"reader": 1}
        await tasks.stop()

    virtual(program())


def test_work_that_does_not_stay_up_is_a_problem_by_its_name_until_it_does() -> None:
    async def program() -> None:
        tasks, broken = Supervisor(), True

        async def work() -> None:
            await asyncio.sleep(0.01)
            if broken:
                raise OSError("no")
            await asyncio.sleep(1_000)

        tasks.spawn("link", work)
        await asyncio.sleep(5)
        assert tasks.failures["link"] > UNSTEADY
        assert list(tasks.problems) == ["link"]
        broken = False
        await asyncio.sleep(5 + STABLE + 1)
        assert tasks.problems == {}
        await tasks.stop()

    virtual(program())


def test_work_with_a_number_of_tries_is_given_up_and_its_waiters_hear_why() -> None:
    async def program() -> None:
        tasks = Supervisor()

        async def work() -> None:
            raise KeyError("a bug")

        tasks.spawn("engine", work, tries=3)
        with pytest.raises(KeyError, match="a bug"):
            await tasks.ended()
        assert tasks.failures == {"engine": 3}
        assert list(tasks.problems) == ["engine"]
        with pytest.raises(KeyError, match="a bug"):
            await tasks.ended()  # also who asks later

    virtual(program())


def test_periodic_work_goes_on_after_a_failure_and_is_a_problem_when_it_only_fails() -> None:
    async def program() -> None:
        tasks, runs = Supervisor(), 0

        async def work() -> None:
            nonlocal runs
            runs += 1
            if runs in (2, 5, 6, 7, 8):
                raise KeyError(runs)

        tasks.every("pruning", 60, work)
        await asyncio.sleep(60 * 4.5)
        assert runs == 4
        assert tasks.failures == {"pruning": 1}
        assert not tasks.problems
        await asyncio.sleep(60 * 4)
        assert runs == 8
        assert list(tasks.problems) == ["pruning"]
        await asyncio.sleep(70)
        assert runs == 9
        assert not tasks.problems
        await tasks.stop()

    virtual(program())


def test_work_for_later_waits_once_and_is_then_done_until_it_succeeds() -> None:
    async def program() -> None:
        tasks, loop = Supervisor(), asyncio.get_running_loop()
        begun, tries = loop.time(), list[float]()

        async def work() -> None:
            tries.append(loop.time() - begun)
            if len(tries) < 2:
                raise KeyError("a bug")

        tasks.after("report", 30, work)
        await asyncio.sleep(29)
        assert tries == []
        await asyncio.sleep(29)
        assert tries[0] == 30
        assert len(tries) == 2
        assert tries[1] < 32, "the wait is not repeated"
        await tasks.stop()

    virtual(program())


def test_after_the_stop_nothing_runs_and_nothing_is_started() -> None:
    async def program() -> None:
        tasks, runs = Supervisor(), 0

        async def work() -> None:
            nonlocal runs
            runs += 1

        for n in range(20):  # more than any list of handles that could be cut short
            tasks.every(f"chore {n}", 1, work)
        tasks.spawn("reader", for_ever)
        tasks.do("job", asyncio.sleep(100))
        await asyncio.sleep(2.5)
        assert runs == 40
        await tasks.stop()
        await asyncio.sleep(10)
        assert runs == 40
        assert not tasks.lives
        assert tasks.do("late", asyncio.sleep(1)) is None
        assert len(asyncio.all_tasks()) == 1

    virtual(program())


def test_a_stop_ends_work_whose_library_swallows_a_cancellation() -> None:
    async def swallow() -> None:
        with suppress(asyncio.CancelledError):
            await for_ever()
        await for_ever()

    async def program() -> None:
        tasks = Supervisor()
        tasks.spawn("listening", swallow)
        tasks.do("sending", swallow())
        await asyncio.sleep(1)
        await tasks.stop()
        assert len(asyncio.all_tasks()) == 1

    virtual(program())


def test_a_job_that_fails_is_counted() -> None:
    async def program() -> None:
        tasks = Supervisor()

        async def work() -> None:
            raise KeyError("a bug")

        tasks.do("refreshing", work())
        await asyncio.sleep(1)
        assert tasks.failures == {"refreshing": 1}

    virtual(program())


def test_what_a_job_is_expected_to_fail_of_is_not_counted() -> None:
    async def program() -> None:
        tasks = Supervisor()

        async def work() -> None:
            raise KeyError("as usual")

        tasks.do("refreshing", work(), expected=(KeyError,))
        await tasks.finish()
        assert not tasks.failures

    virtual(program())


def test_jobs_may_finish_with_those_that_they_begin_and_what_takes_longer_is_ended() -> None:
    async def program() -> None:
        tasks = Supervisor()
        done: list[str] = []

        async def first() -> None:
            await asyncio.sleep(1)
            done.append("first")
            tasks.do("second", second())

        async def second() -> None:
            await asyncio.sleep(1)
            done.append("second")

        tasks.do("first", first())
        busy = tasks.busy
        assert busy
        await tasks.finish()
        assert done == ["first", "second"]
        tasks.do("first", first())
        tasks.do("long", asyncio.sleep(100))
        await tasks.finish(1.5)
        assert done == ["first", "second", "first"]
        assert not tasks.busy
        assert not tasks.failures
        tasks.do("first", first())  # it finishes jobs, and stops nothing
        await tasks.finish()
        assert done[-1] == "second"

    virtual(program())


def test_an_owner_answers_for_its_parts() -> None:
    async def program() -> None:
        hub, app, part = Supervisor(), Supervisor(), Supervisor()
        hub.adopt(app)
        app.adopt(part)

        async def work() -> None:
            raise KeyError("a bug")

        part.spawn("feed", work, tries=2)
        with pytest.raises(KeyError, match="a bug"):
            await hub.ended()
        assert hub.failures == app.failures == part.failures == {"feed": 2}
        assert list(hub.problems) == ["feed"]
        with pytest.raises(KeyError, match="a bug"):
            await hub.ended()
        await hub.stop()
        assert part.do("late", asyncio.sleep(1)) is None

    virtual(program())


def test_a_killed_owner_kills_its_parts_and_a_stopped_one_begins_nothing() -> None:
    async def program() -> None:
        hub, part, runs = Supervisor(), Supervisor(), 0
        hub.adopt(part)

        async def work() -> None:
            nonlocal runs
            runs += 1

        part.every("chore", 1, work)
        hub.kill()
        part.every("late chore", 1, work)
        part.spawn("late reader", for_ever)
        await asyncio.sleep(5)
        assert runs == 0
        assert not part.lives
        assert len(asyncio.all_tasks()) == 1

    virtual(program())


def test_work_that_is_let_finish_is_not_started_again() -> None:
    async def program() -> None:
        tasks, runs = Supervisor(), 0

        async def work() -> None:
            nonlocal runs
            runs += 1
            await asyncio.sleep(1)
            raise KeyError("a bug")

        life = tasks.spawn("reader", work)
        await asyncio.sleep(0.5)
        await life.finish()
        await asyncio.sleep(5)
        assert runs == 1
        assert not tasks.lives

    virtual(program())


def test_of_each_kind_one_record_a_second_is_logged_and_the_next_says_how_many_were_not() -> None:
    now, seen = 0.0, []

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    log = logging.Logger("here")
    log.addFilter(RateLimitedLog(now=lambda: now))
    log.addHandler(Sink())
    for n in range(5):
        log.error("it failed: %d", n)
    log.error("something else")
    assert seen == ["it failed: 0", "something else"]
    now = 1.5
    log.error("it failed: %d", 7)
    assert seen[-1] == "it failed: 7 (and 4 more of this kind before it)"
