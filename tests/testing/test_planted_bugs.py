"""The checkers find every bug that is planted, each by the promise it breaks."""

from __future__ import annotations

import pytest

from duly.testing.sim.runner import checkers_of
from tests.proof import count
from tests.testing.planting import BREAKS
from tests.testing.searching import BUGS, FAMILIES, START, BugFamily


@START
@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*bug, id=f"{bug[0].world}-{bug[1]}") for bug in BUGS]
)
def test_a_planted_bug_is_caught_within_200_runs(
    family: BugFamily, name: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.bugs[name](monkeypatch)
    noticed = family.noticed(name, start)
    assert noticed is not None, f"{BREAKS[family.bugs[name]]} did not notice it"
    count("planted bugs", 1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.world)
def test_a_bug_names_a_checker_of_its_world(family: BugFamily) -> None:
    named = {BREAKS[bug] for bug in family.bugs.values()}
    assert named <= set(checkers_of(family.world))


def test_there_are_many_bugs() -> None:
    assert len(BUGS) >= 95
