"""`duly prune`: forget what is due, now. A hub that runs does it by itself, twice a minute."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from duly.cli.common import (
    Data,
    HubUnreachable,
    Json,
    LedgerUrl,
    Token,
    Url,
    count,
    find_hub,
    open_to_read,
    print_json,
    say,
    settings_of,
)


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be forgotten.")] = False,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Forget messages that have ended and can no longer be repeated; alerts go to the archive first.

    How long things are kept: alerts_kept, deliveries_kept, alerts_remembered, archives_kept (days) and
    remember (seconds) in duly.toml, or DULY_ALERTS_KEPT and so on.
    """
    done = _ask(dry_run, data, ledger, url, token)
    if json:
        print_json(done)
        return
    word = "would be forgotten" if dry_run else "forgotten"
    files = f", {count(len(done['archives']), 'archive file')} too old" if done["archives"] else ""
    told = count(done["deliveries"], "more delivery", "more deliveries")
    alerts = count(done["alerts"], "alert")
    say(f"{count(done['messages'], 'message')} {word}, {alerts} of them; {told}{files}")


def _ask(
    dry_run: bool, data: str | None, ledger: str | None, url: str | None, token: str | None
) -> dict[str, Any]:
    hub = None if ledger is not None else find_hub(data, url, token)
    if hub is not None:
        try:
            answer: dict[str, Any] = hub.ask("/v1/admin/prune", {"dry": "yes"} if dry_run else {})
            return answer
        except HubUnreachable:
            if not hub.local:
                raise  # its note may be of one that was killed: the ledger knows
    return asyncio.run(_in_ledger(dry_run, data, ledger))


async def _in_ledger(dry_run: bool, data: str | None, ledger: str | None) -> dict[str, Any]:
    from duly.apps.alerts import retention
    from duly.apps.alerts.operations import AlertOperations
    from duly.apps.alerts.profiles import Profiles
    from duly.server.policies import archive_of, deliveries_kept
    from duly.storage import open_ledger

    settings = settings_of(data, ledger)
    archive, kept = archive_of(settings), deliveries_kept(settings)
    if dry_run:
        async with await open_to_read(data, ledger) as book:
            return await retention.would_prune(book, archive, kept)
    async with await open_ledger(settings.ledger_url) as book:
        return await retention.prune(book, AlertOperations(book, Profiles(book)), archive, kept)
