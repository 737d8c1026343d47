"""Worlds of the gateway whose windows are smaller than what waits, and whose devices tell things."""

from __future__ import annotations

import pytest

from duly.testing.sim.plan import plan
from duly.testing.sim.runner import _run, run_seed
from tests.testing.planted_in_delivery import PLANTED


@pytest.mark.parametrize("seed", [5, 14, 19, 26, 31, 33, 39])
def test_a_seed_that_once_failed_in_the_gateway_world_passes(seed: int) -> None:
    assert run_seed(seed, "gateway").violations == ()


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_planted_in_delivery_is_caught_within_200_seeds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[name](monkeypatch)
    assert any(_run(plan(seed), "gateway").violations for seed in range(200))
