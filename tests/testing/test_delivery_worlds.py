"""Worlds of the gateway whose windows are smaller than what waits, and whose devices tell things."""

from __future__ import annotations

import pytest

from duly.testing.sim import run_seed


@pytest.mark.parametrize("seed", [5, 14, 19, 26, 31, 33, 39])
def test_a_seed_that_once_failed_in_the_gateway_world_passes(seed: int) -> None:
    assert run_seed(seed, "gateway").violations == ()
