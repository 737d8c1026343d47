"""Worlds of MQTT devices find what they should find, and what they once found stays mended."""

from __future__ import annotations

import pytest

from duly.testing.sim import run_seed


@pytest.mark.parametrize("seed", [11, 15, 25, 81])
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    """11 and 15: a push overtook earlier ones at a reconnect. 25: a device that was given up came back to
    life when the broker repeated its last status. 81: a foreign subscription stayed in the hub's session, as
    the connection broke while it was ended."""
    assert run_seed(seed, "mqtt").violations == ()
