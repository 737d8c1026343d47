"""The scripts for receivers, as data: those of devices and nodes alike, and those of each alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from duly.testing.conform.steps import (
    AtWork,
    ConformStep,
    CountEffects,
    Cut,
    DeliverTask,
    ExpectAnswer,
    Flood,
    InKind,
    InOrder,
    Inspect,
    Kill,
    Nonsense,
    NotDone,
    Pause,
    Reserve,
    Script,
)


def _killed_at_the_answer(*names: str) -> Iterator[ConformStep]:
    """Return steps that kill the program at the moment in which it answers, and ask again."""
    for name in names:
        yield from (DeliverTask(name), Kill(at=name), DeliverTask(name), ExpectAnswer(name, same=True))


def _killed_at_work(*moments: Pause | AtWork) -> Iterator[ConformStep]:
    """Return steps that kill the program at these moments after a command was sent, and ask again twice."""
    for number, moment in enumerate(moments):
        name = f"command {number}"
        yield from (
            DeliverTask(name),
            moment,
            Kill(),
            DeliverTask(name),
            Pause(0.2),
            DeliverTask(name),
        )


_BOTH: Final = (
    Script(
        "connects",
        (
            Cut(),
            DeliverTask("a"),
            ExpectAnswer("a", proves=True),
            Cut(),
            DeliverTask("b"),
            ExpectAnswer("b", proves=True),
        ),
    ),
    Script(
        "answers",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            DeliverTask("b", bare=True),
            ExpectAnswer("b"),
            CountEffects(2),
        ),
    ),
    Script(
        "runs-once",
        (DeliverTask("a", times=3), ExpectAnswer("a"), DeliverTask("a", times=2), CountEffects(1)),
    ),
    Script(
        "repeats-the-answer",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            DeliverTask("b"),
            ExpectAnswer("b"),
            DeliverTask("a"),
            ExpectAnswer("a", same=True),
        ),
    ),
    Script(
        "keys-by-sender",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            DeliverTask("b", sender="tablet", like="a"),
            ExpectAnswer("b", proves=True),
            CountEffects(2),
        ),
    ),
    Script(
        "refuses-conflicts",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            DeliverTask("b", like="a", other_content=True),
            CountEffects(1),
        ),
    ),
    Script(
        "remembers-over-cuts",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            Cut(),
            DeliverTask("a", times=2),
            ExpectAnswer("a", same=True),
            CountEffects(1),
        ),
    ),
    Script(
        "remembers-over-restarts",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            Pause(0.5),
            Kill(),
            DeliverTask("a"),
            ExpectAnswer("a", same=True),
            CountEffects(1),
        ),
    ),
    Script("stores-before-it-answers", (*_killed_at_the_answer("a", "b", "c"), CountEffects(3))),
    Script(
        "runs-once-over-kills",
        (
            *_killed_at_work(
                Pause(0.0), Pause(0.02), Pause(0.05), AtWork(0.3), AtWork(0.5), AtWork(0.7), AtWork(0.9)
            ),
            CountEffects(7, or_fewer=True),
        ),
    ),
    Script(
        "never-runs-the-forgotten",
        (
            Reserve(("earlier", "later"), sender="traveller", age=3_600),
            DeliverTask("later", sender="traveller", unordered=True),
            ExpectAnswer("later"),
            DeliverTask("earlier", sender="traveller", unordered=True),
            ExpectAnswer("earlier"),
            Flood("earlier"),
            DeliverTask("later"),
            DeliverTask("earlier"),
            CountEffects(2),
            Cut(),
            DeliverTask("later", times=2),
            DeliverTask("earlier"),
            CountEffects(2),
            Kill(if_possible=True),
            DeliverTask("later"),
            DeliverTask("earlier"),
            CountEffects(2),
            DeliverTask("next", sender="traveller"),
            ExpectAnswer("next", proves=True),
        ),
    ),
    Script("minds-expiry", (DeliverTask("a", expired=True), NotDone("a"), CountEffects(0))),
    Script(
        "names-the-unknown",
        (
            DeliverTask("a", unknown_type=True),
            ExpectAnswer("a", how="not done", proves=True),
            CountEffects(0),
        ),
    ),
    Script(
        "survives-nonsense",
        (Nonsense(), DeliverTask("a", own_fields=True), ExpectAnswer("a", proves=True), CountEffects(1)),
    ),
)
_OVER_MQTT: Final = (
    Script("keeps-its-session", (Inspect(),)),
    Script("reports-status", (Inspect(),)),
    Script("confirms-receipt", (Inspect(),)),
)

DEVICE_SCRIPTS: Final = (
    *_BOTH,
    Script(
        "keeps-order",
        (
            DeliverTask("first", lane="door"),
            ExpectAnswer("first"),
            Reserve(("second", "third")),
            DeliverTask("third", lane="door"),
            Pause(0.05),
            DeliverTask("second", lane="door"),
            ExpectAnswer("third", how="either", proves=True),
            ExpectAnswer("second", how="either", proves=True),
            InOrder(("second", "third")),
            Reserve(("never comes", "after a gap")),
            DeliverTask("after a gap", lane="door"),
            ExpectAnswer("after a gap", proves=True),
            Reserve(("early", "late")),
            DeliverTask("late", unordered=True),
            ExpectAnswer("late", proves=True),
            DeliverTask("early", unordered=True),
            ExpectAnswer("early", proves=True),
        ),
    ),
    Script("answers-pings", (Inspect(),)),
    Script("keeps-pushes", (Inspect(),)),
    *_OVER_MQTT,
)
NODE_SCRIPTS: Final = (
    *(script for script in _BOTH if script.rule != "refuses-conflicts"),
    *_OVER_MQTT,
    Script(  # a hub does not pass a conflict on to a device, but the sender of a node gets the node's answer
        "refuses-conflicts",
        (
            DeliverTask("a"),
            ExpectAnswer("a"),
            DeliverTask("b", like="a", other_content=True),
            NotDone("b"),
            CountEffects(1),
        ),
    ),
    Script(
        "minds-the-receiver",
        (DeliverTask("a", receiver="another"), NotDone("a", silent=True), CountEffects(0)),
    ),
    Script(
        "minds-old-tasks",
        (
            DeliverTask("a", days_old=3),
            NotDone("a", silent=True),
            CountEffects(0),
            DeliverTask("b", undated=True),
            ExpectAnswer("b", proves=True),
        ),
    ),
    Script(
        "answers-in-kind",
        (
            DeliverTask("a", sender="reader", plain_json=True),
            ExpectAnswer("a", proves=True),
            InKind("a"),
            DeliverTask("b", sender="elder", old_names=True),
            ExpectAnswer("b", proves=True),
            InKind("b"),
        ),
    ),
    Script("resends", (Inspect(),)),
    Script("takes-the-first-end", (Inspect(),)),
)
