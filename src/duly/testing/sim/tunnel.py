"""An app that loses its connection for longer than its patience, at the moment in which its command is
accepted: the hub's answer is lost."""

from __future__ import annotations

from random import Random
from typing import Final

from duly.testing.sim.world import World

TUNNELS: Final = 0.2
"""The share of worlds with faults in which there is such an app."""
SECONDS: Final = 75.0
"""How long the app is without a connection, also after the calm."""


class Tunnel:
    """The app of one world that goes through a tunnel."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._inside: set[str] = set()
        self._ahead = ""
        """the app that loses its connection when its next command is accepted"""

    def choose(self, apps: list[str]) -> None:
        """Draw which app goes through the tunnel, if there is one."""
        plan = self._world.plan
        rng = Random(f"tunnel {plan.seed}")
        if plan.drop and rng.random() < TUNNELS:
            self._ahead = rng.choice(apps)

    def close(self) -> None:
        """Let no app lose its connection from now on."""
        self._ahead = ""

    def accepting(self, app: str) -> None:
        """Called before an app is told that the hub has stored a command."""
        if app == self._ahead:
            self._ahead = ""
            self._world.faults += 1
            self._world.log.note(app, f"has no connection for {SECONDS:.0f} s")
            self._inside.add(app)
            self._world.loop.call_later(SECONDS, self._inside.discard, app)

    def __contains__(self, client: str) -> bool:
        return client in self._inside
