"""Suppression: holds back signals that come too often.

Owners switch off an alarm that goes off too often, and then miss the next real one.

The law: **a signal is held back for a stated reason, for a bounded time, and a summary reports what the limit
held back.** For each device, in this order:

1. *Debounce.* Within ``debounce`` of the last signal for the same reason that passed, a repeat is the same
   event (a flapping link). Only passing counts, so a link that flaps without end still passes once per
   ``debounce``; and another reason is another event, however soon it comes.
2. *Cooldown.* Within ``cooldown`` of a cancel nothing passes: a person has just said that all is well. A
   cancelled event no longer debounces: a signal after the cancel is not a repeat of one before it.
3. *Limit.* In any ``window`` at most ``per_hour`` signals pass. The others are counted and reported in one
   summary as soon as the limit allows it, and at the latest ``summary`` after the first of them.

A critical signal passes the cooldown and the limit, and does not use up the limit (otherwise a stream of
critical signals would hold back all others). Only critical signals debounce it: a harmless flutter must not
swallow the alarm that follows it.

If the clock is set back, marks in the future are dropped: one alarm too many is better than one held back for
too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypedDict

from duly.core.units import HOUR, SECOND, show
from duly.errors import Malformed

_SWEEP_AT_LEAST: Final = 64


@dataclass(frozen=True, slots=True)
class SuppressPolicy:
    """How many signals of one device pass. Lengths are in microseconds; 0 switches debounce or cooldown
    off."""

    debounce: int = 30 * SECOND
    per_hour: int = 10
    window: int = HOUR
    cooldown: int = 300 * SECOND
    summary: int = HOUR
    """the longest time until the summary of what the limit held back"""

    def __post_init__(self) -> None:
        if self.debounce < 0 or self.cooldown < 0:
            raise Malformed(
                f"debounce and cooldown are lengths of time, not {show(self.debounce)} and "
                f"{show(self.cooldown)}; 0 switches them off"
            )
        if self.summary < 1:
            raise Malformed(f"the time until a summary must be greater than 0, not {show(self.summary)}")
        if self.window < 1 or self.per_hour < 1:
            raise Malformed(
                f"the limit must let at least 1 signal pass in a window longer than 0, not {self.per_hour} "
                f"in {show(self.window)}"
            )


class Ruling(Enum):
    """The result of a signal."""

    PASS = "pass"
    DEBOUNCED = "debounced"
    LIMITED = "limited"
    COOLING = "cooling"


@dataclass(frozen=True, slots=True)
class SuppressionDecision:
    """The result of a signal and, if it is held back, until when."""

    ruling: Ruling
    until: int | None = None

    @property
    def passes(self) -> bool:
        """Whether the signal becomes an event."""
        return self.ruling is Ruling.PASS


@dataclass(frozen=True, slots=True)
class Summary:
    """What the limit held back from one device: signals by reason, and the times of the first and the
    last."""

    device: str
    reasons: Mapping[str, int]
    since: int
    until: int

    @property
    def held(self) -> int:
        """The number of signals that were held back."""
        return sum(self.reasons.values())


class HeldSnapshot(TypedDict):
    """A pending summary in storable form."""

    reasons: dict[str, int]
    since: int
    until: int
    due: int


class DeviceSnapshot(TypedDict):
    """One device of a ``Suppressor`` in storable form. ``last`` and ``critical`` are by reason."""

    last: dict[str, int]
    critical: dict[str, int]
    passed: list[int]
    cancelled: int | None
    held: HeldSnapshot | None


class _Held:
    __slots__ = ("due", "reasons", "since", "until")

    def __init__(self, reasons: dict[str, int], since: int, until: int, due: int) -> None:
        self.reasons = reasons
        self.since = since
        self.until = until
        self.due = due


class _DeviceMarks:
    """The marks of one device. Marks that are over, or in the future, are dropped before use."""

    __slots__ = ("cancelled", "critical", "held", "last", "passed")

    def __init__(self, limit: int) -> None:
        self.last: dict[str, int] = {}
        self.critical: dict[str, int] = {}
        # Only the newest `limit` marks matter: the limit is reached when the oldest of them is in the window.
        self.passed: deque[int] = deque(maxlen=limit)
        self.cancelled: int | None = None
        self.held: _Held | None = None

    def refresh(self, policy: SuppressPolicy, now: int) -> None:
        """Drop marks outside their window, or in the future after a clock was set back."""
        self.last = _alive(policy.debounce, self.last, now)
        self.critical = _alive(policy.debounce, self.critical, now)
        if self.cancelled is not None and not 0 <= now - self.cancelled < policy.cooldown:
            self.cancelled = None
        passed = self.passed
        while passed and passed[-1] > now:
            passed.pop()
        while passed and now - passed[0] >= policy.window:
            passed.popleft()
        if self.held and len(passed) < policy.per_hour:
            self.held.due = min(self.held.due, now)

    def shift(self, by: int) -> None:
        """Move all marks because the wall clock was set."""
        self.last = {reason: at + by for reason, at in self.last.items()}
        self.critical = {reason: at + by for reason, at in self.critical.items()}
        self.passed = deque((at + by for at in self.passed), maxlen=self.passed.maxlen)
        if self.cancelled is not None:
            self.cancelled += by
        if self.held is not None:
            self.held.since += by
            self.held.until += by
            self.held.due += by

    @property
    def idle(self) -> bool:
        """Whether nothing is remembered about the device."""
        return not self.last and self.cancelled is None and not self.passed and self.held is None


def _alive(span: int, marks: dict[str, int], now: int) -> dict[str, int]:
    return {reason: mark for reason, mark in marks.items() if 0 <= now - mark < span} if marks else marks


class Suppressor:
    """Decides which signals become events. Its memory is bounded: a device without marks is forgotten.

    >>> suppressor = Suppressor(SuppressPolicy())
    >>> [suppressor.signal("door", now * SECOND).ruling.value for now in (0, 10, 30)]
    ['pass', 'debounced', 'pass']
    """

    __slots__ = ("_devices", "_holding", "_policy", "_sweep_at")

    def __init__(self, policy: SuppressPolicy) -> None:
        self._policy = policy
        self._devices: dict[str, _DeviceMarks] = {}
        self._holding: dict[str, _DeviceMarks] = {}
        self._sweep_at = _SWEEP_AT_LEAST

    def signal(
        self, device: str, now: int, critical: bool = False, reason: str = "", *, limit: bool = True
    ) -> SuppressionDecision:
        """Decide whether a signal of ``device`` becomes an event. With ``limit`` false, the limit does not
        hold it back (again)."""
        policy, marks = self._policy, self._at(device, now)
        same = (marks.critical if critical else marks.last).get(reason)
        if same is not None:
            return SuppressionDecision(Ruling.DEBOUNCED, same + policy.debounce)
        if critical:
            marks.critical[reason] = now
        else:
            if marks.cancelled is not None:
                return SuppressionDecision(Ruling.COOLING, marks.cancelled + policy.cooldown)
            if limit and len(marks.passed) == policy.per_hour:
                return self._hold(device, marks, now, reason)
            marks.passed.append(now)
        marks.last[reason] = now
        return SuppressionDecision(Ruling.PASS)

    def cancelled(self, device: str, now: int) -> None:
        """Start the cooldown of a device whose events a person cancelled; later signals are not repeats of
        them."""
        marks = self._at(device, now)
        marks.cancelled = now
        marks.last, marks.critical = {}, {}

    def forgive(self, device: str, reason: str, *, critical: bool) -> None:
        """Forget the last event for this reason, which did not reach people, so that the next signal is not
        its repeat."""
        marks = self._devices.get(device)
        if marks is not None:
            marks.critical.pop(reason, None)
            if not critical:
                marks.last.pop(reason, None)

    def summary_due(self, device: str) -> int | None:
        """Return when the summary of what the limit holds back from this device is due, or None."""
        marks = self._holding.get(device)
        return None if marks is None or marks.held is None else marks.held.due

    def remove_from_summary(self, device: str, reason: str) -> None:
        """Remove a signal from the summary because it became an event of its own."""
        marks = self._holding.get(device)
        if marks is None or marks.held is None or reason not in marks.held.reasons:
            return
        held = marks.held
        held.reasons[reason] -= 1
        if not held.reasons[reason]:
            del held.reasons[reason]
        if not held.reasons:
            marks.held = None
            del self._holding[device]

    def wake(self, now: int) -> list[Summary]:
        """Return the summaries that are due, each once, and forget devices with nothing left to remember."""
        for marks in self._holding.values():
            marks.refresh(self._policy, now)
        due = [device for device, marks in self._holding.items() if marks.held and marks.held.due <= now]
        summaries = [self._tell(device) for device in due]
        self._sweep(now)
        return summaries

    def next_wake(self) -> int | None:
        """Return when ``wake`` has a summary, or None."""
        return min((held.due for held in self._summaries()), default=None)

    def __len__(self) -> int:
        return len(self._devices)

    def snapshot(self) -> dict[str, DeviceSnapshot]:
        """Return everything remembered, as plain dicts, lists and numbers."""
        return {device: _written(marks) for device, marks in self._devices.items()}

    def marks(self, device: str) -> DeviceSnapshot | None:
        """Return the marks of one device, or None."""
        marks = self._devices.get(device)
        return None if marks is None or marks.idle else _written(marks)

    def restore(self, snapshot: Mapping[str, DeviceSnapshot]) -> None:
        """Replace the state with a snapshot; the policy stays."""
        self._devices, self._holding = {}, {}
        for device, saved in snapshot.items():
            marks = self._devices[device] = _DeviceMarks(self._policy.per_hour)
            marks.last, marks.critical = dict(saved["last"]), dict(saved["critical"])
            marks.cancelled = saved["cancelled"]
            marks.passed.extend(saved["passed"])
            held = saved["held"]
            if held is not None:
                marks.held = _Held(dict(held["reasons"]), held["since"], held["until"], held["due"])
                self._holding[device] = marks

    def shift(self, by: int) -> None:
        """Adjust to a wall clock that was set by this much: windows and summaries keep their timing."""
        for marks in self._devices.values():
            marks.shift(by)

    def bound(self, now: int) -> None:
        """Limit waits after a restart, so that a clock that was set back delays no summary beyond
        ``summary``."""
        for held in self._summaries():
            held.due = min(held.due, now + self._policy.summary)

    def _summaries(self) -> list[_Held]:
        return [marks.held for marks in self._holding.values() if marks.held is not None]

    def _at(self, device: str, now: int) -> _DeviceMarks:
        marks = self._devices.get(device)
        if marks is None:
            if len(self._devices) >= self._sweep_at:
                self._sweep(now)
            marks = self._devices[device] = _DeviceMarks(self._policy.per_hour)
        marks.refresh(self._policy, now)
        return marks

    def _hold(self, device: str, marks: _DeviceMarks, now: int, reason: str) -> SuppressionDecision:
        free = marks.passed[0] + self._policy.window
        if marks.held is None:
            marks.held = _Held({}, since=now, until=now, due=min(free, now + self._policy.summary))
            self._holding[device] = marks
        held = marks.held
        held.reasons[reason] = held.reasons.get(reason, 0) + 1
        held.until = now
        return SuppressionDecision(Ruling.LIMITED, free)

    def _tell(self, device: str) -> Summary:
        marks = self._holding.pop(device)
        held, marks.held = marks.held, None
        assert held is not None
        return Summary(device, held.reasons, held.since, held.until)

    def _sweep(self, now: int) -> None:
        for marks in self._devices.values():
            marks.refresh(self._policy, now)
        self._devices = {device: marks for device, marks in self._devices.items() if not marks.idle}
        # Twice the number of live devices, so that a sweep costs each new device a constant share.
        self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._devices))


def _written(marks: _DeviceMarks) -> DeviceSnapshot:
    held = marks.held
    return {
        "last": dict(marks.last),
        "critical": dict(marks.critical),
        "passed": list(marks.passed),
        "cancelled": marks.cancelled,
        "held": None
        if held is None
        else {"reasons": dict(held.reasons), "since": held.since, "until": held.until, "due": held.due},
    }
