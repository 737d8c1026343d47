"""The timeline of a message: the records of the ledger and the trail about it, in one order.

The dashboard, `duly trace` and `duly why` show the same timeline, which is built here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from duly.runtime.telemetry import ENDS
from duly.runtime.trail import Hop

MADE: Final = "made"
STORED: Final = "stored"
REFUSED: Final = "refused"
TOLD: Final = "told"
NOT_TOLD: Final = "not told"
_EARLY: Final = ("fresh", "sent")
"""Hops that come before an end in the same millisecond."""
_UNHEARD: Final = {"fresh": "accepted", "duplicate": "duplicate"}
"""Verdicts under which a message is or was taken, as they are shown if the sender was not told."""
TELLING_MS: Final = 1_000
"""A sender is told of a refusal within so many milliseconds."""


class TimelineStep(Struct, frozen=True, gc=False, omit_defaults=True):
    """One step: its time (ms), what happened, the attempt, why or to whom, and the hub if there are several.

    `what` is the word of a hop, the state in which the message ended, or one of `made` (by the clock of its
    sender), `stored`, `refused` (under the same id; `detail` begins with the word), `told` (its sender got
    the outcome) and `not told` (its sender was not connected); their `detail` is the outcome, or `accepted`
    or `duplicate`.
    """

    at: int
    what: str
    attempt: int = 0
    detail: str = ""
    hub: str = ""


def timeline_of(
    state: str,
    *,
    made: int,
    accepted_at: int,
    moved_at: int,
    reason: str,
    hops: Iterable[Hop],
    refusals: Iterable[tuple[int, str, str]] = (),
) -> list[TimelineStep]:
    """Return the steps of a message in order. `made` is 0 if its id has no time; `reason` is that of its
    outcome; `refusals` are (time, word, reason) of what was refused under its id. A refusal that the trail
    also has is one step: the hop.

    The outcome is the one in the ledger; the hop with the same outcome is the moment when its sender was
    told, or was not connected. A hub to which its sender is not connected matters only if no hub told it, and
    then once. An outcome that was settled later is a step as well.
    """
    hops = list(hops)
    steps = [(made, -1, TimelineStep(made, MADE))] if made else []
    steps.append((accepted_at, 0, TimelineStep(accepted_at, STORED)))
    ends = [hop for hop in hops if hop.what in ENDS]
    for what in dict.fromkeys(hop.what for hop in ends):
        steps += _end(what, [hop for hop in ends if hop.what == what], settled=what != state)
    steps += [(hop.time, 1 if hop.what in _EARLY else 3, _step(hop)) for hop in hops if hop.what not in ENDS]
    if state in ENDS:
        steps.append((moved_at, 2, TimelineStep(moved_at, state, detail=reason)))
    for at, word, why in refusals:
        if any(_is_of(hop, at, word, why) for hop in hops):
            continue
        steps.append((at, 3, TimelineStep(at, REFUSED, detail=f"{word}: {why}")))
    return [step for _, _, step in sorted(steps, key=lambda one: one[:2])]


def _end(what: str, hops: list[Hop], *, settled: bool) -> list[tuple[int, int, TimelineStep]]:
    """Return the steps of one outcome, with their times and ranks; that of the ledger itself is not among
    them."""
    first = hops[0]
    steps = [(first.time, 2, TimelineStep(first.time, what, detail=first.detail, hub=first.hub))]
    told = [hop for hop in hops if not hop.untold]
    for hop in told or hops[-1:]:
        word = NOT_TOLD if hop.untold else TOLD
        steps.append((hop.time, 3, TimelineStep(hop.time, word, detail=what, hub=hop.hub)))
    return steps if settled else steps[1:]


def _step(hop: Hop) -> TimelineStep:
    """Return a hop that is not the outcome as a step."""
    if not hop.untold:
        return TimelineStep(hop.time, hop.what, hop.attempt, hop.detail, hop.hub)
    if hop.what in _UNHEARD:
        return TimelineStep(hop.time, NOT_TOLD, detail=_UNHEARD[hop.what], hub=hop.hub)
    why = f"{hop.what}: {hop.detail}" if hop.detail else hop.what
    return TimelineStep(hop.time, REFUSED, detail=why, hub=hop.hub)


def _is_of(hop: Hop, at: int, word: str, why: str) -> bool:
    """Return whether a hop is the moment at which a sender was told of a refusal."""
    return (hop.what, hop.detail) == (word, why) and 0 <= hop.time - at <= TELLING_MS
