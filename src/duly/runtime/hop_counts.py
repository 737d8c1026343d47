"""Counts hops: verdicts on messages, their outcomes, and how long they took.

The law: hops are counted in batches, a few times a second. The work per hop is done for every message, so as
much as possible is done once per batch. Most messages begin and end within one batch, on one of a few usual
courses, and are counted together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from enum import IntEnum
from operator import itemgetter, sub
from typing import Any, Final, TypeAlias

from duly.core.messages import Message
from duly.core.operations import OpenDelivery
from duly.core.units import MS, SECOND
from duly.runtime.telemetry import Telemetry

OPEN_KEPT: Final = 100_000
"""How many messages under way have their times remembered."""
DISORDER: Final = SECOND
"""How far the messages under way may be from the order in which they were accepted."""
LEAVING: Final = 10 * SECOND
"""How long a message is remembered that is no longer under way although its end was not noted: it is being
stored, or has ended at another hub."""


class HopKind(IntEnum):
    """The meaning of a hop for the metrics."""

    SAID = 0
    """its sender was sent a verdict"""
    SENT = 1
    """it was handed over to its recipient"""
    ENDED = 2
    """it has ended here"""
    NOTED = 3
    """anything else"""
    UNHEARD = 4
    """there was a verdict, and its sender was not connected to be sent it"""


NotedHop: TypeAlias = tuple[int, str, int, str, HopKind, str]
"""A hop as it is noted: time (µs), word, attempt, detail, kind, and the kind of its message."""
HOP_WIDTH: Final = 6
HopValues: TypeAlias = tuple[Any, ...]
"""The values of several hops, one after the other."""
NotedHops: TypeAlias = dict[bytes, HopValues]
"""Hops by the key of their message, as one flat tuple of plain values, which Python's garbage collector need
not traverse."""

SAID, SENT, ENDED, NOTED, UNHEARD = HopKind
_OUTCOMES: Final = {"fresh": "accepted", "duplicate": "duplicate", "conflict": "conflict", "stale": "stale"}
_FRESH: Final = "fresh"
_SAID_WORD: Final = 1
"""The position of the verdict in the hops of a message that begins with one."""
_COURSES: Final = {
    kinds: kinds.index(ENDED) * HOP_WIDTH + 1
    for kinds in ((SAID, SENT, ENDED), (SAID, ENDED), (SAID, ENDED, NOTED))
}
"""The usual courses of messages from beginning to end, as the kinds of their hops, and the position of the
outcome: a command is sent before it ends, and a chat line ends when it is stored."""
_UNKNOWN: Final = "unknown"


def each(hops: HopValues) -> Iterator[NotedHop]:
    """Yield the hops of one message."""
    return zip(*[iter(hops)] * HOP_WIDTH, strict=True)


class _Tally:
    """The counts and durations of one batch of hops."""

    def __init__(self) -> None:
        self.said: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.sends: list[int] = []
        self.runs: list[int] = []
        self.totals: list[int] = []
        self.retries = 0
        self.newest = b""
        """the highest key that was accepted"""
        self.last = 0
        """the time of the last hop"""

    def take_whole(self, noted: NotedHops, before: Container[bytes]) -> list[tuple[bytes, NotedHop]]:
        """Count the messages that were accepted as fresh and took a usual course to their end; return the
        other hops."""
        rest: list[tuple[bytes, NotedHop]] = []
        whole: dict[HopValues, NotedHops] = {kinds: {} for kinds in _COURSES}
        for key, hops in noted.items():
            kinds = hops[4::HOP_WIDTH]
            alike = whole.get(kinds)
            if (
                alike is not None
                and hops[_SAID_WORD] == _FRESH
                and hops[_COURSES[kinds]] != _UNKNOWN
                and key not in before
            ):
                alike[key] = hops
            else:
                rest += [(key, hop) for hop in each(hops)]
        for kinds, alike in whole.items():
            if alike:
                self._count_alike(kinds, alike)
        return rest

    def _count_alike(self, kinds: HopValues, alike: NotedHops) -> None:
        """Count messages whose hops have the same kinds, value by value for all of them together."""
        columns = list(zip(*alike.values(), strict=True))
        began, what, of = columns[0], columns[_SAID_WORD], columns[5]
        end = _COURSES[kinds]
        ended = columns[end - 1]
        self.said.update(Counter(zip(of, what, strict=True)))
        self.ended.update(Counter(zip(of, columns[end], strict=True)))
        self.totals += map(sub, ended, began)
        if SENT in kinds:
            sent, attempts = columns[HOP_WIDTH], columns[HOP_WIDTH + 2]
            self.sends += map(sub, sent, began)
            self.runs += map(sub, ended, sent)
            self.retries += len(attempts) - attempts.count(1)
        self.newest = max(self.newest, *alike)
        self.last = max(self.last, columns[-HOP_WIDTH][-1])


class HopCounts:
    """Counts the hops of one hub into its telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._kinds: dict[bytes, str] = {}
        self._accepted: dict[bytes, int] = {}
        """when messages under way were accepted, the oldest first unless they are `_disordered`"""
        self._disordered = False
        self._sent: dict[bytes, int] = {}
        """when they were first sent; 0 if that was before a restart, or at another hub"""
        self._leaving: dict[bytes, tuple[int, int]] = {}
        """when messages that are no longer under way were accepted, and since when they are not"""
        self._skews = [0.0, 0.0]
        self._minute = 0

    def know(self, message: Message) -> None:
        """Remember the kind of a message that may end here although it was not accepted here."""
        self._kinds.setdefault(message.key, message.kind)

    def resume(self, found: Iterable[OpenDelivery], now: int) -> None:
        """Resume messages that were under way before a restart, or that another hub has accepted."""
        accepted = self._accepted
        last = next(reversed(accepted.values()), 0)
        for item in found:
            key = item.message.key
            if key in accepted or item.state.terminal:  # a message that has ended may be sent again
                continue
            self.know(item.message)
            accepted[key] = item.accepted_at or now
            self._disordered |= accepted[key] < last - DISORDER
            if item.delivery.attempt:
                self._sent.setdefault(key, 0)

    def count(self, noted: NotedHops) -> None:
        """Count these hops."""
        tally = _Tally()
        rest = tally.take_whole(noted, self._accepted)
        if rest:
            self._count_each(rest, tally)
        for (of, what), times in tally.said.items():
            self._telemetry.count(of, _OUTCOMES.get(what, "refused"), times)
        for (of, what), times in tally.ended.items():
            self._telemetry.count(of, what, times)
        if tally.retries:
            self._telemetry.retried(tally.retries)
        for stage, lengths in (("send", tally.sends), ("run", tally.runs), ("total", tally.totals)):
            self._telemetry.stages[stage].observe_all(lengths)
        if tally.newest:
            self.skewed(max(0, int.from_bytes(tally.newest[:6], "big") * MS - tally.last) / SECOND)
        self._forget()

    def _count_each(self, rest: Iterable[tuple[bytes, NotedHop]], tally: _Tally) -> None:
        """Count the hops of messages that began earlier, or continue."""
        kinds, accepted, sent = self._kinds, self._accepted, self._sent
        for key, (at, what, attempt, _, kind, of) in rest:
            tally.last = at
            if kind is SAID or kind is UNHEARD:
                tally.said[of, what] += 1
                if what == _FRESH:
                    accepted[key] = at
                    kinds[key] = of
                    tally.newest = max(tally.newest, key)
            elif kind is SENT:
                if key in self._leaving:
                    accepted[key], _ = self._leaving.pop(key)
                if key not in accepted:  # it was forgotten, as one of too many
                    kinds[key], accepted[key], sent[key] = of, at, at
                elif key not in sent:
                    # The clock of the hub that has accepted it may be a little ahead.
                    tally.sends.append(max(0, at - accepted[key]))
                    sent[key] = at
                if attempt > 1:
                    tally.retries += 1
            elif kind is ENDED:
                known = kinds.pop(key, "")
                tally.ended[known, what] += 1
                left, _ = self._leaving.pop(key, (0, 0))
                began = accepted.pop(key, 0) or left
                if began:
                    tally.totals.append(max(0, at - began))
                    began = sent.pop(key, 0)
                    if began:
                        tally.runs.append(at - began)
                if what == _UNKNOWN and known:
                    kinds[key] = known  # a late answer may settle it

    def _forget(self) -> None:
        """Forget the oldest when there are too many, so that messages that never end here do not fill
        memory."""
        for known in (self._kinds, self._accepted, self._sent, self._leaving):
            while len(known) > OPEN_KEPT:
                del known[next(iter(known))]

    def oldest(self, is_under_way: Callable[[bytes], bool], now: int) -> float:
        """Return the age of the oldest message under way in seconds, or 0. Messages that `is_under_way` no
        longer knows are forgotten a little later, since the end of a message that is being stored is noted
        only then."""
        while self._leaving:
            key = next(iter(self._leaving))
            if now - self._leaving[key][1] < LEAVING:
                break
            began, _ = self._leaving.pop(key)
            if is_under_way(key):
                self._accepted.setdefault(key, began)
            elif key not in self._accepted:
                self._kinds.pop(key, None)
                self._sent.pop(key, None)
        if self._disordered:
            self._accepted = dict(sorted(self._accepted.items(), key=itemgetter(1)))
            self._disordered = False
        while self._accepted:
            key = next(iter(self._accepted))
            if is_under_way(key):
                return max(0.0, (now - self._accepted[key]) / SECOND)
            self._leaving[key] = (self._accepted.pop(key), now)
        return 0.0

    def skewed(self, seconds: float) -> None:
        """Note how far the clock of a sender is from the hub's."""
        self._skews[0] = max(self._skews[0], abs(seconds))

    def skew(self, now: int) -> float:
        """Return the largest clock difference of the last minute or two, in seconds."""
        minute = now // (60 * SECOND)
        if minute != self._minute:
            self._skews = [0.0, self._skews[0] if minute == self._minute + 1 else 0.0]
            self._minute = minute
        return max(self._skews)
