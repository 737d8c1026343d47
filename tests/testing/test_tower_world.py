"""The tower's world passes, and finds what it should find."""

from __future__ import annotations

from typing import Any

import pytest

from duly.core.courier import Courier
from duly.core.endings import Endings
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


def _no_doubt(self: Endings, item: Item, where: Where, now: int) -> list[Todo]:
    """Takes what a crash cut off for not sent."""
    return self._again(item, where, "cut off", None, now, [])


def _forgetful(self: Endings, item: Item, *_: Any) -> list[Todo]:
    """Loses what failed instead of trying it again."""
    self._manifest.strike(item)
    return []


@pytest.mark.parametrize(
    ("part", "name", "bug"),
    [(Courier, "_launch", _unclaimed), (Endings, "cut_off", _no_doubt), (Endings, "_again", _forgetful)],
)
def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch, part: type, name: str, bug: Any) -> None:
    monkeypatch.setattr(part, name, bug)
    assert any(_run(plan(seed), "tower").violations for seed in range(100))
