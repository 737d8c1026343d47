"""`duly floor`: up to when the ledger may have forgotten ids; and taking it back if a clock was wrong.

The law: mending never lets a message run twice by itself. What was made before the mending stays stale if its
id may have been forgotten; only `--all` gives that up, and says so.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from duly.cli.common import (
    CommandFailed,
    Data,
    Exit,
    HubUnreachable,
    Json,
    LedgerUrl,
    Token,
    Url,
    clock,
    find_hub,
    note,
    open_to_read,
    print_json,
    say,
    settings_of,
)
from duly.core import units


def floor(
    mend: Annotated[
        bool, typer.Option("--mend", help="Take a floor that lies in the future back to now.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="With --mend: older messages are fresh again, too, and may run twice."),
    ] = False,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show up to when ids may have been forgotten; what could only be accepted before is stale.

    A clock that was wrong for hours can have raised it into the future, and then everything is stale. Set the
    clock right first, then mend it: messages that are made from then on are accepted. Those that are older
    stay stale, since the ledger no longer knows which of them have run.
    """
    if everything and not mend:
        raise CommandFailed(Exit.USAGE, "--all goes with --mend")
    wanted = ({"mend": "yes"} if mend else {}) | ({"all": "yes"} if everything else {})
    found = _ask(wanted, data, ledger, url, token)
    if json:
        print_json(found)
        return
    say(f"the floor is at {clock(found['floor'])}, the clock shows {clock(found['now'])}")
    lag = found["now"] - found["trusted"]
    if found["ahead"]:
        note(f"that is {_length(found['ahead'])} in the future: a clock was wrong; 'duly floor --mend'")
    elif lag > units.MINUTE // units.MS:
        note(f"it is {_length(lag)} behind: it follows when the clock has been right for an hour")
    if found["barrier"]:
        note(
            f"it was mended at {clock(found['mended'])}: what was made before is stale until "
            f"{clock(found['barrier'])}, since its id may have been forgotten"
        )


def _length(ms: int) -> str:
    return units.show(ms * units.MS)


def _ask(
    wanted: dict[str, str], data: str | None, ledger: str | None, url: str | None, token: str | None
) -> dict[str, Any]:
    hub = None if ledger is not None else find_hub(data, url, token)
    if hub is not None:
        try:
            answer: dict[str, Any] = hub.ask("/v1/admin/floor", wanted)
            return answer
        except HubUnreachable:
            if not hub.local:
                raise  # its note may be of one that was killed: the ledger knows
    return asyncio.run(_in_ledger(wanted, data, ledger))


async def _in_ledger(wanted: dict[str, str], data: str | None, ledger: str | None) -> dict[str, Any]:
    from duly.server.floor_watch import FloorWatch
    from duly.storage import open_ledger

    mend = "mend" in wanted
    opening = open_ledger(settings_of(data, ledger).ledger_url) if mend else open_to_read(data, ledger)
    async with await opening as book:
        return await FloorWatch(book).administer(wanted)
