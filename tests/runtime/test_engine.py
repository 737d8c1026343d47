"""The one loop: what it commits, when it performs, how it stops, and what it does when the ledger fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duly.core import operations as w
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, VerdictKind
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.steps import Answered, Arrived, Effect, Received, Reply, ReportOutcome, Todo, Transmit
from duly.core.units import FOREVER, SECOND
from duly.errors import LedgerError, LedgerUnavailable, Overloaded, Stopped
from duly.runtime.engine import GROUP, GROUP_BYTES, Engine
from duly.runtime.event_queue import SHARE
from duly.storage import open_ledger
from duly.storage.memory import Disk, MemoryLedger
from duly.testing.loops import LoopClock, VirtualLoop
from tests.guard import GUARD

RUN = OutboxPolicy("run", None, RetryPolicy.never(), FOREVER)
DEVICE = OutboxPolicy("device", RetryPolicy.fixed(3 * SECOND, tries=4), patience=10 * SECOND)


def message(n: int = 0) -> Message:
    return Message("app", f"1700000000000_{n}", "lock_control", "lock", b"open")


class Moody(MemoryLedger):
    """A memory ledger that can be made to fail, or to hold its commits back."""

    def __init__(self, clock: LoopClock, disk: Disk | None = None) -> None:
        super().__init__(clock, disk=disk)
        self.failing = False
        self.lies = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.sizes: list[int] = []

    async def commit(self, groups: Sequence[w.Group]) -> list[w.Results]:
        await self.gate.wait()
        if self.failing:
            raise LedgerUnavailable("disk full")
        self.sizes.append(len(groups))
        results = await super().commit(groups)
        if self.lies:
            raise LedgerUnavailable("stored, but the connection broke before it could say so")
        return results

    async def open_deliveries(self, channel: str) -> list[w.OpenDelivery]:
        if self.failing:
            raise LedgerUnavailable("disk full")
        return await super().open_deliveries(channel)


class Rig:
    """An inbox on an engine, with its effects in a list."""

    def __init__(
        self,
        policy: OutboxPolicy = RUN,
        *,
        disk: Disk | None = None,
        capacity: int = 10_000,
        fair: bool = False,
    ) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.ledger = Moody(self.clock, disk)
        self.effects: list[Effect] = []
        self.inbox = Inbox(policy, self.ledger.worker)
        self.engine = Engine(self.inbox, self.ledger, self.effects.append, capacity=capacity, fair=fair)

    async def __aenter__(self) -> Rig:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ledger.gate.set()
        self.ledger.failing = self.ledger.lies = False
        await self.engine.stop()

    def words(self) -> list[str]:
        return [e.verdict.kind.value for e in self.effects if isinstance(e, Reply)]

    def ends(self) -> list[State]:
        return [e.state for e in self.effects if isinstance(e, ReportOutcome)]


def virtual(program: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().play(program)


def test_nothing_is_performed_before_it_is_committed() -> None:
    async def program() -> None:
        async with Rig() as rig:
            rig.ledger.gate.clear()
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(5)
            assert rig.effects == []
            rig.ledger.gate.set()
            await asyncio.sleep(1)
            assert [type(e) for e in rig.effects] == [Reply, Transmit]

    virtual(program())


def test_what_gathers_during_a_commit_shares_the_next_and_is_answered_in_order() -> None:
    async def program() -> None:
        async with Rig() as rig:
            rig.ledger.gate.clear()
            for n in range(50):
                await rig.engine.put(Arrived(message(n)))
            await asyncio.sleep(1)
            rig.ledger.gate.set()
            await asyncio.sleep(1)
            assert len(rig.ledger.sizes) <= 2
            replied = [e.message.id for e in rig.effects if isinstance(e, Reply)]
            assert replied == [message(n).id for n in range(50)]

    virtual(program())


def test_what_changes_nothing_is_not_told_before_what_came_before_it() -> None:
    """PUBACKs and progress are told by it: in the order in which they came."""

    async def program() -> None:
        async with Rig() as rig:
            told: list[str] = []
            rig.ledger.gate.clear()
            await rig.engine.put(Arrived(message()), lambda: told.append("stored"))
            await asyncio.sleep(1)
            await rig.engine.put(Received(b"no such key"), lambda: told.append("nothing to store"))
            await asyncio.sleep(1)
            assert told == []
            rig.ledger.gate.set()
            await asyncio.sleep(1)
            assert told == ["stored", "nothing to store"]

    virtual(program())


def test_a_full_queue_refuses_or_makes_wait() -> None:
    async def program() -> None:
        async with Rig(capacity=2) as rig:
            rig.ledger.gate.clear()
            await rig.engine.put(Arrived(message(0)))
            await asyncio.sleep(1)
            await rig.engine.put(Arrived(message(1)))
            await rig.engine.put(Arrived(message(2)))
            with pytest.raises(Overloaded, match="2 events are waiting"):
                rig.engine.offer(Arrived(message(3)))
            waiting = asyncio.ensure_future(rig.engine.put(Arrived(message(4))))
            await asyncio.sleep(1)
            assert not waiting.done()
            rig.ledger.gate.set()
            await waiting

    virtual(program())


def sent_by(sender: str, n: int, body: bytes = b"") -> Arrived:
    return Arrived(Message(sender, f"1700000000000_{n}", "lock_control", "lock", body))


def test_where_senders_take_turns_a_flooding_sender_delays_no_other() -> None:
    async def program() -> None:
        async with Rig(fair=True) as rig:
            rig.ledger.gate.clear()
            rig.engine.offer(sent_by("first", 0))
            await asyncio.sleep(1)  # its commit is under way; the next group is full when this is through
            flood = [asyncio.ensure_future(rig.engine.put(sent_by("flood", n))) for n in range(3_000)]
            await asyncio.sleep(1)
            assert sum(one.done() for one in flood) == GROUP + SHARE, "beyond its share it waits"
            with pytest.raises(Overloaded, match="of flood"):
                rig.engine.offer(sent_by("flood", 9_999))
            rig.engine.offer(sent_by("polite", 0))
            rig.ledger.gate.set()
            await asyncio.gather(*flood)
            await asyncio.sleep(1)
            senders = [e.message.scope for e in rig.effects if isinstance(e, Reply)]
            assert len(senders) == 3_002
            assert senders.index("polite") <= 1 + GROUP + 1
            numbers = [
                e.message.id for e in rig.effects if isinstance(e, Reply) and e.message.scope == "flood"
            ]
            assert numbers == [f"1700000000000_{n}" for n in range(3_000)]

    virtual(program())


def test_large_messages_use_up_a_share_and_a_group_sooner() -> None:
    async def program() -> None:
        async with Rig(fair=True) as rig:
            rig.ledger.gate.clear()
            rig.engine.offer(sent_by("first", 0))
            await asyncio.sleep(1)
            body = b"x" * 250_000
            big = [asyncio.ensure_future(rig.engine.put(sent_by("flood", n, body))) for n in range(200)]
            await asyncio.sleep(1)
            assert sum(one.done() for one in big) * len(body) < GROUP_BYTES + 9_000_000
            rig.ledger.gate.set()
            await asyncio.gather(*big)
            assert max(rig.ledger.sizes) * len(body) < GROUP_BYTES + 1_000_000

    virtual(program())


def test_a_sender_that_no_longer_waits_for_room_makes_no_other_wait() -> None:
    async def program() -> None:
        async with Rig(capacity=1, fair=True) as rig:
            rig.ledger.gate.clear()
            rig.engine.offer(sent_by("ann", 0))
            await asyncio.sleep(1)
            for n in range(1, GROUP + 2):
                await rig.engine.put(sent_by(f"a{n}", n))
            await rig.engine.put(sent_by("ann", GROUP + 2))
            gone = asyncio.ensure_future(rig.engine.put(sent_by("ann", GROUP + 3)))
            stays = asyncio.ensure_future(rig.engine.put(sent_by("ann", GROUP + 4)))
            await asyncio.sleep(1)
            gone.cancel()
            rig.ledger.gate.set()
            await asyncio.wait_for(stays, 5)

    virtual(program())


def test_a_clean_stop_finishes_what_was_taken_in_and_takes_in_no_more() -> None:
    async def program() -> None:
        rig = Rig()
        async with rig:
            for n in range(20):
                rig.engine.offer(Arrived(message(n)))
        assert rig.words() == ["fresh"] * 20
        with pytest.raises(Stopped):
            rig.engine.offer(Arrived(message(99)))
        with pytest.raises(Stopped):
            await rig.engine.put(Arrived(message(99)))

    virtual(program())


def test_what_was_accepted_but_not_finished_is_taken_up_by_the_next() -> None:
    async def program() -> None:
        disk = Disk()
        async with Rig(DEVICE, disk=disk) as rig:
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(0.1)
        async with Rig(DEVICE, disk=disk) as rig:
            await asyncio.sleep(0.1)
            assert [e.message for e in rig.effects if isinstance(e, Transmit)] == [message()]

    virtual(program())


def test_one_timer_resends_and_gives_up() -> None:
    async def program() -> None:
        async with Rig(DEVICE) as rig:
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(60)
            assert [e.attempt for e in rig.effects if isinstance(e, Transmit)] == [1, 2, 3, 4]
            assert rig.ends() == [State.UNKNOWN]

    virtual(program())


def test_a_clock_that_is_set_back_stretches_no_timer() -> None:
    async def program() -> None:
        async with Rig(DEVICE) as rig:
            await rig.engine.put(Arrived(message(0)))
            await asyncio.sleep(1)
            rig.clock.step(-3600 * SECOND)
            await rig.engine.put(Arrived(message(1)))  # anything makes it look at the clock
            await asyncio.sleep(30)
            assert rig.ends().count(State.UNKNOWN) >= 1

    virtual(program())


def attempts(rig: Rig) -> list[int]:
    return [e.attempt for e in rig.effects if isinstance(e, Transmit)]


def test_a_clock_that_is_set_right_after_a_commit_moves_no_timer_twice() -> None:
    async def program() -> None:
        async with Rig(DEVICE) as rig:
            steps = [3600 * SECOND]
            rig.engine.on_commit = lambda _: rig.clock.step(steps.pop() if steps else 0)
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(60)
            assert attempts(rig) == [1, 2, 3, 4]

    virtual(program())


def test_a_clock_that_is_set_while_the_machine_is_rebuilt_moves_no_timer_twice() -> None:
    async def program() -> None:
        async with Rig(DEVICE) as rig:
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(1)
            marks, steps = rig.ledger.marks, [3600 * SECOND]

            async def slow_marks() -> Mapping[str, tuple[int, int]]:
                rig.clock.step(steps.pop() if steps else 0)
                return await marks()

            rig.ledger.marks = slow_marks  # type: ignore[method-assign, assignment]  # the clock is set in it
            rig.ledger.lies = True
            await rig.engine.put(Arrived(message(1)))
            await asyncio.sleep(0.01)
            rig.ledger.lies = False
            await asyncio.sleep(60)
            assert not steps
            assert rig.ends().count(State.UNKNOWN) == 2

    virtual(program())


def test_a_ledger_that_failed_is_asked_again_at_once_when_something_cannot_wait() -> None:
    async def program() -> None:
        async with Rig() as rig:
            told: list[LedgerError] = []
            rig.engine.on_down = told.append
            rig.ledger.failing = True
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(30)
            rig.ledger.failing = False
            rig.engine.hurry()
            await asyncio.sleep(0.001)
            assert rig.engine.down is None
            assert len(told) == 1

    virtual(program())


def test_if_the_ledger_fails_senders_are_told_and_nothing_has_happened() -> None:
    async def program() -> None:
        async with Rig() as rig:
            rig.ledger.failing = True
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(1)
            (reply,) = rig.effects
            assert isinstance(reply, Reply)
            assert (reply.verdict.kind, reply.verdict.retry) == (VerdictKind.REFUSED, True)
            down = rig.engine.down
            assert down is not None
            await rig.engine.put(Arrived(message(1)))
            await asyncio.sleep(1)
            assert rig.words() == ["refused", "refused"], "at once, not when the ledger is back"
            rig.ledger.failing = False
            await asyncio.sleep(10)
            assert rig.engine.down is None
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(1)
            assert rig.words()[-1] == "fresh", "the id was not burned"

    virtual(program())


def test_what_a_handler_said_while_the_ledger_failed_is_not_lost() -> None:
    async def program() -> None:
        async with Rig() as rig:
            await rig.engine.put(Arrived(message(), "c1"))
            await asyncio.sleep(1)
            rig.ledger.failing = True
            await rig.engine.put(Answered(message().key, State.DONE, Answer(0), attempt=1))
            await asyncio.sleep(1)
            rig.ledger.failing = False
            await asyncio.sleep(10)
            (report,) = [e for e in rig.effects if isinstance(e, ReportOutcome)]
            assert (report.state, report.origins) == (State.DONE, ("c1",))
            assert len([e for e in rig.effects if isinstance(e, Transmit)]) == 1, "not run a second time"

    virtual(program())


def test_what_a_machine_needs_besides_is_read_again_whenever_it_is_rebuilt() -> None:
    async def program() -> None:
        rig = Rig()
        read: list[float] = []

        async def recall() -> None:
            read.append(asyncio.get_running_loop().time())

        rig.engine = Engine(rig.inbox, rig.ledger, rig.effects.append, recall=recall)
        async with rig:
            assert len(read) == 1
            rig.ledger.lies = True
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(1)
            assert len(read) > 1

    virtual(program())


def test_a_commit_that_went_through_without_saying_so_is_found_out() -> None:
    async def program() -> None:
        async with Rig() as rig:
            rig.ledger.lies = True
            await rig.engine.put(Arrived(message(), "c1"))
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            rig.ledger.lies = False
            await asyncio.sleep(10)
            assert [e.attempt for e in rig.effects if isinstance(e, Transmit)] == [2], "begun once"
            rig.ledger.lies = True
            await rig.engine.put(Answered(message().key, State.DONE, Answer(0), attempt=2))
            await asyncio.sleep(0.01)
            rig.ledger.lies = False
            await asyncio.sleep(10)
            assert rig.ends() == [State.DONE]

    virtual(program())


def test_a_reader_hears_when_what_it_read_is_stored_and_not_before() -> None:
    async def program() -> None:
        async with Rig() as rig:
            told: list[int] = []
            rig.ledger.gate.clear()
            for n in range(3):
                await rig.engine.put(Arrived(message(n)), partial(told.append, n))
            await asyncio.sleep(1)
            assert told == []
            rig.ledger.gate.set()
            await asyncio.sleep(1)
            assert told == [0, 1, 2]
            rig.ledger.failing = True
            await rig.engine.put(Arrived(message(3)), lambda: told.append(3))
            await asyncio.sleep(1)
            assert told == [0, 1, 2], "what could not be stored is not acknowledged"

    virtual(program())


def test_a_hot_repeat_is_answered_without_a_commit() -> None:
    async def program() -> None:
        async with Rig() as rig:
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(1)
            await rig.engine.put(Answered(message().key, State.DONE, Answer(0, b"x"), attempt=1))
            await asyncio.sleep(1)
            commits = len(rig.ledger.sizes)
            await rig.engine.put(Arrived(message(), "again"))
            await asyncio.sleep(1)
            last = rig.effects[-1]
            assert isinstance(last, Reply)
            assert (last.origin, last.verdict.state, last.verdict.answer) == (
                "again",
                State.DONE,
                Answer(0, b"x"),
            )
            assert len(rig.ledger.sizes) == commits

    virtual(program())


def test_a_bug_in_an_effect_ends_the_engine_loudly() -> None:
    async def program() -> None:
        rig = Rig()
        performed: dict[Effect, None] = {}
        rig.engine = Engine(rig.inbox, rig.ledger, performed.__getitem__)
        await rig.engine.start()
        await rig.engine.put(Arrived(message()))
        with pytest.raises(KeyError):
            await rig.engine.wait()
        with pytest.raises(Stopped):
            rig.engine.offer(Arrived(message(1)))

    virtual(program())


def test_a_ledger_that_reads_but_cannot_write_is_not_hammered() -> None:
    """A full disk: restoring works, every commit fails."""

    async def program() -> None:
        async with Rig(DEVICE) as rig:
            await rig.engine.put(Arrived(message()))
            await asyncio.sleep(0.1)
            tries = 0

            async def full(groups: Sequence[w.Group]) -> list[w.Results]:
                nonlocal tries
                tries += 1
                raise LedgerUnavailable("disk full")

            rig.ledger.commit = full  # type: ignore[method-assign]  # the disk is full from now on
            await asyncio.sleep(60)
            assert 0 < tries < 60
            del rig.ledger.commit

    virtual(program())


async def test_it_runs_on_a_real_ledger_in_real_time(tmp_path: Path) -> None:
    effects: list[Effect] = []
    finished = asyncio.Event()

    async with await open_ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        now = ledger.clock.now() // 1000

        def perform(effect: Effect) -> None:
            effects.append(effect)
            match effect:
                case Transmit(message=m, attempt=attempt):
                    engine.offer(Answered(m.key, State.DONE, Answer(0, m.body), attempt))
                case ReportOutcome():
                    if sum(isinstance(e, ReportOutcome) for e in effects) == 200:
                        finished.set()

        engine = Engine(Inbox(RUN, ledger.worker), ledger, perform)
        await engine.start()
        for n in range(200):
            await engine.put(Arrived(Message("app", f"{now}_{n}", "k", "lock", b"%d" % n)))
        await asyncio.wait_for(finished.wait(), GUARD)
        await engine.stop()
        record = await ledger.outcome("app", f"{now}_7")
        assert record is not None
        assert (record.state, record.answer) == (State.DONE, Answer(0, b"7"))


class Tripping(Inbox):
    """An inbox with a bug: it trips over one message."""

    def receive(self, event: Arrived, now: int) -> list[Todo]:
        if event.message == message(1):
            raise ZeroDivisionError
        return super().receive(event, now)


def test_a_bug_in_the_machine_ends_the_engine_and_not_who_brought_the_event() -> None:
    async def program() -> None:
        async with Rig() as rig:
            rig.engine = Engine(Tripping(RUN, rig.ledger.worker), rig.ledger, rig.effects.append)
            await rig.engine.start()
            await asyncio.sleep(1)
            rig.engine.offer(Arrived(message(0)))
            rig.engine.offer(Arrived(message(1)))
            rig.engine.offer(Arrived(message(2)))
            with pytest.raises(ZeroDivisionError):
                await rig.engine.wait()
            with pytest.raises(Stopped):
                rig.engine.offer(Arrived(message(3)))

    virtual(program())


def test_nothing_is_performed_while_an_event_is_being_offered() -> None:
    async def program() -> None:
        async with Rig() as rig:
            rig.engine.offer(Arrived(message(0), "c1"))
            await asyncio.sleep(1)
            rig.effects.clear()
            rig.engine.offer(Arrived(message(0), "c2"))  # a repeat: its reply needs no commit
            assert rig.effects == []
            await asyncio.sleep(1)
            assert [type(e) for e in rig.effects] == [Reply]

    virtual(program())
