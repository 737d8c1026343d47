"""Worlds of several hubs: gateway worlds with two or three hubs on one disk, and a doorbell that loses rings.

Clients go from hub to hub as their connections break; hubs die around their commits, each for itself. Seen
from outside it is one hub: the same checkers judge it, and every write counts as that hub's.
"""

from __future__ import annotations

import asyncio
from typing import Final

from duly.apps.neighbours import LOOK_SECONDS
from duly.core import writes as w
from duly.doorbell import Doorbell
from duly.doorbells.local import LocalDoorbell, Street
from duly.ledgers.memory import Disk
from duly.testing.sim.gateway import GatewayHub, GatewayWorld
from duly.testing.sim.nodes import Node
from duly.testing.sim.plan import Plan

HUBS: Final = ("hub", "hub2", "hub3")


class LossyDoorbell(LocalDoorbell):
    """Loses what the network would lose, and is as slow."""

    def __init__(self, node: TownHub, street: Street) -> None:
        super().__init__(node.ledger.worker, street)
        self._node = node

    async def _send(self, note: bytes) -> None:
        world, loop = self._node.world, asyncio.get_running_loop()
        for bell in self._street.bells:
            if not (world.faulty and world.rng.random() < world.plan.drop):
                loop.call_later(world.rng.random() * min(world.network.slow, 0.5), bell._heard, note)

    def _heard(self, note: bytes | str) -> None:
        if self._node.alive and self._node.ledger.worker == self._me:
            super()._heard(note)


class TownHub(GatewayHub):
    world: TownWorld

    async def begin(self) -> None:
        self.ledger.sole = False
        await super().begin()
        self.spawn(self._look())

    def bell(self) -> Doorbell:
        bell = LossyDoorbell(self, self.world.street)
        self.world.street.bells.append(bell)
        return bell

    async def _look(self) -> None:
        assert self.gateway.neighbours is not None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.gateway.neighbours.look()


class TownWorld(GatewayWorld):
    hub = TownHub

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.street = Street()

    def _hubs(self) -> list[Node]:
        hubs: list[Node] = [self.hub(self, name, 0) for name in HUBS[: self.rng.choice([2, 3])]]
        for hub in hubs:
            hub.disk = hubs[0].disk
        return hubs

    def hub_for(self, client: str, tries: int) -> GatewayHub:
        hubs = [node for node in self.nodes.values() if isinstance(node, TownHub)]
        return hubs[(int(client[3:]) + client.startswith("dev") + tries) % len(hubs)]

    def committed(self, node: Node, disk: Disk, write: w.Write, result: w.Result) -> None:
        super().committed(self.nodes["hub"] if isinstance(node, TownHub) else node, disk, write, result)
