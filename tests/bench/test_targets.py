"""Targets are data: each names a question, a figure and one bound."""

from __future__ import annotations

import pytest
from bench.__main__ import QUESTIONS
from bench.document import ORDER
from bench.targets import TARGETS, Target, target_of


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.question}: {t.figure}, {t.of}")
def test_a_target_has_one_bound_and_belongs_to_a_question(target: Target) -> None:
    assert target.question in QUESTIONS
    assert (target.at_least is None) != (target.at_most is None)
    assert bool(target.of) != bool(target.unit)
    assert target_of(target.question, target.figure, target.of) == target


def test_the_documents_show_every_question() -> None:
    assert set(ORDER) == set(QUESTIONS)


def test_a_ratio_or_the_figure_itself_is_judged() -> None:
    fast = Target("gateway", "duly", "durable relay", at_least=0.7)
    assert fast.holds(9_000, 0.7)
    assert not fast.holds(9_000, 0.69)
    assert fast.holds(9_000, None) is None
    soon = Target("restart", "ready", at_most=3, unit="s")
    assert soon.holds(3.0, None)
    assert not soon.holds(3.1, 0.5)
    assert (str(fast), str(soon)) == ("≥ 0.7 ×", "≤ 3 s")
