"""Supervised background work: tasks that must go on, work that is due again and again, and small jobs.

The laws. No task dies quietly: a failure is logged, counted and, where the work is meant to go on, followed
by a new start after a growing pause. Work that keeps failing is a problem that `problems` names, and the
hub's health with it; it is tried on, unless it was given a number of tries. A stopped supervisor starts
nothing more.

A restart hangs on the end of a task and not on a task of its own, so that nothing is left to die in silence.
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
"""How often in a row an engine may die of a bug; then it is given up, and `ended` raises what it died of."""
UNSTEADY: Final = 3
"""Failures in a row after which work is a problem even while it has just been started again."""

CANCEL_AGAIN: Final = 5.0
"""Seconds after which a task that goes on is cancelled once more."""

Work: TypeAlias = Callable[[], Awaitable[None]]


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they are over. A cancellation can be lost: `asyncio.wait_for` swallows one
    that comes together with its result (before Python 3.12), and libraries and handlers use it."""
    going = set(tasks)
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=CANCEL_AGAIN)


def report(name: str) -> Callable[[asyncio.Task[object]], None]:
    """A callback for the end of a small task that its owner keeps: what it failed of is logged."""

    def over(task: asyncio.Task[object]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            LOG.error(f"{name} failed: %r", problem, exc_info=problem)

    return over


class SupervisedTask:
    """One piece of supervised work, from its first start to its stop, through every restart."""

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
        """What it failed of, while it does not run or does not stay up."""
        if self._failed >= UNSTEADY and not self.periodic and self._loop.time() - self._began > STABLE:
            self.worked()
        running = self.task is not None and not self.task.done()
        return None if running and self._failed < UNSTEADY else self._problem

    def worked(self) -> None:
        """The next failure is a first one again."""
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
        """End at once, as a crash would."""
        self._stopped = True
        self._supervisor.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()

    async def finish(self) -> None:
        """Wait until the work returns by itself, and do not start it again."""
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
            # Said only now: at the end of a loop everything is cancelled, and that is not a failure.
            self._supervisor.failed(self.name, self._problem)
        self._begin()


class Supervisor:
    """The background work of one hub, client or other owner."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """how often each part has failed since the start"""
        self.lives: list[SupervisedTask] = []
        self._jobs: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None
        self._stopped = False
        self._parent: Supervisor | None = None
        self._parts: list[Supervisor] = []

    def adopt(self, part: Supervisor) -> None:
        """Answer for the work of a part of the owner: its failures and problems are counted here, too, and it
        is stopped with the rest."""
        part._parent = self
        self._parts.append(part)

    def spawn(self, name: str, work: Work, *, tries: int | None = None) -> SupervisedTask:
        """Run `work` and start it again whenever it fails; it is over when it returns. After `tries` failures
        in a row it is given up."""
        return self._live(SupervisedTask(self, name, work, tries=tries))

    def every(self, name: str, seconds: float, work: Work) -> SupervisedTask:
        """Do `work` after so many seconds, and again that long after it was done."""
        life: SupervisedTask

        async def again() -> None:
            while True:
                await asyncio.sleep(seconds)
                await work()
                life.worked()

        life = SupervisedTask(self, name, again, periodic=True)
        return self._live(life)

    def after(self, name: str, seconds: float, work: Work) -> SupervisedTask:
        """Do `work` once, after so many seconds; again, without that wait, whenever it fails."""
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
        """Do this once, in the background; what it fails of is logged and counted, unless it is `expected`.
        None: everything was stopped, and this is not begun."""
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
        """Log and count a failure: of work here, or of a step that its work has survived."""
        LOG.error(f"{name} failed: %r", problem, exc_info=problem)
        self.count(name)

    def count(self, name: str) -> None:
        """Count a failure that is logged where it happened."""
        owner: Supervisor | None = self
        while owner is not None:
            owner.failures[name] += 1
            owner = owner._parent

    def give_up(self, name: str, problem: BaseException) -> None:
        """Log that this work is not started again, and raise its error in every `ended` that waits."""
        LOG.error(f"{name} is given up: %r", problem)
        owner: Supervisor | None = self
        while owner is not None:
            if owner._ended is not None and not owner._ended.done():
                owner._ended.set_exception(problem)
            owner = owner._parent

    @property
    def problems(self) -> dict[str, str]:
        """The parts that do not run, or do not stay up, and what they failed of."""
        return {life.name: repr(life.problem) for life in self._all() if life.problem is not None}

    @property
    def busy(self) -> bool:
        """Whether a small job is under way here."""
        return bool(self._jobs)

    async def ended(self) -> None:
        """Wait until a part is given up, and raise what it failed of."""
        for life in self._all():
            if life.given_up and life.problem is not None:
                raise life.problem
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._ended)

    def forget(self, life: SupervisedTask) -> None:
        """Supervise this task no longer: it has ended or is being stopped."""
        if life in self.lives:
            self.lives.remove(life)

    async def stop(self) -> None:
        """End everything, in reverse order, and start nothing more."""
        self._stopped = True
        for part in reversed(self._parts):
            await part.stop()
        for life in reversed(list(self.lives)):
            await life.stop()
        await self._end_jobs()

    async def finish(self, within: float | None = None) -> None:
        """Let the small jobs finish, and those that they begin meanwhile. What takes longer than `within`
        seconds is ended. Work that is meant to go on does, until `stop`."""
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
        """End what is due again and again; what must go on until the end goes on."""
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
