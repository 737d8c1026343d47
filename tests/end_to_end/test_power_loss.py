"""The power fails under a hub, again and again, while commands are under way: what it had not flushed is
gone.

The judge's law is that of `pressing`: what was accepted is not lost, nothing is done twice, every sender
learns how each of its commands ended. The same hub without its flushes must be caught.

`DULY_POWER_LOSSES` says how often the power fails in the whole, and `DULY_POWER_SEED` makes it another one.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

import pytest

from tests.end_to_end.fused import BUG
from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import HubProcess
from tests.guard import LIMIT
from tests.power_loss import PowerLoss, build
from tests.proof import count

LOSSES = int(os.environ.get("DULY_POWER_LOSSES", "20"))
SEED = os.environ.get("DULY_POWER_SEED", "1")
DEVICES = ("lock", "lamp")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("power"))


class PoweredHub:
    """A hub on a disk that forgets what was not flushed."""

    def __init__(self, folder: Path, library: Path, bug: str = "") -> None:
        self.hub = HubProcess(folder / "hub")
        self._folder, self._library, self._bug = folder, library, bug

    async def start(self) -> None:
        self.power = PowerLoss(self._library, self._folder / "hub", self._folder / "log")
        self.hub.preload = self.power.env | {BUG: self._bug}
        await self.hub.start()

    async def lose_power(self, rng: Random) -> None:
        await self.hub.kill()
        await asyncio.to_thread(self.power.lose, rng)
        await self.hub.start()


async def press(folder: Path, library: Path, losses: int, seed: str, bug: str = "") -> PowerLoss:
    """Lose power so often under load, and have everything judged."""
    rng = Random(seed)
    powered = PoweredHub(folder, library, bug)
    hub = powered.hub
    tokens = await hub.prepare(["phone", "tablet"], list(DEVICES))
    devices = [Lock(hub, tokens[name], folder / name) for name in DEVICES]
    remotes = [
        Remote(hub, "phone", tokens["phone"], ordered=True),
        Remote(hub, "tablet", tokens["tablet"], ordered=False),
    ]
    await powered.start()
    try:
        async with pressed(remotes, *devices) as load:
            for _ in range(losses):
                if rng.random() < 0.7 and not bug:  # with a bug there may never be more
                    await load.more(rng.randint(0, 5))
                await asyncio.sleep(rng.uniform(0.5, 2) if bug else rng.uniform(0.02, 0.4))
                await powered.lose_power(rng)
                assert [one.trouble for one in remotes] == [[], []]
        await judge(hub, [*devices], remotes, ledger=folder / "hub" / "ledger.db")
    finally:
        await hub.kill()
    return powered.power


@pytest.mark.proof
@pytest.mark.timeout(3 * LIMIT + 5 * LOSSES)
async def test_what_a_hub_has_accepted_survives_the_loss_of_power(tmp_path: Path, library: Path) -> None:
    power = await press(tmp_path, library, LOSSES, SEED)
    assert power.sectors_lost > LOSSES, "too little was lost to say anything"
    count("power losses", power.losses, f"DULY_POWER_SEED={SEED}")


@pytest.mark.proof
@pytest.mark.timeout(3 * LIMIT)
async def test_a_hub_that_does_not_flush_is_caught(tmp_path: Path, library: Path) -> None:
    """Otherwise the test above could say nothing."""
    with pytest.raises(AssertionError, match=r"accepted before, and lost|damaged|may be lost"):
        await press(tmp_path, library, 50, SEED, "never flush")
