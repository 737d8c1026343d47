"""The plan of a world, drawn from its seed: the numbers of processes, messages and faults.

Everything else is drawn from the seed while the world runs, so a plan can be made milder, to shrink a
failure, without becoming another world.
"""

from __future__ import annotations

from random import Random
from typing import Final

from msgspec import Struct

PROMPT: Final = 0.05
"""The longest delay of a network without faults, seconds."""


class SimPlan(Struct, frozen=True):
    """The size of a world and its faults."""

    seed: int
    senders: int
    receivers: int
    messages: int
    """per sender"""
    drop: float
    repeat: float
    slow: float
    """longest ordinary delay, seconds"""
    crash: float
    """chance that a process dies at a commit"""
    faulty_disk: float
    """chance that a commit fails, or succeeds and reports a failure"""
    cuts: int
    skew: float
    """how wrong clocks are, seconds"""
    steps: int
    """how often a clock is set"""
    replays: int
    """recorded frames that are sent again: soon, much later, and beyond the horizon"""
    conflicts: int
    failing: float
    """the chance that a handler fails without an effect"""
    reinstalls: int
    """senders that lose their memory and count from the start"""

    @property
    def faultless(self) -> bool:
        """Whether nothing goes wrong: every message must be done. Delays that exceed the windows of lanes
        are a fault too."""
        return self.slow <= PROMPT and not any(
            (
                self.drop, self.repeat, self.crash, self.faulty_disk, self.cuts, self.skew, self.steps,
                self.replays, self.conflicts, self.failing, self.reinstalls,
            )
        )  # fmt: skip


def plan(seed: int) -> SimPlan:
    """Draw a plan. Every eighth world has no faults: there, every message must be done."""
    rng = Random(f"plan {seed}")
    if seed % 8 == 0:
        return SimPlan(
            seed,
            rng.randint(1, 3),
            rng.randint(1, 2),
            rng.randint(4, 10),
            0,
            0,
            PROMPT,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        )
    return SimPlan(
        seed=seed,
        senders=rng.randint(1, 3),
        receivers=rng.randint(1, 2),
        messages=rng.randint(4, 12),
        drop=rng.choice([0, 0.05, 0.2, 0.4]),
        repeat=rng.choice([0, 0.1, 0.3]),
        slow=rng.choice([0.02, 0.2, 2.0]),
        crash=rng.choice([0, 0.01, 0.03, 0.08]),
        faulty_disk=rng.choice([0, 0, 0.02]),
        cuts=rng.choice([0, 1, 3]),
        skew=rng.choice([0, 1, 20]),
        steps=rng.choice([0, 0, 2]),
        replays=rng.choice([0, 5, 15]),
        conflicts=rng.choice([0, 2]),
        failing=rng.choice([0, 0.1, 0.3]),
        reinstalls=rng.choice([0, 0, 1]),
    )
