"""`duly backup` and `duly restore`: a ledger as one file, and a new ledger from it.

The law: a backup is whole and checked, or there is no file. A restored ledger runs nothing a second time.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from duly.cli.common import CommandFailed, Exit, clock, count, note, print_json, say
from duly.cli.options import Json, StoreOptions, grouped, length
from duly.cli.progress import row_progress
from duly.core import units

BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.", show_default=False)]


@grouped
def backup(
    file: BackupFile,
    with_key: Annotated[
        bool,
        typer.Option(
            "--with-key", help="Include the key of the secrets: the file is then as secret as the key."
        ),
    ] = False,
    *,
    at: StoreOptions,
    json: Json = False,
) -> None:
    """Write a backup of the ledger, also while a hub runs.

    The file is a SQLite ledger, whatever the ledger is; only its owner may read it. It is checked before it
    gets its name. It says which secret key it needs.
    """
    from duly.server.ledger_backups import back_up

    with row_progress("rows") as counted:
        made = asyncio.run(back_up(at.settings, file, with_key=with_key, progress=counted))
    if json:
        print_json({"file": str(file), **_shown(made)})
        return
    rows = sum(table.rows for table in made.tables.values())
    say(f"{file} holds the ledger of {clock(made.at // units.MS)}: {count(rows, 'row')}, checked")
    if made.key_included:
        note(f"it includes the secret key {made.key}: keep it where no one else can read it")
    elif made.key:
        note(
            f"its secrets need the secret key {made.key}, which it does not include; "
            "back up secret.key as well"
        )


def _shown(made: object) -> dict[str, object]:
    import msgspec

    return dict(msgspec.to_builtins(made))


@grouped
def restore(
    file: BackupFile,
    lost_at: Annotated[
        str | None,
        typer.Option(
            "--lost-at",
            metavar="TIME",
            help="When the ledger was lost, such as 2026-11-17T10:30:00 or ...Z. [now]",
        ),
    ] = None,
    skew: Annotated[
        float | None,
        length("--skew", "How far ahead the clock of a sender may have been. [as the hub allows: 5 min]"),
    ] = None,
    *,
    at: StoreOptions,
    json: Json = False,
) -> None:
    """Make a ledger from a backup; no id runs a second time.

    What was accepted after the backup is not in it. So messages made before the loss that are not in it are
    stale, and those that were open are unknown; alerts go on. Refuses a folder with a ledger, or a running
    hub.
    """
    from duly.server import ledger_backups

    lost = None if lost_at is None else _time(lost_at)
    allowed = None if skew is None else units.seconds(skew)
    with row_progress("rows") as counted:
        done = asyncio.run(
            ledger_backups.restore(at.settings, file, lost_at=lost, skew=allowed, progress=counted)
        )
    if json:
        print_json(done)
        return
    say(f"restored the ledger of {clock(done.about.at // units.MS)}")
    say(f"messages made before {clock(done.stale_before // units.MS)} that are not in it are stale")
    wait = done.stale_before - time.time_ns() // 1_000
    if wait > 0:
        step = units.MINUTE if wait > units.MINUTE else units.SECOND
        wait = -(-wait // step) * step  # rounded up: the seconds that the restore took say nothing
        note(f"that is in {units.show(wait)}: until then the hub refuses new messages; see --lost-at, --skew")
    say(
        f"{count(done.unknown, 'open message')} may have ended since, and "
        f"{'is' if done.unknown == 1 else 'are'} unknown now; "
        f"{count(done.open, 'message')} still open"
    )
    if done.key:
        note(done.key)


def _time(text: str) -> int:
    """Return the microseconds of a time; one without a zone is of this machine's zone.

    >>> _time("1970-01-01T00:00:01Z")
    1000000
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise CommandFailed(
            Exit.USAGE, f"{text!r} is not a time; write 2026-11-17T10:30:00, or with Z for UTC"
        ) from None
    return round(found.astimezone(UTC).timestamp() * units.SECOND)
