"""The budget of ids that are kept for long: bounded per sender, and free again when they are forgotten."""

from __future__ import annotations

import msgspec

from duly.core.id_budget import IdBudget


def test_each_sender_has_a_budget_of_its_own() -> None:
    budget = IdBudget({}, limit=2)
    assert [budget.afford("A", until=50, now=1) for _ in range(3)] == [True, True, False]
    assert budget.afford("B", until=50, now=1)


def test_a_budget_is_whole_again_when_the_last_id_is_forgotten() -> None:
    budget = IdBudget({}, limit=1)
    assert budget.afford("A", until=50, now=1)
    assert not budget.afford("A", until=60, now=49)
    assert budget.afford("A", until=60, now=50)


def test_what_changed_is_saved_once_and_survives_a_restart() -> None:
    budget = IdBudget({}, limit=2)
    budget.afford("A", until=50, now=1)
    budget.afford("A", until=40, now=1)
    saved = budget.save("budget")
    assert [(item.bucket, item.name) for item in saved] == [("budget", "A")]
    assert msgspec.json.decode(saved[0].body) == [2, 50]
    assert budget.save("budget") == []
    again = IdBudget({item.name: item.body for item in saved}, limit=2)
    assert not again.afford("A", until=50, now=2)
