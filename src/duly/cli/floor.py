"""`duly floor`: the time before which the ledger may have forgotten ids, and its repair after a wrong clock.

The law: a repair never lets a message run twice by itself. A message made before the repair stays stale if
its id may have been forgotten; only `--all` gives that up, and says so.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from duly.cli.common import CommandFailed, Exit, JsonObject, clock, note, print_json, say
from duly.cli.options import Json, LedgerOptions, grouped
from duly.core import units

NEVER: Final = 365 * units.DAY // units.MS
"""The floor of a new ledger counts from 1970; one below this has not followed the clock yet."""


@grouped
def floor(
    mend: Annotated[
        bool, typer.Option("--mend", help="Set a floor that is in the future back to now.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="With --mend: accept older messages again, too; they may run twice."),
    ] = False,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show the floor: ids from before it may be forgotten, so older messages are stale.

    A clock that was wrong for hours can have raised the floor into the future, and then every message is
    stale. Correct the clock first, then use --mend: messages made from then on are accepted. Older ones stay
    stale, since the ledger no longer knows which of them have run. What was accepted while the clock was
    wrong can supersede every later message of its sender until that time comes; --mend ends that, too.
    """
    if everything and not mend:
        raise CommandFailed(Exit.USAGE, "use --all only with --mend")
    wanted = ({"mend": "yes"} if mend else {}) | ({"all": "yes"} if everything else {})
    found = at.ask("floor", wanted, lambda: _in_ledger(wanted, at), reads=not mend)
    if json:
        print_json(found)
        return
    _note_restore(found)
    if found["lanes"]:
        say(f"set back to now: the order of {found['lanes']} senders, which a wrong clock had moved ahead")
    if found.get("lanes_ahead"):
        from duly.server.floor_watch import senders_ahead

        say(senders_ahead(found["lanes_ahead"]))
    if found["floor"] < NEVER:
        ledger = "has forgotten nothing since it was restored"
        if not found["restored"]:
            ledger = "is new and has forgotten nothing"
        say(f"the floor has not risen yet: this ledger {ledger}")
        note("it rises when the clock has been right for an hour")
        return
    say(f"the floor is at {clock(found['floor'])}, the clock shows {clock(found['now'])}")
    lag = found["now"] - (found["trusted"] or found["now"])
    if found["ahead"]:
        note(f"that is {_length(found['ahead'])} in the future: a clock was wrong; 'duly floor --mend'")
    elif lag > units.MINUTE // units.MS:
        note(f"it is {_length(lag)} behind: it follows when the clock has been right for an hour")
    if found["barrier"]:
        note(
            f"it was mended at {clock(found['mended'])}: what was made before is stale until "
            f"{clock(found['barrier'])}, since its id may have been forgotten"
        )


def _note_restore(found: JsonObject) -> None:
    if found["restored"]:
        note(
            f"this ledger was restored: what was made before {clock(found['restored'])} and is not in it is "
            "stale, since it may have run; '--mend --all' accepts it"
        )


def _length(ms: int) -> str:
    return units.show(ms * units.MS)


async def _in_ledger(wanted: dict[str, str], at: LedgerOptions) -> JsonObject:
    from duly.server.floor_watch import FloorWatch

    async with await at.open(reads="mend" not in wanted) as book:
        return await FloorWatch(book).administer(wanted)
