"""The engine: the loop that passes events to a machine, commits its steps in groups, and performs its
effects.

An effect is performed only after the steps that it depends on are committed, and effects are performed in the
order of their events. The engine handles the next events while a group is being flushed, and flushes them
while the effects of the first group are performed: load makes the groups larger, not the wait longer. At most
one commit is under way. The queue of events is bounded, and senders take turns: a sender that floods waits,
or gets an error that the queue is full, and delays no other sender.

If the ledger cannot commit, senders are told to try again, and the machine is rebuilt from the ledger as soon
as the ledger answers. A clean stop accepts no more events, commits and performs those that were accepted, and
leaves everything else in the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from duly.core.messages import Answer, Message, Verdict
from duly.core.operations import OpenDelivery, Results
from duly.core.retry import RetryPolicy
from duly.core.steps import Arrived, Effect, Ended, Event, Origin, Step, Todo
from duly.core.units import MS, SECOND
from duly.errors import LedgerError, Overloaded, ProgramError, Stopped
from duly.runtime.event_queue import EventQueue, QueuedEvent
from duly.runtime.wake_timer import TimedMachine, WakeTimer
from duly.storage.ledger import Ledger

Perform: TypeAlias = Callable[[Effect], None]
"""Carries out an effect."""

Performers: TypeAlias = Mapping[type, Callable[..., None]]
"""The functions that carry out effects, by the type of the effect."""

CAPACITY: Final = 10_000
"""How many events may wait. At ten thousand a second this is a second of delay; more would only delay
more."""

GROUP: Final = 500
"""The most steps in one commit: more would hardly be cheaper, and all their senders wait for the commit."""

GROUP_BYTES: Final = 8 * 1024 * 1024
"""The approximate limit for the total size of the messages in one commit."""

RECOVERY: Final = RetryPolicy.exponential(50 * MS, 5 * SECOND, jitter=0.0)
"""The pauses between attempts to use a ledger that failed."""


class Machine(TimedMachine, Protocol):
    """A machine that the engine drives: an inbox, an outbox, or an application made of them."""

    @property
    def channel(self) -> str:
        """The channel of the machine's deliveries."""
        ...

    def handle(self, event: Event, now: int) -> list[Todo]:
        """Handle an event, and return steps to commit and effects to perform."""
        ...

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        """Answer a repeat of an ended message with the verdict that memory holds."""
        ...

    def wake(self, now: int) -> list[Todo]:
        """Handle everything that is due."""
        ...

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        """Rebuild the machine from the ledger, and return steps and effects: to continue open deliveries, and
        to report messages that have ended."""
        ...

    @property
    def keys(self) -> list[bytes]:
        """The keys of the messages under way here."""
        ...

    def unable(self, event: Event) -> list[Effect]:
        """Return the replies to an event that could not be stored."""
        ...


def no_effect(_: Effect) -> None:
    """Do nothing: for an engine whose `performers` cover every effect that matters."""


def _ignored() -> None:
    """Do nothing."""


def _not_told(_: LedgerError) -> None:
    """Ignore a failure of the ledger."""


def _not_measured(_: float) -> None:
    """Ignore how long a commit took."""


class _StepGroup:
    """Steps that are committed together, and the events they came from."""

    __slots__ = ("_commit", "attached", "began", "size", "steps", "taken")

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.taken: list[QueuedEvent] = []
        self.size = 0
        """the bytes of the messages in the group"""
        self.attached: list[Event] = []
        """repeats without a step of their own, which share the outcome of the message they repeat"""
        self._commit: asyncio.Future[list[Results]] | None = None

    def commit(self, ledger: Ledger, through: Callable[[], None]) -> None:
        """Submit the steps to the ledger; `through` is called when the flush has ended or failed."""
        self.began = perf_counter()
        try:
            self._commit = asyncio.ensure_future(ledger.commit([step.writes for step in self.steps]))
        except Stopped as closed:
            self._commit = asyncio.get_running_loop().create_future()
            self._commit.set_exception(closed)
        self._commit.add_done_callback(lambda _: through())

    @property
    def through(self) -> bool:
        """Whether the ledger has committed or refused these steps."""
        return self._commit is not None and self._commit.done()

    @property
    def problem(self) -> LedgerError | None:
        """The ledger's error, if the group was not committed. Any other error is a bug, and is raised."""
        assert self._commit is not None
        error = self._commit.exception()
        if error is not None and not isinstance(error, LedgerError):
            raise error
        return error

    @property
    def results(self) -> list[Results]:
        """The results of each step; raises the error of a failed commit."""
        assert self._commit is not None
        return self._commit.result()

    async def settled(self) -> bool:
        """Wait for the commit to end; return whether it succeeded."""
        if self._commit is None:
            return False
        await asyncio.wait({self._commit})
        return not self._commit.cancelled() and self._commit.exception() is None

    def abandon(self) -> None:
        """Drop the results: the engine has stopped."""
        if self._commit is not None and not self._commit.cancel() and not self._commit.cancelled():
            self._commit.exception()  # so that asyncio does not log that it was never retrieved


