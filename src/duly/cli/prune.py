"""`duly prune`: forgets now what is due to be forgotten. A running hub does so by itself, twice a minute."""

from __future__ import annotations

from typing import Annotated

import typer

from duly.cli.common import JsonObject, count, print_json, say
from duly.cli.options import Json, LedgerOptions, grouped


@grouped
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be forgotten.")] = False,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Forget messages that have ended and can no longer be repeated; alerts go to the archive first.

    How long things are kept: alerts_kept, deliveries_kept, alerts_remembered, archives_kept (days) and
    remember (seconds) in duly.toml, or DULY_ALERTS_KEPT and so on.
    """
    wanted = {"dry": "yes"} if dry_run else {}
    done = at.ask("prune", wanted, lambda: _in_ledger(dry_run, at), reads=dry_run)
    if json:
        print_json(done)
        return
    word = "would be forgotten" if dry_run else "forgotten"
    files = f", {count(len(done['archives']), 'archive file')} too old" if done["archives"] else ""
    told = count(done["deliveries"], "more delivery", "more deliveries")
    alerts = count(done["alerts"], "alert")
    say(f"{count(done['messages'], 'message')} {word}, {alerts} of them; {told}{files}")


async def _in_ledger(dry_run: bool, at: LedgerOptions) -> JsonObject:
    from duly.apps.alerts.operations import AlertOperations
    from duly.apps.alerts.profiles import Profiles
    from duly.server import retention
    from duly.server.policies import archive_of, deliveries_kept

    archive, kept = archive_of(at.settings), deliveries_kept(at.settings)
    async with await at.open(reads=dry_run) as book:
        if dry_run:
            return await retention.would_prune(book, archive, kept)
        return await retention.prune(book, AlertOperations(book, Profiles(book)), archive, kept)
