"""The tower's world finds what it should find."""

from __future__ import annotations

from typing import Any

import pytest

from duly.core.fanout.attempts import Attempts
from duly.core.fanout.machine import Fanout
from duly.core.fanout.recipient_queue import QueuedDelivery, Where
from duly.core.steps import Todo
from duly.testing.sim.plan import plan
from duly.testing.sim.runner import _run


def _unclaimed(self: Fanout, batch: list[QueuedDelivery], where: Where, now: int) -> list[Todo]:
    """Sends without claiming first."""
    for item in batch:
        item.attempt += 1
    return [self._start(batch, where[1])]


def _no_doubt(self: Attempts, item: QueuedDelivery, now: int) -> list[Todo]:
    """Takes what a crash cut off for not sent."""
    item.leased = False
    return self._again(item, "cut off", None, now, [])


def _forgetful(self: Attempts, item: QueuedDelivery, *_: Any) -> list[Todo]:
    """Loses what failed instead of trying it again."""
    self._active.strike(item)
    return []


@pytest.mark.parametrize(
    ("part", "name", "bug"),
    [(Fanout, "_launch", _unclaimed), (Attempts, "cut_off", _no_doubt), (Attempts, "_again", _forgetful)],
)
def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch, part: type, name: str, bug: Any) -> None:
    monkeypatch.setattr(part, name, bug)
    assert any(_run(plan(seed), "tower").violations for seed in range(100))
