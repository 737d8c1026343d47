"""The timeline of a message: what its ledger and the trail know of it, in one order.

The page, `duly trace` and `duly why` show the same timeline: it is put together here and nowhere else.
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
_OPEN: Final = ("accepted", "sent", "delivered")


class TimelineStep(Struct, frozen=True, gc=False, omit_defaults=True):
    """One step: when (ms), what, in which attempt, why or to whom, and at which hub if there are several.

    `what` is the word of a hop, the state in which the message ended, or one of `made` (by the clock of its
    sender), `stored`, `refused` (under the same id; `detail` begins with the word), `told` (its sender was
    told how it ended) and `not told` (it was not there to be told)."""

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
    """The steps of a message in the order in which they happened. `made` is 0 if its id does not say when;
    `reason` is that of its end; `refusals` are (when, word, reason) of what was refused under its id.

    The end is the one in the ledger; the hop that says the same is the moment at which its sender was told,
    or was not there to be told. A hub that its sender is not at matters only if no other hub told it.
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
        steps.append((at, 3, TimelineStep(at, REFUSED, detail=f"{word}: {why}")))
    return [step for _, _, step in sorted(steps, key=lambda one: one[:2])]
