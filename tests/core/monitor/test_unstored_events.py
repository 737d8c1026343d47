"""Critical events that go to the tower though they cannot be stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of
from duly.core.monitor.devices import DEVICES
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.signals import (
    CANCEL,
    ClockOffset,
    DeviceBack,
    EventChange,
    SentinelPolicy,
    Severity,
    Signal,
)
from duly.core.monitor.unstored_events import UnstoredEvent
from duly.core.steps import Answered, Event, MachineEffect, MachineEvent, Reachable, Step, Todo
from duly.core.units import SECOND
from tests.at_once import at_once
from tests.core.monitor.watching import Watch

AT_ONCE = SentinelPolicy(countdown=0)


def begin_anew(watch: Watch) -> None:
    """Go on from what the ledger holds, as the engine does after a commit that failed."""
    watch.monitor.remember(at_once(watch.ledger.bucket(DEVICES)))
    watch.carry_out(watch.monitor.restore(watch._open(), (), watch.ledger.disk.marks, watch.clock.now()))


def not_stored(watch: Watch, todo: list[Todo]) -> list[Message]:
    """The events that go out since their step cannot be stored."""
    effects = [effect for step in todo if isinstance(step, Step) for effect in step.failed]
    found = [
        effect.what.message
        for effect in effects
        if isinstance(effect, MachineEffect) and isinstance(effect.what, UnstoredEvent)
    ]
    return [message for message in found if watch.monitor.unstored.may_go(message)]


def critical(watch: Watch, reason: str = "fall") -> Signal:
    return Signal("band", reason, watch.clock.now(), severity=Severity.CRITICAL)


def body(message: Message) -> Any:
    return json.loads(message.body)


def test_a_critical_event_goes_out_unstored_until_the_tower_has_answered() -> None:
    watch = Watch(AT_ONCE)
    signal = MachineEvent(critical(watch))
    (event,) = not_stored(watch, watch.monitor.handle(signal, watch.clock.now()))
    events = watch.monitor.unstored
    events.sent(event)
    assert (event.key in events, events.get(event.key)) == (True, event)
    answer = Answered(event.key, State.DONE, Answer())
    begin_anew(watch)
    assert watch.give(answer) == [], "it ends when it is stored, and the tower is asked once more"
    assert not_stored(watch, watch.monitor.handle(signal, watch.clock.now())) == [], "the tower has it"
    begin_anew(watch)
    watch.give(signal)
    (again,) = watch.sent()
    assert again.body == event.body, "what is stored and sent later is a duplicate to the tower"
    watch.take(event)
    assert event.key not in events


def test_an_event_that_went_out_is_not_withheld_any_more() -> None:
    watch = Watch(AT_ONCE)
    (event,) = not_stored(watch, watch.monitor.handle(MachineEvent(critical(watch)), watch.clock.now()))
    watch.monitor.unstored.sent(event)
    watch.monitor.unstored.withhold(event.key)
    assert watch.monitor.unstored.may_go(event), "it is repeated, with the same bytes"


def test_a_device_that_was_back_in_time_is_no_alarm_even_if_nothing_can_be_stored() -> None:
    watch = Watch(AT_ONCE)
    gone = MachineEvent(critical(watch, "disconnect"))
    todo = watch.monitor.handle(gone, watch.clock.now())
    watch.monitor.handle(MachineEvent(DeviceBack("band", watch.clock.now())), watch.clock.now())
    assert not_stored(watch, todo) == []
    begin_anew(watch)
    (event,) = not_stored(watch, watch.monitor.handle(gone, watch.clock.now()))
    assert body(event)["trigger_reason"] == "disconnect", "what was said since is handled again"


def fail(watch: Watch, *events: Event) -> list[Message]:
    """What goes out, in its order, since nothing of what these events bring about can be stored."""
    todo = [one for event in events for one in watch.monitor.handle(event, watch.clock.now())]
    return [watch.monitor.unstored.sent(message) for message in not_stored(watch, todo)]


@pytest.mark.parametrize(
    ("severity", "change"),
    [
        (Severity.CRITICAL, lambda event: ClockOffset(90 * SECOND)),
        (Severity.CRITICAL, lambda event: EventChange(event, 0, location=b'{"lat":31.2}')),
        (Severity.WARNING, lambda event: EventChange(event, 0, severity=Severity.CRITICAL)),
    ],
    ids=["dated", "updated", "made critical"],
)
def test_a_stored_event_that_went_out_in_a_newer_form_is_stored_and_repeated_in_that_form(
    severity: Severity, change: Callable[[str], object]
) -> None:
    watch = Watch(AT_ONCE, online=False)
    event = watch.signal("fall", severity=severity).event
    stored = watch.ledger.disk.messages[key_of(SCOPE, event)].message
    came = (MachineEvent(change(event)), Reachable(""))
    (out,) = fail(watch, *came)
    assert out.body != stored.body
    begin_anew(watch)
    assert watch.ledger.disk.messages[out.key].message.body == out.body, "also a restart finds it"
    for one in came:
        watch.give(one)
    assert watch.sent()[0].body == out.body, "what is sent later is a duplicate to the tower"
    correction = watch.call_off().corrected
    watch.take(out)
    assert correction == (event,)
    assert watch.sent()[-1].kind == CANCEL, "and the tower is told that it was called off"


def test_an_event_that_is_dated_while_nothing_can_be_stored_goes_out_in_one_form() -> None:
    watch = Watch(AT_ONCE, online=False)
    came = (MachineEvent(critical(watch)), MachineEvent(ClockOffset(90 * SECOND)), Reachable(""))
    first, again = fail(watch, *came)
    assert again == first
    begin_anew(watch)
    for one in came:
        watch.give(one)
    assert [message.body for message in watch.sent()] == [first.body]
