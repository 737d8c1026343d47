"""A timeline has every step once, in order."""

from __future__ import annotations

from duly.runtime.timeline import TimelineStep, timeline_of
from duly.runtime.trail import Hop


def test_steps_stand_in_the_order_in_which_they_happened() -> None:
    steps = timeline_of(
        "done",
        made=90,
        accepted_at=100,
        moved_at=130,
        reason="",
        hops=[
            Hop(100, "fresh"),
            Hop(100, "sent", 1),
            Hop(120, "sent", 2),
            Hop(130, "done"),
            Hop(150, "duplicate"),
        ],
        refusals=[(95, "offline", "lock is offline")],
    )
    assert steps == [
        TimelineStep(90, "made"),
        TimelineStep(95, "refused", detail="offline: lock is offline"),
        TimelineStep(100, "stored"),
        TimelineStep(100, "fresh"),
        TimelineStep(100, "sent", 1),
        TimelineStep(120, "sent", 2),
        TimelineStep(130, "done"),
        TimelineStep(130, "told", detail="done"),
        TimelineStep(150, "duplicate"),
    ]


def test_the_end_is_there_once_with_its_reason_also_without_a_trail() -> None:
    for hops in ([], [Hop(21, "failed", detail="why", hub="a")]):
        _, end, *told = timeline_of("failed", made=0, accepted_at=10, moved_at=20, reason="why", hops=hops)
        assert end == TimelineStep(20, "failed", detail="why")
        assert told == [TimelineStep(21, "told", detail="failed", hub="a")][: len(hops)]


def test_an_unknown_outcome_that_was_settled_is_both() -> None:
    hops = [Hop(20, "unknown", detail="no answer"), Hop(40, "done")]
    steps = timeline_of("done", made=0, accepted_at=10, moved_at=40, reason="settled by hand", hops=hops)
    assert steps[1:] == [
        TimelineStep(20, "unknown", detail="no answer"),
        TimelineStep(20, "told", detail="unknown"),
        TimelineStep(40, "done", detail="settled by hand"),
        TimelineStep(40, "told", detail="done"),
    ]


def test_an_unknown_outcome_of_which_its_sender_was_not_told_says_so() -> None:
    hops = [Hop(20, "unknown", detail="no answer", hub="b", untold=True)]
    elsewhere = [Hop(21, "unknown", detail="heard from another hub", hub="a")]
    for more, told in (
        ([], TimelineStep(20, "not told", detail="unknown", hub="b")),
        (elsewhere, TimelineStep(21, "told", detail="unknown", hub="a")),
    ):
        steps = timeline_of(
            "done", made=0, accepted_at=10, moved_at=40, reason="", hops=[*hops, *more, Hop(40, "done")]
        )
        assert steps[1:3] == [TimelineStep(20, "unknown", detail="no answer", hub="b"), told]


def test_a_sender_that_was_gone_before_the_verdict_was_not_told() -> None:
    steps = timeline_of(
        "sent",
        made=0,
        accepted_at=10,
        moved_at=11,
        reason="",
        hops=[
            Hop(9, "offline", detail="lock is offline", untold=True),
            Hop(11, "fresh", untold=True),
            Hop(20, "duplicate", untold=True),
        ],
        refusals=[(9, "offline", "lock is offline")],
    )
    assert steps == [
        TimelineStep(9, "refused", detail="offline: lock is offline"),
        TimelineStep(10, "stored"),
        TimelineStep(11, "not told", detail="accepted"),
        TimelineStep(20, "not told", detail="duplicate"),
    ]


def test_what_has_not_ended_has_no_end() -> None:
    steps = timeline_of("sent", made=0, accepted_at=10, moved_at=11, reason="", hops=[Hop(11, "sent", 1)])
    assert [step.what for step in steps] == ["stored", "sent"]


def test_a_sender_that_was_not_there_was_not_told_unless_another_hub_told_it() -> None:
    def last(*hops: Hop) -> list[TimelineStep]:
        return timeline_of("done", made=0, accepted_at=10, moved_at=20, reason="", hops=hops)[2:]

    away = Hop(21, "done", hub="a", untold=True)
    assert last(away) == [TimelineStep(21, "not told", detail="done", hub="a")]
    assert last(away, Hop(22, "done", hub="b")) == [TimelineStep(22, "told", detail="done", hub="b")]
    assert last(away, Hop(22, "done", hub="b", untold=True)) == [
        TimelineStep(22, "not told", detail="done", hub="b")
    ]
    again = [Hop(30, "duplicate")]
    assert [step.what for step in last(away, *again)] == ["not told", "duplicate"]


def test_a_refusal_and_the_moment_at_which_its_sender_was_told_of_it_are_one_step() -> None:
    refusals = [(50, "offline", "lock is offline"), (5_000, "offline", "lock is offline")]
    hops = [Hop(51, "offline", detail="lock is offline"), Hop(9_000, "fresh")]
    steps = timeline_of(
        "sent", made=0, accepted_at=9_000, moved_at=9_000, reason="", hops=hops, refusals=refusals
    )
    assert steps == [
        TimelineStep(51, "offline", detail="lock is offline"),
        TimelineStep(5_000, "refused", detail="offline: lock is offline"),  # of this the trail has no hop
        TimelineStep(9_000, "stored"),
        TimelineStep(9_000, "fresh"),
    ]
