"""Timers that are set between two steps: the engine hears of them, and by which clock they are set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from duly.core.messages import Message, Verdict
from duly.core.operations import OpenDelivery
from duly.core.steps import Effect, Ended, Event, Origin, Todo
from duly.core.units import HOUR, SECOND
from duly.runtime.engine import Engine
from duly.storage.memory import MemoryLedger
from duly.testing.loops import LoopClock, VirtualLoop


class Alarm:
    """A machine with one timer, which others set."""

    channel = "alarm"
    keys: list[bytes] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.due: int | None = None
        self.rang: list[float] = []

    def handle(self, event: Event, now: int) -> list[Todo]:
        return []

    def repeated(self, message: Message, verdict: Verdict, origin: Origin, now: int) -> list[Todo]:
        return []

    def wake(self, now: int) -> list[Todo]:
        self.due = None
        self.rang.append(asyncio.get_running_loop().time())
        return []

    def next_wake(self) -> int | None:
        return self.due

    def shift(self, by: int) -> None:
        if self.due is not None:
            self.due += by

    def restore(
        self,
        open_: Sequence[OpenDelivery],
        ended: Sequence[Ended],
        marks: Mapping[str, tuple[int, int]],
        now: int,
    ) -> list[Todo]:
        return []

    def unable(self, event: Event) -> list[Effect]:
        return []


class AlarmRig:
    def __init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.alarm = Alarm()
        self.engine = Engine(self.alarm, MemoryLedger(self.clock), lambda effect: None)


def test_a_timer_set_between_two_steps_rings_in_time() -> None:
    async def program() -> None:
        rig = AlarmRig()
        await rig.engine.start()
        await asyncio.sleep(1)
        rig.alarm.due = rig.engine.now() + 5 * SECOND
        await asyncio.sleep(0)
        overslept = rig.engine.sleeps_past_a_timer
        assert overslept, "what a checker would see"
        rig.engine.nudge()
        assert not rig.engine.sleeps_past_a_timer
        await asyncio.sleep(100)
        assert [round(at) for at in rig.alarm.rang] == [6]

    VirtualLoop().play(program())


def test_without_a_word_the_engine_would_sleep_on() -> None:
    async def program() -> None:
        rig = AlarmRig()
        await rig.engine.start()
        await asyncio.sleep(1)
        rig.alarm.due = rig.engine.now() + 5 * SECOND
        await asyncio.sleep(1_000)
        assert rig.alarm.rang == []
        assert rig.engine.sleeps_past_a_timer

    VirtualLoop().play(program())


def test_a_clock_that_was_set_meanwhile_does_not_move_a_new_timer() -> None:
    """The step is noticed when the time is asked for, before the timer is there to be moved."""

    async def program() -> None:
        rig = AlarmRig()
        await rig.engine.start()
        await asyncio.sleep(1)
        rig.clock.step(48 * HOUR)
        rig.alarm.due = rig.engine.now() + 5 * SECOND
        rig.engine.nudge()
        await asyncio.sleep(100)
        assert [round(at) for at in rig.alarm.rang] == [6]

    VirtualLoop().play(program())


def test_a_timer_that_is_waited_for_is_no_oversight() -> None:
    async def program() -> None:
        rig = AlarmRig()
        rig.alarm.due = rig.clock.now() + 60 * SECOND
        await rig.engine.start()
        await asyncio.sleep(1)
        assert not rig.engine.sleeps_past_a_timer
        rig.clock.step(-HOUR)
        await asyncio.sleep(1)
        assert not rig.engine.sleeps_past_a_timer

    VirtualLoop().play(program())


def test_a_machine_that_has_slept_has_not_set_its_clock() -> None:
    """What was due meanwhile is due at once; the loop's own time has stood still."""

    async def program() -> None:
        rig = AlarmRig()
        rig.alarm.due = rig.clock.now() + 60 * SECOND
        await rig.engine.start()
        await asyncio.sleep(1)
        rig.clock.sleep(8 * HOUR)
        rig.engine.nudge()
        await asyncio.sleep(1)
        assert [round(at) for at in rig.alarm.rang] == [1]

        rig.alarm.due = rig.engine.now() + 60 * SECOND
        rig.engine.nudge()
        await asyncio.sleep(1)
        assert not rig.engine.sleeps_past_a_timer

    VirtualLoop().play(program())
