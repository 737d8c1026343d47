"""The tower's world passes, and finds what it should find."""

from __future__ import annotations

from typing import Any

import pytest

from duly.core.courier import Courier
from duly.core.route import Item, Where
from duly.core.steps import Todo
from duly.testing.sim.plan import plan
from duly.testing.sim.runner import _run, run_seed


@pytest.mark.parametrize("seed", range(30))
def test_a_seed_passes(seed: int) -> None:
    assert run_seed(seed, "tower").violations == ()


def _unclaimed(self: Courier, parcel: list[Item], where: Where, now: int) -> list[Todo]:
    """Sends without claiming first."""
    for item in parcel:
        item.attempt += 1
    return [self._carry(parcel, where[1])]


def _no_doubt(self: Courier, item: Item, where: Where, now: int) -> list[Todo]:
    """Takes what a crash cut off for not sent."""
    return self._again(item, where, "cut off", None, now, [])


def _forgetful(self: Courier, item: Item, now: int) -> list[Todo]:
    """Loses what failed instead of trying it again."""
    self._drop(item)
    return []


@pytest.mark.parametrize(
    ("name", "bug"), [("_launch", _unclaimed), ("_cut_off", _no_doubt), ("_again", None)]
)
def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, bug: Any) -> None:
    def lost(self: Courier, item: Item, *_: Any) -> list[Todo]:
        return _forgetful(self, item, 0)

    monkeypatch.setattr(Courier, name, bug or lost)
    assert any(_run(plan(seed), "tower").violations for seed in range(100))
