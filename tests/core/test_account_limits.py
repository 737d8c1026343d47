"""What one account may send and store: bounded, told when to come back, and no other account's trouble."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.account_limits import MB, AccountLimit, AccountLimits, LimitPolicy
from duly.core.units import DAY, MINUTE
from duly.errors import Malformed, RateLimited


def takes(limit: AccountLimit, name: str, size: int, now: int) -> bool:
    try:
        limit.take(name, size, now)
    except RateLimited as refusal:
        return refusal.wait <= 0
    return True


@pytest.mark.parametrize("wrong", [{"commands": -1}, {"alerts": -1}, {"stored_mb": -1}, {"groups": -1}])
def test_a_limit_below_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Malformed):
        LimitPolicy(**wrong)


@pytest.mark.parametrize("kind", ["commands", "lines", "pushes", "alerts"])
def test_each_kind_has_a_limit_of_its_own(kind: str) -> None:
    limits = AccountLimits(LimitPolicy(commands=2, lines=2, pushes=2, alerts=2))
    limit: AccountLimit = getattr(limits, kind)
    assert [takes(limit, "ann", 10, 0) for _ in range(3)] == [True, True, False]
    assert [one.refused for one in limits if one is not limit] == [0, 0, 0, 0]
    assert takes(limit, "ann", 10, MINUTE)


def test_new_groups_are_counted_by_the_day() -> None:
    groups = AccountLimits(LimitPolicy(groups=2)).groups
    assert [takes(groups, "ann", 0, 0) for _ in range(3)] == [True, True, False]
    assert not takes(groups, "ann", 0, MINUTE)
    assert takes(groups, "ann", 0, DAY // 2)
    with pytest.raises(RateLimited, match=r"ann may make 2 groups a day \(groups_per_day\)"):
        groups.take("ann", 0, DAY // 2)


def test_no_limit_is_no_limit() -> None:
    policy = LimitPolicy(commands=0, lines=0, pushes=0, alerts=0, stored_mb=0, groups=0)
    assert all(takes(limit, "ann", 10 * MB, 0) for limit in AccountLimits(policy) for _ in range(1_000))


def test_all_kinds_share_the_bytes_of_a_day() -> None:
    limits = AccountLimits(LimitPolicy(stored_mb=1))
    assert takes(limits.commands, "ann", MB // 2, 0)
    assert takes(limits.lines, "ann", MB // 4, 0)
    assert not takes(limits.pushes, "ann", MB // 2, 0)
    assert takes(limits.pushes, "ann", MB // 2, DAY)
    assert limits.worst() == [("ann", 1)]


def test_what_does_not_fit_in_bytes_costs_no_message() -> None:
    limits = AccountLimits(LimitPolicy(commands=2, stored_mb=1))
    assert takes(limits.commands, "ann", MB - 1_024, 0)
    assert [takes(limits.commands, "ann", MB // 2, 0) for _ in range(5)] == [False] * 5
    assert takes(limits.commands, "ann", 100, 0)


def test_a_refusal_names_the_setting_and_reads_the_same_each_time() -> None:
    """So that a flood of refusals becomes one row with a count."""
    limits = AccountLimits(LimitPolicy(commands=1, stored_mb=1))
    limits.commands.take("ann", 0, 0)
    said = set()
    for now in range(1, 50):
        with pytest.raises(RateLimited) as refusal:
            limits.commands.take("ann", 0, now)
        said.add(str(refusal.value))
    assert said == {"ann may send 1 commands a minute (commands_per_minute)"}


def test_the_names_that_are_shown_are_bounded() -> None:
    limits = AccountLimits(LimitPolicy(commands=1))
    for n in range(3_000):
        limits.commands.take(f"a{n}", 0, 0)
        assert not takes(limits.commands, f"a{n}", 0, 0)
    assert limits.commands.refused == 3_000
    assert len(limits.commands.names) <= 1_000


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ann", "bob"]), st.integers(0, 300_000), st.integers(0, MINUTE)),
        max_size=200,
    )
)
def test_no_account_gets_more_than_its_limits_or_less_for_the_sake_of_another(
    steps: list[tuple[str, int, int]],
) -> None:
    """In any span an account gets at most a full allowance and what refills in it; what is taken of one does
    not depend on the other; and an account that waits as long as it was told is taken."""
    policy = LimitPolicy(commands=5, stored_mb=1)
    both, alone = AccountLimits(policy), {name: AccountLimits(policy) for name in ("ann", "bob")}
    now = 0
    taken: dict[str, list[tuple[int, int]]] = {"ann": [], "bob": []}
    for name, size, later in steps:
        now += later
        took = takes(both.commands, name, size, now)
        assert took == takes(alone[name].commands, name, size, now)
        if took:
            taken[name].append((now, size))
    for rows in taken.values():
        for first, (begin, _) in enumerate(rows):
            for last in range(first, len(rows)):
                passed = rows[last][0] - begin
                assert last - first + 1 <= 5 + passed * 5 // MINUTE + 1
                assert sum(size for _, size in rows[first : last + 1]) <= MB + passed * MB // DAY + MB
    for name in taken:
        try:
            both.commands.take(name, 0, now)
        except RateLimited as refusal:
            both.commands.take(name, 0, now + refusal.wait)
