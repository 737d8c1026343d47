"""Finds a simulated run in which the checkers notice a planted bug.

A search from the first seed takes up to a minute, so the seed that noticed a bug the last time is kept in
`noticed.json`, beside the bugs, and is tried first; `make proof` also searches from the first seed. When the
simulation has changed so much that the tests search for long again, this records the seeds anew, of all
worlds or of some:

    .venv/bin/python -m tests.testing.searching hubs nodes
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from msgspec.structs import replace

from duly.testing.sim import hush
from duly.testing.sim.plan import SimPlan, plan
from duly.testing.sim.runner import _run
from tests.testing.planted import PLANTED, PLANTED_BETWEEN_HUBS
from tests.testing.planted_in_chat import PLANTED as PLANTED_IN_CHAT
from tests.testing.planted_in_delivery import PLANTED as PLANTED_IN_DELIVERY
from tests.testing.planted_in_journal import PLANTED as PLANTED_IN_JOURNAL
from tests.testing.planted_in_mqtt import PLANTED as PLANTED_IN_MQTT
from tests.testing.planted_in_nodes import PLANTED as PLANTED_IN_NODES
from tests.testing.planted_in_tower import PLANTED as PLANTED_IN_TOWER
from tests.testing.planted_sentinels import PLANTED_IN_SENTINELS
from tests.testing.planting import BREAKS, Bug

NOTICED: Final = Path(__file__).with_name("noticed.json")
RECORDED: Final[Mapping[str, int]] = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}

_LONG = (pytest.mark.proof, pytest.mark.timeout(900))
START = pytest.mark.parametrize("start", ["recorded", pytest.param("first", marks=_LONG)])
"""Each search twice: from the recorded seed, and in `make proof` from the first."""


_LOSS: Final = {"kernel": 0.3, "hubs": 0.5}
"""How much the network loses in the second run of each seed."""


class BugFamily(NamedTuple):
    """Bugs that are planted in one world, and how many of its runs may be tried to find each."""

    world: str
    bugs: Mapping[str, Bug]
    runs: int = 200

    def plan(self, number: int) -> SimPlan:
        """The run of this number. In the kernel and between hubs each seed counts twice: as drawn, and where
        much is lost. A hub that supersedes too early is caught only where many gaps are given up."""
        loss = _LOSS.get(self.world)
        if loss is None:
            return plan(number)
        drawn = plan(number // 2)
        return replace(drawn, drop=max(drawn.drop, loss)) if number % 2 else drawn

    def noticed(self, name: str, start: str) -> int | None:
        """The number of a run in which the checker that this bug must break notices it; it is planted
        already."""
        checker = BREAKS[self.bugs[name]]
        numbers = range(self.runs)
        recorded = RECORDED.get(f"{self.world}/{name}")
        tried = [*([recorded] if start == "recorded" and recorded in numbers else []), *numbers]
        return next((n for n in tried if checker in self._broken(n)), None)

    def _broken(self, number: int) -> set[str]:
        return {violation.checker for violation in _run(self.plan(number), self.world).violations}


KERNEL = BugFamily("kernel", PLANTED)
CHAT = BugFamily("chat", PLANTED_IN_CHAT)
SENTINELS = BugFamily("sentinels", PLANTED_IN_SENTINELS)
NODES = BugFamily("nodes", PLANTED_IN_NODES)
BETWEEN_HUBS = BugFamily("hubs", PLANTED_BETWEEN_HUBS)
DELIVERY = BugFamily("gateway", PLANTED_IN_DELIVERY)
MQTT = BugFamily("mqtt", PLANTED_IN_MQTT)
JOURNAL = BugFamily("journal", PLANTED_IN_JOURNAL)
TOWER = BugFamily("tower", PLANTED_IN_TOWER)
FAMILIES: Final = (KERNEL, JOURNAL, CHAT, TOWER, SENTINELS, NODES, BETWEEN_HUBS, DELIVERY, MQTT)
BUGS: Final = [(family, name) for family in FAMILIES for name in family.bugs]


def record(worlds: Collection[str]) -> None:
    """Search for every bug in these worlds from the first run, and keep what was found."""
    hush()
    found = {name: n for name, n in RECORDED.items() if name.split("/")[0] not in worlds}
    for family in FAMILIES:
        for name, bug in family.bugs.items() if family.world in worlds else ():
            with pytest.MonkeyPatch.context() as patch:
                bug(patch)
                number = family.noticed(name, "first")
            if number is not None:
                found[f"{family.world}/{name}"] = number
                NOTICED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:] or [family.world for family in FAMILIES])
