"""`duly check`: verifies every invariant of a ledger.

The law: it reads and changes nothing, and disturbs no hub. What it finds is named by its invariant, with the
rows that break it and what to do; the exit code is then 1.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duly.cli.common import CommandFailed, Exit, count, print_json, say, style
from duly.cli.options import Json, StoreOptions, grouped
from duly.cli.progress import row_progress

if TYPE_CHECKING:
    from duly.storage.check import CheckReport


@grouped
def check(
    list_: Annotated[bool, typer.Option("--list", help="List the invariants, and check nothing.")] = False,
    *,
    at: StoreOptions,
    json: Json = False,
) -> None:
    """Check every invariant of a ledger, also while a hub runs.

    The ledger is read at one moment, SQLite or PostgreSQL; --data may be a backup, too. Prints each invariant
    that does not hold, where, and what to do. Exits with 1 if one does not hold.
    """
    if list_:
        _list(json)
        return
    settings = at.settings
    if not settings.ledger and not (Path(settings.data) / "ledger.db").exists():
        raise CommandFailed(
            Exit.UNREACHABLE, f"there is no ledger in {settings.data}; name one with --data or --ledger"
        )
    from duly.server.ledger_check import check_invariants

    with row_progress("rows") as counted:
        report = asyncio.run(check_invariants(settings, lambda _, rows: counted(rows)))
    if json:
        print_json(report)
    else:
        show_report(report)
    raise typer.Exit(Exit.OK if report.ok else Exit.FAILED)


def _list(json: bool) -> None:
    from duly.server.ledger_inspectors import hub_inspectors
    from duly.storage.invariants import KERNEL

    all_of_them = [*KERNEL, *(one for each in hub_inspectors(None) for one in each.invariants)]
    if json:
        print_json({"invariants": all_of_them})
        return
    width = max(len(one.name) for one in all_of_them)
    for one in all_of_them:
        say(f"{one.name.ljust(width)}  {one.sentence}")


def show_report(report: CheckReport) -> None:
    """Print what a check has found."""
    held = 0
    for one in report.invariants:
        if one.holds:
            held += 1
        elif one.holds is None:
            say(f"{style('!', 'yellow')} {one.name}: not checked: {one.advice}")
        else:
            say(f"{style('✗', 'red')} {one.name}: {one.sentence}; broken in {count(one.count, 'row')}:")
            for example in one.examples:
                say(f"    {example}")
            if one.count > len(one.examples):
                say(f"    and {one.count - len(one.examples)} more")
            say(f"  what to do: {one.advice}")
    rows = sum(table.rows for table in report.tables.values())
    say(
        f"{style('✓', 'green')} {held} of {count(len(report.invariants), 'invariant')} hold, in "
        f"{count(rows, 'row')} of {report.engine}, schema {report.schema}"
    )
