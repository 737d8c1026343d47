"""Counts hops: what was said of messages, how they ended, and how long that took.

The law: hops are counted many at once, a few times a second. What is done for each of them here is done for
every message, so each line of the loop is paid for; everything that can be is done once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final, TypeAlias

from duly.core.messages import Message
from duly.core.units import MS, SECOND
from duly.runtime.telemetry import Telemetry

OPEN_KEPT: Final = 100_000
"""Messages under way whose times are remembered."""


class HopKind(IntEnum):
    """What a hop means for the figures."""

    SAID = 0
    """its sender was told a verdict"""
    SENT = 1
    """it was handed over to its recipient"""
    ENDED = 2
    """it has ended here"""
    NOTED = 3
    """anything else"""


NotedHop: TypeAlias = tuple[bytes, int, HopKind, str, int, str, str]
"""A hop as it is noted: key, time (µs), kind, word, attempt, detail and the kind of its message."""

SAID, SENT, ENDED, NOTED = HopKind
_OUTCOMES: Final = {"fresh": "accepted", "duplicate": "duplicate", "conflict": "conflict", "stale": "stale"}
_FRESH: Final = "fresh"
_UNKNOWN: Final = "unknown"


class HopCounts:
    """Counts the hops of one hub into its telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._kinds: dict[bytes, str] = {}
        self._accepted: dict[bytes, int] = {}
        """when messages under way were accepted, the oldest first"""
        self._sent: dict[bytes, int] = {}
        """when they were first sent"""
        self._skews = [0.0, 0.0]
        self._minute = 0

    def resume(self, messages: Iterable[Message], now: int) -> None:
        """Take up messages that were under way before a restart."""
        for message in sorted(messages, key=lambda one: one.made):
            self._kinds[message.key] = message.kind
            self._accepted.setdefault(message.key, message.made or now)

    def count(self, hops: list[NotedHop]) -> None:
        """Count these hops."""
        kinds, accepted, sent = self._kinds, self._accepted, self._sent
        said: dict[tuple[str, str], int] = {}
        ended: dict[tuple[str, str], int] = {}
        sends: list[int] = []
        runs: list[int] = []
        totals: list[int] = []
        newest, retries = b"", 0
        for key, at, kind, what, attempt, _, of in hops:
            if kind is SAID:
                pair = (of, what)
                said[pair] = said.get(pair, 0) + 1
                if what == _FRESH:
                    accepted[key] = at
                    kinds[key] = of
                    if key > newest:  # noqa: PLR1730 # a call for each message would cost more
                        newest = key
            elif kind is SENT:
                if key in accepted:
                    if key not in sent:
                        sends.append(at - accepted[key])
                        sent[key] = at
                else:  # another hub has accepted it
                    kinds[key], accepted[key], sent[key] = of, at, at
                if attempt > 1:
                    retries += 1
            elif kind is ENDED:
                pair = (kinds.pop(key, ""), what)
                ended[pair] = ended.get(pair, 0) + 1
                began = accepted.pop(key, 0)
                if began:
                    totals.append(at - began)
                    began = sent.pop(key, 0)
                    if began:
                        runs.append(at - began)
                if what == _UNKNOWN:
                    kinds[key] = pair[0]  # a late answer may settle it
        for (of, what), times in said.items():
            self._telemetry.count(of, _OUTCOMES.get(what, "refused"), times)
        for (of, what), times in ended.items():
            self._telemetry.count(of, what, times)
        if retries:
            self._telemetry.retried(retries)
        for stage, lengths in (("send", sends), ("run", runs), ("total", totals)):
            self._telemetry.stages[stage].observe_all(lengths)
        if newest:
            self.skewed(max(0, int.from_bytes(newest[:6], "big") * MS - hops[-1][1]) / SECOND)
        self._forget()

    def _forget(self) -> None:
        """Forget the oldest where there are too many; messages that never end here do not fill memory."""
        for known in (self._kinds, self._accepted, self._sent):
            while len(known) > OPEN_KEPT:
                del known[next(iter(known))]

    def oldest(self, is_under_way: Callable[[bytes], bool], now: int) -> float:
        """The age of the oldest message under way, in seconds; 0 if there is none. Messages that are no
        longer under way here, by what `is_under_way` says, are forgotten."""
        while self._accepted:
            key = next(iter(self._accepted))
            if is_under_way(key):
                return max(0.0, (now - self._accepted[key]) / SECOND)
            del self._accepted[key]
            self._kinds.pop(key, None)
            self._sent.pop(key, None)
        return 0.0

    def skewed(self, seconds: float) -> None:
        """Note how far the clock of a sender is from the hub's."""
        self._skews[0] = max(self._skews[0], abs(seconds))

    def skew(self, now: int) -> float:
        """The farthest clock of the last minute or two, in seconds."""
        minute = now // (60 * SECOND)
        if minute != self._minute:
            self._skews = [0.0, self._skews[0] if minute == self._minute + 1 else 0.0]
            self._minute = minute
        return max(self._skews)
