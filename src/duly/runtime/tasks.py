"""Supervised background work: long-running tasks, periodic work, and small jobs.

The laws. No task dies silently: a failure is logged, counted and, for long-running work, followed by a
restart after a growing pause. Work that keeps failing is listed by `problems`, and so by the hub's health; it
is retried for ever unless it has a limited number of tries. A stopped supervisor starts nothing more.

A restart is a callback of the ended task, not another task, so that nothing is left that could die silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeAlias

from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND
from duly.errors import ProgramError
from duly.runtime.backoff import Backoff
from duly.runtime.logs import RateLimitedLog

LOG: Final = logging.getLogger("duly.runtime.tasks")
LOG.addFilter(RateLimitedLog())

RESTART: Final = RetryPolicy.exponential(50 * MS, 5 * SECOND, jitter=0.0)
STABLE: Final = 10.0
"""Seconds after which a start counts as a success."""
ENGINE_TRIES: Final = 5
"""How often in a row an engine may fail; then it is given up, and `ended` raises its error."""
UNSTEADY: Final = 3
"""Failures in a row after which work counts as a problem even if it has just been restarted."""

CANCEL_AGAIN: Final = 5.0
"""Seconds after which a task that does not end is cancelled once more."""

Work: TypeAlias = Callable[[], Awaitable[None]]


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they end. A cancellation can be lost: before Python 3.12 `asyncio.wait_for`
    swallows one that coincides with its result, and libraries and handlers use it."""
    going = set(tasks)
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=CANCEL_AGAIN)


