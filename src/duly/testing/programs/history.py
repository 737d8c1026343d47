"""The history of a run, as an outside observer records it, and the checkers that judge it.

The law: a checker reads the history alone, never the programs. It is a function that takes a `History` and
yields a sentence for everything that is wrong; a test adds its own to those here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct


class ObservedEvent(Struct, frozen=True):
    """Something that a process did or learned. `what` is `effect`, `wants` or `told`."""

    at: float
    process: str
    life: int
    what: str
    name: str
    key: str = ""
    lane: str = ""
    n: int | None = None
    value: object = None


class History:
    """Everything that the processes of a run have reported, in order."""

    def __init__(self) -> None:
        self.events: list[ObservedEvent] = []

    def effects(self, name: str | None = None) -> list[ObservedEvent]:
        """Return the effects, all of them or those of one name."""
        return [event for event in self.events if event.what == "effect" and name in (None, event.name)]

    def wanted(self) -> list[str]:
        """Return the keys that a process wanted to take effect."""
        return list(dict.fromkeys(event.key for event in self.events if event.what == "wants"))

    def told(self, key: str) -> list[object]:
        """Return the outcomes that were reported of a key, in order."""
        return [event.value for event in self.events if event.what == "told" and event.key == key]


Checker: TypeAlias = Callable[[History], Iterable[str]]


def at_most_once(history: History) -> Iterator[str]:
    """No effect of one name and key happens twice."""
    for (name, key), times in Counter((effect.name, effect.key) for effect in history.effects()).items():
        if times > 1:
            yield f"{name} of {key} happened {times} times"


def in_order(history: History) -> Iterator[str]:
    """Per name and lane, effects happen in the order of their numbers."""
    last: dict[tuple[str, str], int] = {}
    for effect in history.effects():
        if effect.n is None:
            continue
        before = last.get((effect.name, effect.lane), effect.n)
        if effect.n < before:
            where = f" of {effect.lane}" if effect.lane else ""
            yield f"{effect.name} number {effect.n}{where} happened after number {before}"
        last[effect.name, effect.lane] = max(before, effect.n)


def everyone_was_told(history: History) -> Iterator[str]:
    """Every key that was wanted has an outcome, and the same one every time. An effect that was reported as
    done has happened."""
    happened = {effect.key for effect in history.effects()}
    for key in history.wanted():
        told = history.told(key)
        if not told:
            yield f"no outcome of {key} was ever reported"
        elif any(outcome != told[0] for outcome in told):
            yield f"{key} was reported as {told[0]!r}, then as {told[-1]!r}"
        elif told[0] == "done" and key not in happened:
            yield f"{key} was reported as done, and nothing happened"


CHECKERS: tuple[Checker, ...] = (at_most_once, in_order, everyone_was_told)
"""The checkers that a test has unless it names others."""