class _KnownPerformers(dict[type, Callable[..., None]]):
    """The functions that perform effects, by type; `otherwise` performs effects of any other type."""

    def __init__(self, known: Performers, otherwise: Perform) -> None:
        super().__init__(known)
        self._otherwise = otherwise

    def __missing__(self, kind: type) -> Callable[..., None]:
        return self._otherwise


class Engine:
    """Drives one machine on one ledger.

    `perform` is called for every effect, in order, on the event loop; it must not block. For an effect of a
    type in `performers`, the function there is called instead. `recall` is awaited before the machine is
    rebuilt; it reads what the rebuild needs besides deliveries and marks. `ours` reads the deliveries that a
    restart continues: by default all of the machine's channel, which is wrong if other engines work on it.
    `fair`: senders take turns; otherwise events are handled in order of arrival. `recalls`: the engine looks
    up in memory whether each arriving message has ended; off if the application has done that already.
    """

    def __init__(
        self,
        machine: Machine,
        ledger: Ledger,
        perform: Perform,
        *,
        performers: Performers = MappingProxyType({}),
        capacity: int = CAPACITY,
        fair: bool = False,
        recalls: bool = True,
        recall: Callable[[], Awaitable[None]] | None = None,
        ours: Callable[[], Awaitable[list[OpenDelivery]]] | None = None,
    ) -> None:
        self._machine = machine
        self._ledger = ledger
        self._performers = _KnownPerformers(performers, perform)
        self._recalls = recalls
        self._recall = recall
        self._ours = ours
        self._events = EventQueue(capacity, fair=fair)
        self._gathering = _StepGroup()
        """the steps of events that are handled while another group is being flushed"""
        self._flushing: _StepGroup | None = None
        self._bugs = 0
        """how often a bug has ended the engine since its last commit"""
        self._news = asyncio.Event()
        self._told = False
        """the loop has been woken and will read the queue"""
        self._timer = WakeTimer(machine, lambda: ledger.clock, self._news.set)
        self._task: asyncio.Task[None] | None = None
        self._open = False
        """events are accepted"""
        self._stopping = False
        self._failures = 0
        self._hurried = False
        """the next attempt to use a failed ledger is made at once"""
        self._idle = False
        """the loop sleeps while nothing is being flushed: only `_news` or the timer wakes it"""
        self.on_commit: Callable[[float], None] = _not_measured
        """called with the seconds that each commit took"""
        self.on_down: Callable[[LedgerError], None] = _not_told
        """called with the error when the ledger begins to fail"""
        self.on_problem: Callable[[], None] = _ignored
        """called when `down` has changed"""
        self.down: Exception | None = None
        """the reason why nothing can be committed now, or None"""

    # ── outside ──────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Rebuild the machine from the ledger and start the loop."""
        self._begin(await self._restore())

    def offer(self, event: Event, committed: Callable[[], None] | None = None) -> None:
        """Accept an event, or raise: `Overloaded` if the queue is full, `Stopped` when stopping.

        `committed` is called when the steps of the event are stored; a PUBACK may be sent then.
        """
        if not self._open:
            raise _stopped()
        if not self._events.offer(event, committed):
            raise Overloaded(f"{self._events.excess(event)}; try again later")
        if not self._told:
            self._told = True
            self._news.set()

    @property
    def waiting(self) -> int:
        """The number of accepted events that are not handled yet."""
        return len(self._events)

    async def put(self, event: Event, committed: Callable[[], None] | None = None) -> None:
        """Accept an event when there is room, so that a reader reads no faster than the engine stores."""
        await self._events.wait_for_room(event)
        if not self._open:
            raise _stopped()
        self._events.append(event, committed)
        self._news.set()

    async def stop(self) -> None:
        """Accept no more events, finish the accepted ones, and leave everything else in the ledger."""
        self._stopping, self._open = True, False
        self._events.make_room(all_=True)
        self._news.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._timer.cancel()

    def now(self) -> int:
        """Return the time, for an application that calls its machine between two steps.

        If the wall clock was set, the machine's timers are moved first. So the loop, which may not have
        noticed that yet, does not move a timer that is set from this time once more.
        """
        return self._timer.now()

    def nudge(self) -> None:
        """Make the loop read the machine's next wake again, because it has changed between two steps.

        Code that sets a timer outside `handle`, `wake`, `restore` and a step's `done` must call this;
        otherwise the loop sleeps until another event comes.
        """
        self._news.set()

    def hurry(self) -> None:
        """Try a failed ledger again at once, because an event has come that cannot wait."""
        self._hurried = True
        self._news.set()

    @property
    def sleeps_past_a_timer(self) -> bool:
        """Whether the loop sleeps beyond its machine's next wake, which is always a bug; for checkers."""
        return self._idle and not self._news.is_set() and self._timer.rings_too_late

    async def wait(self) -> None:
        """Wait until the engine ends; raise the error if a bug ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def live(self) -> None:
        """Start the engine again if a bug has ended it, then wait like `wait`; for a supervisor."""
        if self._task is not None and self._task.done() and not self._stopping:
            await self._revive()
        await self.wait()

    def kill(self) -> None:
        """End the engine without finishing anything, as a crash would."""
        self._stopping, self._open = True, False
        self._events.clear()
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self, todo: list[Todo]) -> None:
        self._open = not self._stopping
        self._task = asyncio.get_running_loop().create_task(self._run(todo), name="duly-engine")

    async def _run(self, todo: list[Todo]) -> None:
        machine, timer = self._machine, self._timer
        flushing: _StepGroup | None = None
        try:
            while True:
                gathering = self._gathering
                if todo:
                    self._do(todo, gathering)
                    todo = []
                now = timer.now()
                self._take_in(gathering, now)
                wake = machine.next_wake()
                if wake is not None and wake <= now:
                    self._do(machine.wake(now), gathering)
                if flushing is None or flushing.through:
                    flushed, flushing = flushing, None
                    self._flushing = None
                    if flushed is not None and flushed.problem is not None:
                        todo = await self._recover(flushed, flushed.problem)
                        continue
                    self._gathering = _StepGroup()
                    self._events.reserve(0)
                    if gathering.steps:
                        flushing = self._flushing = gathering
                        flushing.commit(self._ledger, self._news.set)
                    if flushed is not None:
                        self._do(self._follow_up(flushed), self._gathering)
                    if flushing is None:
                        _tell(gathering)  # nothing to store, and the effects of earlier groups are performed
                        if flushed is not None and self._gathering.steps:
                            continue
                if flushing is None:
                    if self._stopping and not self._events:
                        return
                    timer.set(timer.now())
                self._idle = flushing is None
                await self._hear()
                self._idle = False
        finally:
            self._idle = self._open = False
            if flushing is not None and self._stopping:
                flushing.abandon()

    async def _hear(self) -> None:
        """Sleep until the loop is woken."""
        await self._news.wait()
        self._news.clear()
        self._told = False

    def _take_in(self, group: _StepGroup, now: int) -> None:
        """Handle waiting events, as many as the group has room for."""
        if not self._events:
            return  # the loop was woken by a flush or a timer
        batch, size = self._events.take(GROUP - len(group.steps), GROUP_BYTES - group.size)
        group.taken += batch
        group.size += size
        handle, ledger, recalls = self._machine.handle, self._ledger, self._recalls
        todo: list[Todo] = []
        for event, _ in batch:
            if type(event) is Arrived:
                known = _end_of(ledger, event.message, now) if recalls else None
                if known is not None:
                    todo += self._machine.repeated(event.message, known, event.origin, now)
                elif follows := handle(event, now):
                    todo += follows
                else:
                    group.attached.append(event)
            else:
                todo += handle(event, now)
        self._do(todo, group)
        self._events.reserve(len(group.taken))

    def _follow_up(self, group: _StepGroup) -> list[Todo]:
        """Return what follows the steps of a committed group. `done` of all steps is called before any effect
        is performed: running the same code for many commands in a row is faster than alternating."""
        self._failures = self._bugs = 0
        self.on_commit(perf_counter() - group.began)
        _tell(group)
        now = self.now()
        todo: list[Todo] = []
        for step, results in zip(group.steps, group.results, strict=True):
            todo += step.done(results, now)
        return todo

    def _do(self, todo: list[Todo], group: _StepGroup) -> None:
        """Perform effects at once, and add steps to the group."""
        steps, performers = group.steps, self._performers
        for item in todo:
            if type(item) is Step:
                steps.append(item)
            else:
                performers[type(item)](item)

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._performers[type(effect)](effect)

    # ── when the ledger fails ────────────────────────────────────────────────────────────────────

    def _set_down(self, problem: Exception | None) -> None:
        self.down = problem
        self.on_problem()

    async def _recover(self, failed: _StepGroup, problem: LedgerError) -> list[Todo]:
        self._set_down(problem)
        if not self._failures:
            self.on_down(problem)
        gathered, self._gathering = self._gathering, _StepGroup()
        self._withdraw(failed, gathered)
        # Recipients and handlers do not repeat their events, so these wait for the ledger.
        taken = failed.taken + gathered.taken
        self._events.put_back(taken)
        self._events.reserve(0)
        while not self._stopping:
            self._failures += 1
            await self._rest(RECOVERY.delay(self._failures, b"") or 0)
            try:
                todo = await self._restore_meanwhile()
            except LedgerError as still:
                self._set_down(still)
            else:
                self._set_down(None)
                return todo
        self._refuse_arrivals()
        self._events.clear()
        return []

    async def _restore_meanwhile(self) -> list[Todo]:
        """Rebuild the machine; messages that arrive while the ledger does not answer are refused at once."""
        restoring = asyncio.ensure_future(self._restore())
        restoring.add_done_callback(lambda _: self._news.set())
        try:
            while not restoring.done():
                self._refuse_arrivals()
                await self._hear()
            return restoring.result()
        finally:
            restoring.cancel()

    def _withdraw(self, *groups: _StepGroup) -> None:
        """Tell the senders of groups that were not committed to try again."""
        for group in groups:
            for step in group.steps:
                self._perform(step.failed)
            for event in group.attached:
                self._perform(self._machine.unable(event))

    async def _revive(self) -> None:
        """Restart after a bug, as after a failure of the ledger. Events that were not committed are tried
        once more, unless the engine has already died since its last commit: then they are dropped, so that
        one event cannot end the engine for ever."""
        groups = [group for group in (self._flushing, self._gathering) if group is not None]
        self._flushing, self._gathering = None, _StepGroup()
        self._bugs += 1
        self._set_down(ProgramError("a bug has ended the engine; it is being started again"))
        again: list[QueuedEvent] = []
        for group in groups:
            if await group.settled() or self._bugs > 1:
                _tell(group)  # also for dropped events, so that a broker does not send them for ever
            else:
                again += group.taken
        self._events.put_back(again)
        self._events.reserve(0)
        self._withdraw(*groups)
        todo = await self._restore()
        self._set_down(None)
        self._begin(todo)

    async def _rest(self, lasts: int) -> None:
        """Pause before the next use of the ledger; messages that arrive meanwhile are refused at once."""
        loop = asyncio.get_running_loop()
        over = loop.time() + lasts / SECOND
        while not self._stopping and not self._hurried and loop.time() < over:
            self._refuse_arrivals()
            timer = loop.call_at(over, self._news.set)
            await self._hear()
            timer.cancel()
        self._hurried = False

    def _refuse_arrivals(self) -> None:
        """Refuse the messages that wait, because nothing can be stored now."""
        for event in self._events.remove_arrivals():
            self._perform(self._machine.unable(event))
        self._events.make_room(all_=self._stopping)

    async def _restore(self) -> list[Todo]:
        ledger, machine = self._ledger, self._machine
        if self._recall is not None:
            await self._recall()
        open_ = await (self._ours() if self._ours else ledger.open_deliveries(machine.channel))
        marks = await ledger.marks()
        still = {item.message.key for item in open_}
        ended: list[Ended] = []
        for key in machine.keys:
            # A commit that failed may have reached the ledger; then its sender must still get the outcome.
            record = None if key in still else await ledger.find(key)
            if record is not None and record.state.terminal:
                ended.append(Ended(key, record.state, record.answer or Answer()))
        return machine.restore(open_, ended, marks, self.now())


def _stopped() -> Stopped:
    return Stopped("this engine is not running; nothing was accepted. Try again later, or at another hub")


def _tell(group: _StepGroup) -> None:
    for _, committed in group.taken:
        if committed is not None:
            committed()


def _end_of(ledger: Ledger, message: Message, now: int) -> Verdict | None:
    """Return the verdict on a repeat of an ended message, if it is in memory."""
    known = ledger.recall(message, now)
    return None if known is None or known.state is None or not known.state.terminal else known
