from __future__ import annotations

import pytest

from duly.core.acl import LETTERS, STATUS, AccountClass, Act, allowed, covers, decide
from duly.wire.fd import FdKind

P, S = Act.PUBLISH, Act.SUBSCRIBE

MATRIX = [
    # the FD document, in its own order
    *[(S, f"nodes/me/{kind}", True) for kind in LETTERS],
    *[(S, f"nodes/you/{kind}", False) for kind in LETTERS],
    *[(P, f"nodes/{who}/{kind}", True) for who in ("me", "you") for kind in LETTERS],
    (P, "nodes/me/status", True),
    (P, "nodes/you/status", False),
    (S, "nodes/me/status", True),
    (S, "nodes/you/status", True),
    (S, "nodes/+/status", True),
    # and all the rest
    (S, "#", False),
    (S, "+/+/+", False),
    (S, "nodes/#", False),
    (S, "nodes/me/#", False),
    (S, "nodes/me/+", False),
    (S, "nodes/+/pending", False),
    (S, "nodes/+/+", False),
    (S, "+/me/pending", False),
    (S, "nodes/+/status/#", False),
    (S, "$share/g/nodes/you/pending", False),
    (S, "$SYS/#", False),
    (P, "nodes/you", False),
    (P, "nodes/you/other", False),
    (P, "nodes/you/pending/deeper", False),
    (P, "nodes//pending", True),  # an empty name is a name to a broker; nobody listens there
    (P, "other/you/pending", False),
    (P, "anything", False),
    (P, "", False),
]


@pytest.mark.parametrize(("act", "topic", "may"), MATRIX, ids=lambda v: getattr(v, "value", str(v)))
def test_a_node_may_what_the_seed_says_and_no_more(act: Act, topic: str, may: bool) -> None:
    decision = decide(act, "me", topic, "nodes")
    assert bool(decision) is may
    assert bool(decision.reason) is not may, "a denial says why"


def test_a_denial_names_the_one_whose_topic_it_is() -> None:
    assert decide(P, "me", "nodes/you/status", "nodes").reason == (
        "me may not publish to nodes/you/status: status is you's own"
    )
    assert "nothing is for nodes there" in decide(P, "me", "x", "nodes").reason


def test_the_prefix_may_have_several_levels() -> None:
    assert decide(P, "me", "plant/7/you/pending", "plant/7")
    assert not decide(P, "me", "plant/8/you/pending", "plant/7")
    assert allowed(S, "me", "plant/7")[0] == "plant/7/me/pending"


def test_the_kinds_are_those_of_the_dialect() -> None:
    assert {*LETTERS, STATUS} == {kind.value for kind in FdKind}


@pytest.mark.parametrize(
    ("wide", "narrow", "does"),
    [
        ("a/b", "a/b", True),
        ("a/+", "a/b", True),
        ("a/+", "a/+", True),
        ("a/b", "a/+", False),
        ("a/+", "a/b/c", False),
        ("a/+", "a", False),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("a/#", "a/+/c", True),
        ("a/+/c", "a/#", False),
        ("#", "a/#", True),
        ("+/b", "$SYS/b", False),
        ("#", "$SYS/b", False),
        ("$SYS/#", "$SYS/b", True),
    ],
)
def test_a_filter_covers_another(wide: str, narrow: str, does: bool) -> None:
    assert covers(wide, narrow) is does


@pytest.mark.parametrize(
    ("of", "peers", "act", "topic", "reason"),
    [
        (AccountClass.DEVICE, None, P, "nodes/you/pending", "a device is commanded by the hub alone"),
        (AccountClass.DEVICE, None, P, "nodes/you/complete", "a device is commanded by the hub alone"),
        (AccountClass.DEVICE, None, S, "nodes/you/pending", "pending is you's own"),
        (AccountClass.NODE, ("me", "you"), P, "nodes/lock/pending", "lock is not a node"),
        (AccountClass.NODE, ("me", "you"), P, "nodes/hub/complete", "hub is not a node"),
        (AccountClass.HUB, None, S, "nodes/you/pending", "pending is you's own"),
        (AccountClass.HUB, None, P, "nodes/you/complete", "complete is you's own"),
    ],
)
def test_a_denial_says_what_the_class_of_the_account_may_not(
    of: AccountClass, peers: tuple[str, ...] | None, act: Act, topic: str, reason: str
) -> None:
    assert reason in decide(act, "me", topic, "nodes", of, peers).reason


def test_a_device_answers_the_hub_and_the_hub_commands_devices() -> None:
    assert decide(P, "lamp", "nodes/hub/complete", "nodes", AccountClass.DEVICE)
    assert decide(P, "hub", "nodes/lamp/pending", "nodes", AccountClass.HUB)
    assert decide(S, "hub", "nodes/hub/complete", "nodes", AccountClass.HUB)
    assert decide(P, "me", "nodes/you/pending", "nodes", AccountClass.NODE, ("me", "you"))
