"""The scripts for receivers, as data: those of devices and nodes alike, and those of each alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from duly.testing.conform.steps import (
    Cut,
    Deliver,
    Effects,
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
    Step,
)

FORGETS_AFTER: Final = 130
"""Commands after which a memory of a hundred has forgotten the first."""


def _killed_at_the_answer(*names: str) -> Iterator[Step]:
    """Kill the program in the moment in which it answers, and ask again."""
    for name in names:
        yield from (Deliver(name), Kill(at=name), Deliver(name), ExpectAnswer(name, same=True))


def _killed_at_work(*moments: float) -> Iterator[Step]:
    """Kill the program so many seconds after a command was sent, and ask again twice."""
    for number, seconds in enumerate(moments):
        name = f"command {number}"
        yield from (Deliver(name), Pause(seconds), Kill(), Deliver(name), Pause(0.2), Deliver(name))


_BOTH: Final = (
    Script("connects", (Cut(), Deliver("a"), ExpectAnswer("a"), Cut(), Deliver("b"), ExpectAnswer("b"))),
    Script("answers", (Deliver("a"), ExpectAnswer("a"), Deliver("b"), ExpectAnswer("b"), Effects(2))),
    Script("runs-once", (Deliver("a", times=3), ExpectAnswer("a"), Deliver("a", times=2), Effects(1))),
    Script(
        "repeats-the-answer",
        (
            Deliver("a"),
            ExpectAnswer("a"),
            Deliver("b"),
            ExpectAnswer("b"),
            Deliver("a"),
            ExpectAnswer("a", same=True),
        ),
    ),
    Script(
        "keys-by-sender",
        (
            Deliver("a"),
            ExpectAnswer("a"),
            Deliver("b", sender="tablet", like="a"),
            ExpectAnswer("b"),
            Effects(2),
        ),
    ),
    Script(
        "refuses-conflicts",
        (Deliver("a"), ExpectAnswer("a"), Deliver("b", like="a", other_content=True), Effects(1)),
    ),
    Script(
        "remembers-over-cuts",
        (
            Deliver("a"),
            ExpectAnswer("a"),
            Cut(),
            Deliver("a", times=2),
            ExpectAnswer("a", same=True),
            Effects(1),
        ),
    ),
    Script(
        "remembers-over-restarts",
        (
            Deliver("a"),
            ExpectAnswer("a"),
            Pause(0.5),
            Kill(),
            Deliver("a"),
            ExpectAnswer("a", same=True),
            Effects(1),
        ),
    ),
    Script("stores-before-it-answers", (*_killed_at_the_answer("a", "b", "c"), Effects(3))),
    Script("runs-once-over-kills", (*_killed_at_work(0.0, 0.02, 0.05), Effects(3, or_fewer=True))),
    Script(
        "never-runs-the-forgotten",
        (
            Deliver("a", sender="traveller", age=3_600),
            ExpectAnswer("a"),
            Flood(FORGETS_AFTER),
            Deliver("a"),
            Effects(1),
            Cut(),
            Deliver("a", times=2),
            Effects(1),
        ),
    ),
    Script("minds-expiry", (Deliver("a", expired=True), NotDone("a"), Effects(0))),
    Script(
        "names-the-unknown", (Deliver("a", unknown_type=True), ExpectAnswer("a", how="not done"), Effects(0))
    ),
    Script("survives-nonsense", (Nonsense(), Deliver("a"), ExpectAnswer("a"), Effects(1))),
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
            Deliver("first", lane="door"),
            ExpectAnswer("first"),
            Reserve(("second", "third")),
            Deliver("third", lane="door"),
            Pause(0.05),
            Deliver("second", lane="door"),
            ExpectAnswer("third", how="either"),
            ExpectAnswer("second", how="either"),
            InOrder(("second", "third")),
        ),
    ),
    Script("answers-pings", (Inspect(),)),
    Script("keeps-pushes", (Inspect(),)),
    *_OVER_MQTT,
)
NODE_SCRIPTS: Final = (
    *_BOTH,
    *_OVER_MQTT,
    Script("minds-the-receiver", (Deliver("a", receiver="another"), NotDone("a", silent=True), Effects(0))),
    Script("minds-old-tasks", (Deliver("a", days_old=3), NotDone("a", silent=True), Effects(0))),
    Script(
        "answers-in-kind",
        (
            Deliver("a", sender="reader", plain_json=True),
            ExpectAnswer("a"),
            InKind("a"),
            Deliver("b", sender="elder", old_names=True),
            ExpectAnswer("b"),
            InKind("b"),
        ),
    ),
)
