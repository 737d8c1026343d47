"""Worlds of MQTT devices find what they should find, and what they once found stays mended."""

from __future__ import annotations

import pytest

from duly.testing.sim import run_seed
from duly.testing.sim.broker import SimConnection, version_of
from duly.testing.sim.plan import plan


@pytest.mark.parametrize("seed", [15, 25, 58, 81, 123, 887])
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    """15: a hub that reached its broker late told apps of all that a device had been. 25: a device that was
    given up came back to life when the broker repeated its last status. 58 and 123: a message that had ended
    while it waited for a gap was queued for good. 81: a foreign subscription stayed in the hub's session, as
    the connection broke while it was ended. 887: a push was stored before one that the hub had dropped, as
    its device reported too often."""
    assert run_seed(seed, "mqtt").violations == ()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_chooses_which_version_of_mqtt_each_client_speaks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken: dict[str, set[int]] = {}
    take = SimConnection._connect

    def note(connection: SimConnection, body: bytes) -> None:
        spoken.setdefault(connection.wire.client, set()).add(body[6])
        take(connection, body)

    monkeypatch.setattr(SimConnection, "_connect", note)
    assert run_seed(seed, "mqtt").violations == ()
    level = {3: 4, 5: 5}
    assert spoken == {client: {level[version_of(plan(seed), client)]} for client in spoken}
    assert set.union(*spoken.values()) == {4, 5}, "this seed has both"
