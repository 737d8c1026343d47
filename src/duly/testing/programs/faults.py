"""The faults of one run of a test's programs.

The law: a run follows from its faults alone. They have a short name, which is printed with a failure and
replays it: `calm`, `crash@7` (one crash, at the seventh moment around a commit), `17` (everything drawn from
the number 17), `17-drop-cuts` (the same without these kinds), `17/2` (only its first two faults).
"""

from __future__ import annotations

import re
from random import Random
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from duly.errors import Malformed
from duly.testing.sim.plan import SimPlan

KINDS: Final = ("drop", "repeat", "delay", "cuts", "crash", "skew")
"""The kinds of faults that a test can leave out."""
_NAME: Final = re.compile(r"(?P<draw>\d+)(?P<without>(?:-\w+)*)(?:/(?P<most>\d+))?")


class Faults(Struct, frozen=True):
    """The faults of one run. `draw` 0 has none; `crash_at` counts the moments around commits from 1."""

    draw: int = 0
    without: frozenset[str] = frozenset()
    most: int | None = None
    """how many faults happen at most"""
    crash_at: int = 0

    @property
    def name(self) -> str:
        """The short name, as `--duly-replay` takes it."""
        if self.crash_at:
            return f"crash@{self.crash_at}"
        if not self.draw:
            return "calm"
        without = "".join(f"-{kind}" for kind in KINDS if kind in self.without)
        return f"{self.draw}{without}" + ("" if self.most is None else f"/{self.most}")

    @classmethod
    def parse(cls, name: str) -> Faults:
        """Read a short name.

        >>> Faults.parse("17-drop/2").name, Faults.parse("crash@7").crash_at
        ('17-drop/2', 7)
        """
        if name == "calm":
            return cls()
        if name.startswith("crash@") and name[6:].isdecimal():
            return cls(crash_at=int(name[6:]))
        found = _NAME.fullmatch(name)
        without = frozenset(found["without"].split("-")[1:]) if found else frozenset({"?"})
        if found is None or not without <= set(KINDS):
            raise Malformed(f"{name!r} is not the name of a run; copy the name that the failing test printed")
        return cls(int(found["draw"]), without, int(found["most"]) if found["most"] else None)

    def plan(self) -> SimPlan:
        """Return how often each kind of fault happens."""
        rng = Random(f"faults {self.draw}")
        drawn = {
            "drop": rng.choice([0, 0.05, 0.2, 0.4]),
            "repeat": rng.choice([0, 0.1, 0.3]),
            "delay": rng.choice([0.02, 0.2, 2.0]),
            "cuts": rng.choice([0, 1, 3]),
            "crash": rng.choice([0, 0.03, 0.08]),
            "skew": rng.choice([0, 1, 20]),
        }
        calm = dict.fromkeys(KINDS, 0) | {"delay": 0.02}
        of = {kind: drawn[kind] if self.draw and kind not in self.without else calm[kind] for kind in KINDS}
        return SimPlan(
            self.draw, 0, 0, 0, of["drop"], of["repeat"], of["delay"], of["crash"], 0, int(of["cuts"]),
            of["skew"], 0, 0, 0, 0, 0,
        )  # fmt: skip

    def milder(self) -> list[Faults]:
        """Return the same run without one kind of faults."""
        if not self.draw:
            return []
        return [replace(self, without=self.without | {kind}) for kind in KINDS if kind not in self.without]
