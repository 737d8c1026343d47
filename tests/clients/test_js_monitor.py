"""The sentinel's machine in JavaScript decides as the one in Python: both play the same scripts, in virtual
time, and every ruling, transmission, correction and end is compared."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from duly.core.lifecycle import State
from duly.core.messages import Answer, key_of
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.machine import event_in
from duly.core.monitor.signals import (
    EVENT,
    CancelRequest,
    CancelResult,
    ClockOffset,
    DeviceBack,
    EventChange,
    EventQueued,
    NothingToChange,
    SentinelPolicy,
    Severity,
    Signal,
    SignalRuling,
    event_of,
)
from duly.core.steps import (
    Answered,
    Effect,
    MachineEffect,
    MachineEvent,
    Reachable,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from tests import servers
from tests.core.monitor.watching import IDENTITY, Watch
from tests.guard import GUARD

PLAYER = Path(__file__).parent / "js" / "monitor_traces.mjs"
LIMITS: dict[str, Any] = {
    "countdown": 15, "debounce": 20, "per_hour": 3, "cooldown": 40, "summary": 60, "keep": 20_000,
    "retry_first": 3e8, "retry_most": 3e8,
}  # fmt: skip
"""No repeat comes by itself: its time is drawn by lot."""
CLOCKS = (-1_690_000_000_000_000, 0, 3_600_000_000)
"""By how much a clock is wrong: it starts in 1970, is right, or an hour ahead."""
Script = list[list[Any]]


def drawn(chance: random.Random, length: int) -> Script:
    """A script: what happens, one after the other."""
    script: Script = [["reach"]] if chance.random() < 0.7 else []
    kinds = ["signal"] * 8 + ["wait"] * 6 + ["answer"] * 3 + ["back"] * 3 + ["cancel", "cut", "reach"]
    kinds += ["cancel one", "change", "offset", "offset"]
    # A countdown that runs when the clock is set is stored anew in JavaScript only: a restart shows that.
    kinds += chance.choice([["shift"], ["restart"], ["restart", "reboot"]])
    if "reboot" in kinds:
        script.append(["reboot", CLOCKS[0]])
    wrong = CLOCKS[0] if "reboot" in kinds else 0
    while len(script) < length:
        kind = chance.choice(kinds)
        device, one = chance.choice("ab"), chance.randrange(8)
        match kind:
            case "signal":
                severity = chance.choice(["info", "warning", "warning", "critical"])
                own = chance.choice([None, None, 0, 5_000_000])
                script.append([kind, device, chance.choice(["disconnect", "fall"]), severity, own])
            case "wait":
                script.append([kind, chance.choice([1, 5, 16, 25, 45, 70, 400, 3_700])])
            case "back" | "cancel":
                script.append([kind, device])
            case "answer":
                script.append([kind, chance.choice(["done", "done", "failed"]), chance.randrange(1, 4)])
            case "cancel one":
                script.append([kind, one])
            case "change":
                script.append([kind, one, {"lat": one}])
            case "offset":
                script.append([kind, one * 1_000_000 - chance.choice([wrong, wrong, 0])])
            case "shift" | "reboot":
                # A clock that goes back between two runs may leave two countdowns for one reason.
                to = chance.choice([at for at in CLOCKS if kind == "shift" or at >= wrong])
                script.append([kind, to - wrong])
                wrong = to
            case _:
                script.append([kind])
    return script


class PythonPlayer:
    """Plays a script to `duly.core.monitor`."""

    def __init__(self) -> None:
        self.watch = Watch(SentinelPolicy(**LIMITS), online=False)
        self.events: list[str] = []
        self.sent: list[tuple[str, str]] = []
        """the ids and events of what went out"""

    def play(self, script: Script) -> list[list[Any]]:
        return [[*self._seen(self.watch.wait(0.001)), *self._seen(self._step(*step))] for step in script]

    def _step(self, kind: str, *words: Any) -> list[Effect]:
        watch = self.watch
        now = watch.clock.now()
        match kind, words:
            case "wait", (seconds,):
                return watch.wait(seconds)
            case "signal", (device, reason, severity, countdown):
                signal = Signal(device, reason, now, Severity(severity), countdown=countdown)
                return watch.give(MachineEvent(signal))
            case "back", (device,):
                return watch.give(MachineEvent(DeviceBack(device, now)))
            case "cancel", (device,):
                return watch.give(MachineEvent(CancelRequest(now, device)))
            case "cancel one", (one,):
                return watch.give(MachineEvent(CancelRequest(now, "", self._event(one))))
            case "change", (one, location):
                change = EventChange(self._event(one), now, location=json.dumps(location).encode())
                return watch.give(MachineEvent(change))
            case "offset", (by,):
                return watch.give(MachineEvent(ClockOffset(by)))
            case "shift", (by,):
                watch.clock.set(now + by)
                watch.monitor.shift(by)
                return watch.give(MachineEvent(None))
            case "reboot", (by,):
                watch.clock.set(now + by)
                return self._step("restart")
            case "cut", _:
                return watch.give(Unreachable(""))
            case "reach", _:
                return watch.give(Reachable(""))
            case "answer", (state, count):
                answered, self.sent = self.sent[:count], self.sent[count:]
                return [
                    effect
                    for id_, _ in answered
                    for effect in watch.give(Answered(key_of(SCOPE, id_), State[state.upper()], Answer()))
                ]
            case _:
                self.watch = watch.restarted(online=False)
                return self.watch.effects

    def _event(self, one: int) -> str:
        return self.events[one] if one < len(self.events) else "none"

    def _seen(self, effects: list[Effect]) -> list[Any]:
        return [seen for effect in effects if (seen := self._one(effect)) is not None]

    def _one(self, effect: Effect) -> list[Any] | None:
        match effect:
            case MachineEffect(what=SignalRuling(decision=decision, event=event) as ruled):
                if decision.passes and event not in self.events:
                    self.events.append(event)
                word = decision.ruling.value
                return ["ruled", ruled.device, ruled.reason, word, decision.until, event, ruled.due]
            case Transmit(message=message):
                about = message.id if message.kind == EVENT else event_of(message.body)
                if (message.id, about) not in self.sent:
                    self.sent.append((message.id, about))
                return ["transmit", message.id, message.kind, json.loads(message.body)]
            case ReportOutcome(key=key, state=state):
                return ["ended", event_in(key), state.word]
            case MachineEffect(what=EventQueued(event=event, device=device, reason=reason)):
                return ["queued", event, device, reason]
            case MachineEffect(what=CancelResult() as result):
                called = [list(one) for one in (result.dropped, result.corrected, result.held)]
                return ["cancelled", result.device, *called]
            case MachineEffect(what=NothingToChange(event=event)):
                return ["in vain", event]
            case _:
                return None


def play_in_javascript(scripts: list[Script]) -> list[list[list[Any]]]:
    node = shutil.which("node")
    if node is None:
        servers.missing("node")
    identity = {"sentinel": IDENTITY.sentinel, "tower": IDENTITY.tower, "profile": IDENTITY.profile}
    setting = {
        "scripts": scripts, "policy": LIMITS, "identity": identity | {"session": IDENTITY.session},
        "start": Watch().clock.now(),
    }  # fmt: skip
    done = subprocess.run(
        [node, str(PLAYER)],
        input=json.dumps(setting),
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD,
    )
    traces: list[list[list[Any]]] = json.loads(done.stdout)
    return traces


def told(trace: list[list[Any]], script: Script) -> list[list[list[Any]]]:
    """A trace without what the two machines may do differently: what was not answered before a restart is
    sent at once in Python, and at the next connection in JavaScript; and only in Python a late answer settles
    what has become unknown."""
    unknown: set[str] = set()
    seen: list[list[list[Any]]] = []
    for step, effects in zip(script, trace, strict=True):
        begins = step[0] in ("restart", "reboot")
        late = [effect for effect in effects if effect[0] == "ended" and effect[1] in unknown]
        unknown |= {effect[1] for effect in effects if effect[0] == "ended" and effect[2] == "unknown"}
        seen.append([one for one in effects if one not in late and not (one[0] == "transmit" and begins)])
    return seen


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 3_000), marks=pytest.mark.proof)])
def test_both_machines_decide_the_same(seeds: range) -> None:
    scripts = [drawn(random.Random(seed), 60) for seed in seeds]
    for seed, script, theirs in zip(seeds, scripts, play_in_javascript(scripts), strict=True):
        ours = PythonPlayer().play(script)
        pairs = zip(script, told(ours, script), told(theirs, script), strict=True)
        for n, (step, here, there) in enumerate(pairs):
            assert there == here, f"seed {seed}, step {n}: {step} after {script[:n]}"


def test_both_machines_cancel_an_event_that_waited_for_hours() -> None:
    script: Script = [["signal", "a", "fall", "critical", 0], ["wait", 7_200], ["cancel", "a"], ["reach"]]
    (theirs,) = play_in_javascript([script])
    ours = PythonPlayer().play(script)
    assert told(theirs, script) == told(ours, script)
    assert not [effect for effects in theirs for effect in effects if effect[0] == "transmit"]


def test_both_machines_hold_a_signal_no_longer_than_its_window_after_a_clock_that_was_set_back() -> None:
    debounced: Script = [
        ["signal", "a", "disconnect", "warning", None],
        ["wait", 15],
        ["back", "a"],
        ["wait", 1],
    ]
    debounced += [["signal", "a", "disconnect", "warning", None], ["reboot", -3_600_000_000]]
    script = [["reach"], *debounced, ["reach"], ["wait", 36]]
    (theirs,) = play_in_javascript([script])
    assert told(theirs, script) == told(PythonPlayer().play(script), script)
    assert [effect for effect in theirs[-1] if effect[0] == "transmit"]
