"""The timeline of a message: the records of the ledger and the trail about it, in one order.

The dashboard, `duly trace` and `duly why` show the same timeline, which is built here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from duly.runtime.trail import Hop

MADE: Final = "made"
STORED: Final = "stored"
REFUSED: Final = "refused"
TOLD: Final = "told"
NOT_TOLD: Final = "not told"
_EARLY: Final = ("fresh", "sent")
"""Hops that come before an end in the same millisecond."""
TELLING_MS: Final = 1_000
"""A sender is told of a refusal within so many milliseconds."""
_OPEN: Final = ("accepted", "sent", "delivered")


class TimelineStep(Struct, frozen=True, gc=False, omit_defaults=True):
    """One step: its time (ms), what happened, the attempt, why or to whom, and the hub if there are several.

    `what` is the word of a hop, the state in which the message ended, or one of `made` (by the clock of its
    sender), `stored`, `refused` (under the same id; `detail` begins with the word), `told` (its sender got
    the outcome) and `not told` (its sender was not connected).
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
    told, or was not connected. A hub to which its sender is not connected matters only if no other hub told
    it.
    """
    hops = list(hops)
    told = any(hop.what == state and not hop.untold for hop in hops)
    steps = [(made, -1, TimelineStep(made, MADE))] if made else []
    steps.append((accepted_at, 0, TimelineStep(accepted_at, STORED)))
    for hop in hops:
        if hop.what == state and state not in _OPEN:
            if told and hop.untold:
                continue
            what = NOT_TOLD if hop.untold else TOLD
            steps.append((hop.time, 3, TimelineStep(hop.time, what, detail=state, hub=hop.hub)))
        else:
            rank = 1 if hop.what in _EARLY else 3
            steps.append((hop.time, rank, TimelineStep(hop.time, hop.what, hop.attempt, hop.detail, hop.hub)))
    if state not in _OPEN:
        steps.append((moved_at, 2, TimelineStep(moved_at, state, detail=reason)))
    for at, word, why in refusals:
        if any(_is_of(hop, at, word, why) for hop in hops):
            continue
        steps.append((at, 3, TimelineStep(at, REFUSED, detail=f"{word}: {why}")))
    return [step for _, _, step in sorted(steps, key=lambda one: one[:2])]


def _is_of(hop: Hop, at: int, word: str, why: str) -> bool:
    """Whether a hop is the moment at which a sender was told of a refusal."""
    return (hop.what, hop.detail) == (word, why) and 0 <= hop.time - at <= TELLING_MS