def is_cancelled() -> bool:
    """Return whether the current task was asked to end. If not, a `CancelledError` that it meets is that of a
    future it has awaited: an error like any other, which must not end the task silently."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def report(name: str) -> Callable[[asyncio.Task[object]], None]:
    """Log the failure of a small task that its owner keeps; a callback for its end."""

    def over(task: asyncio.Task[object]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            LOG.error(f"{name} failed: %r", problem, exc_info=problem)

    return over


class SupervisedTask:
    """One piece of supervised work, from its first start to its stop, across all restarts."""

    def __init__(
        self,
        supervisor: Supervisor,
        name: str,
        work: Work,
        *,
        tries: int | None = None,
        periodic: bool = False,
    ) -> None:
        self.name = name
        self.task: asyncio.Task[None] | None = None
        self._supervisor = supervisor
        self._work = work
        self._tries = tries
        self.periodic = periodic
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff(RESTART, name)
        self._failed = 0
        """failures since it last worked"""
        self._problem: BaseException | None = None
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.given_up = False
        self._begin()

    @property
    def problem(self) -> BaseException | None:
        """The error it failed with, while it does not run or keeps failing."""
        if self._failed >= UNSTEADY and not self.periodic and self._loop.time() - self._began > STABLE:
            self.worked()
        running = self.task is not None and not self.task.done()
        return None if running and self._failed < UNSTEADY else self._problem

    def worked(self) -> None:
        """Reset the failure count."""
        if self._failed:
            self._failed, self._problem = 0, None
            self._backoff.worked()

    async def stop(self) -> None:
        """End the work, and do not start it again."""
        self._stopped = True
        self._supervisor.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        task = self.task
        if task is not None and task is not asyncio.current_task():
            await cancel(task)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._stopped = True
        self._supervisor.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()

    async def finish(self) -> None:
        """Wait until the work returns by itself, and do not restart it."""
        self._stopped = True
        self._supervisor.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)

    def _begin(self) -> None:
        self._timer = None
        self._began = self._loop.time()
        self.task = self._loop.create_task(self._run(), name=f"duly {self.name}")
        self.task.add_done_callback(self._over)

    async def _run(self) -> None:
        await self._work()

    def _over(self, task: asyncio.Task[None]) -> None:
        problem: BaseException | None
        if task.cancelled():
            problem = ProgramError("the task was cancelled from outside")
        else:
            problem = task.exception()
        if self._stopped:
            return
        if problem is None:
            self._supervisor.forget(self)
            return
        if not self.periodic and self._loop.time() - self._began > STABLE:
            self.worked()
        self._failed += 1
        self._problem = problem
        if not task.cancelled():
            self._supervisor.failed(self.name, problem)
        if self._tries is not None and self._failed >= self._tries:
            self.given_up = True
            self._supervisor.give_up(self.name, problem)
        elif not self._loop.is_closed():
            self._timer = self._loop.call_later(self._backoff.pause() or 0.0, self._begin_again)

    def _begin_again(self) -> None:
        if self.task is not None and self.task.cancelled() and self._problem is not None:
            # Logged only now: when the loop ends everything is cancelled, and that is not a failure.
            self._supervisor.failed(self.name, self._problem)
        self._begin()


class Supervisor:
    """The background work of one hub, client or other owner."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """failures by part since the start"""
        self.lives: list[SupervisedTask] = []
        self._jobs: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None
        self._stopped = False
        self._parent: Supervisor | None = None
        self._parts: list[Supervisor] = []

    def adopt(self, part: Supervisor) -> None:
        """Take over the supervision of another supervisor's work: its failures and problems are counted here
        as well, and it is stopped with the rest."""
        part._parent = self
        self._parts.append(part)

    def spawn(self, name: str, work: Work, *, tries: int | None = None) -> SupervisedTask:
        """Run `work` and restart it whenever it fails; it ends when it returns. After `tries` failures in a
        row it is given up."""
        return self._live(SupervisedTask(self, name, work, tries=tries))

    def every(self, name: str, seconds: float, work: Work) -> SupervisedTask:
        """Do `work` after this many seconds, and again that long after each run."""
        life: SupervisedTask

        async def again() -> None:
            while True:
                await asyncio.sleep(seconds)
                await work()
                life.worked()

        life = SupervisedTask(self, name, again, periodic=True)
        return self._live(life)

    def after(self, name: str, seconds: float, work: Work) -> SupervisedTask:
        """Do `work` once after this many seconds; if it fails it is retried without that wait."""
        waited = False

        async def later() -> None:
            nonlocal waited
            if not waited:
                await asyncio.sleep(seconds)
                waited = True
            await work()

        return self._live(SupervisedTask(self, name, later))

    def do(
        self, name: str, work: Coroutine[object, None, None], *, expected: tuple[type[Exception], ...] = ()
    ) -> asyncio.Task[None] | None:
        """Do this once in the background; a failure is logged and counted unless it is `expected`. Returns
        None if everything was stopped, and does not start it."""
        if self._stopped:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work, name=f"duly job: {name}")
        self._jobs.add(task)

        def over(_: asyncio.Task[None]) -> None:
            self._jobs.discard(task)
            problem = None if task.cancelled() else task.exception()
            if problem is not None and not isinstance(problem, expected):
                self.failed(name, problem)

        task.add_done_callback(over)
        return task

    def failed(self, name: str, problem: BaseException) -> None:
        """Log and count a failure of work here, or of a step that its work has survived."""
        LOG.error(f"{name} failed: %r", problem, exc_info=problem)
        self.count(name)

    def count(self, name: str) -> None:
        """Count a failure that was already logged."""
        owner: Supervisor | None = self
        while owner is not None:
            owner.failures[name] += 1
            owner = owner._parent

    def give_up(self, name: str, problem: BaseException) -> None:
        """Log that this work is not restarted, and raise its error in every waiting `ended`."""
        LOG.error(f"{name} is given up: %r", problem)
        owner: Supervisor | None = self
        while owner is not None:
            if owner._ended is not None and not owner._ended.done():
                owner._ended.set_exception(problem)
            owner = owner._parent

    @property
    def problems(self) -> dict[str, str]:
        """Return the parts that do not run or keep failing, with their errors."""
        return {life.name: repr(life.problem) for life in self._all() if life.problem is not None}

    @property
    def busy(self) -> bool:
        """Return whether a small job is under way."""
        return bool(self._jobs)

    async def ended(self) -> None:
        """Wait until a part is given up, and raise its error."""
        for life in self._all():
            if life.given_up and life.problem is not None:
                raise life.problem
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._ended)

    def forget(self, life: SupervisedTask) -> None:
        """Stop supervising this task, because it has ended or is being stopped."""
        if life in self.lives:
            self.lives.remove(life)

    async def stop(self) -> None:
        """Stop everything in reverse order, and start nothing more."""
        self._stopped = True
        for part in reversed(self._parts):
            await part.stop()
        for life in reversed(list(self.lives)):
            await life.stop()
        await self._end_jobs()

    async def finish(self, within: float | None = None) -> None:
        """Let the small jobs finish, including those that they start. Jobs that take longer than `within`
        seconds are cancelled. Long-running work continues until `stop`."""
        loop = asyncio.get_running_loop()
        over = None if within is None else loop.time() + within
        while self._jobs and (over is None or loop.time() < over):
            await asyncio.wait(self._jobs, timeout=None if over is None else over - loop.time())
        await self._end_jobs()

    async def _end_jobs(self) -> None:
        await cancel(*(task for task in self._jobs if task is not asyncio.current_task()))

    def kill(self) -> None:
        """End everything at once, as a crash would."""
        self._stopped = True
        for part in self._parts:
            part.kill()
        for life in list(self.lives):
            life.kill()
        for task in self._jobs:
            task.cancel()

    async def stop_periodic(self) -> None:
        """Stop periodic work; long-running work continues."""
        for life in [life for life in self.lives if life.periodic]:
            await life.stop()

    def _all(self) -> list[SupervisedTask]:
        return [*self.lives, *(life for part in self._parts for life in part._all())]

    def _live(self, life: SupervisedTask) -> SupervisedTask:
        if self._stopped:
            life.kill()
        else:
            self.lives.append(life)
        return life
