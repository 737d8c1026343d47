"""`duly export`, `duly import` and `duly copy`: a ledger as JSON lines, and in another database.

The law: a new ledger is filled completely or not at all, and is compared with its source.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from duly.cli.check import show_report
from duly.cli.common import CommandFailed, Exit, count, note, print_json, say
from duly.cli.options import Json, SecretKey, StoreOptions, grouped
from duly.cli.progress import row_progress

if TYPE_CHECKING:
    from duly.settings import Settings
    from duly.storage.check import CheckReport

ExportFile = Annotated[
    str, typer.Argument(metavar="[FILE]", help="The file; - is the standard input or output.")
]


@grouped
def export(
    file: ExportFile = "-",
    without_secrets: Annotated[
        bool,
        typer.Option("--without-secrets", help="Leave secrets out, instead of exporting them encrypted."),
    ] = False,
    *,
    at: StoreOptions,
) -> None:
    """Write the ledger as JSON lines.

    Writes the ledger as it is at one moment, also while a hub runs: one line for each row, and a last line
    with their counts and hashes. Secrets stay encrypted with the ledger's key, or are left out.
    """
    settings = at.settings
    with _output(file) as out, row_progress("rows") as counted:
        asyncio.run(_export(settings, out, not without_secrets, counted))


async def _export(settings: Settings, out: IO[bytes], secrets: bool, progress: Callable[[int], None]) -> None:
    from duly.runtime.clock import SystemClock
    from duly.storage import open_snapshot
    from duly.storage.export import export_lines

    async with await open_snapshot(settings.ledger_url) as snapshot:
        async for line in export_lines(snapshot, SystemClock().now(), secrets=secrets, progress=progress):
            out.write(line)


@contextmanager
def _output(file: str) -> Iterator[IO[bytes]]:
    """Yield the file to write to. It gets its name when it is complete, and only its owner may read it."""
    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    if path.exists():
        raise CommandFailed(Exit.REFUSED, f"there is a file at {path} already; name another one")
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(path)
    except OSError as problem:
        raise CommandFailed(
            Exit.UNREACHABLE, f"{path} cannot be written ({problem.strerror}); nothing was left"
        ) from None
    finally:
        fresh.unlink(missing_ok=True)


@grouped
def import_(file: ExportFile = "-", *, at: StoreOptions, json: Json = False) -> None:
    """Make a ledger from exported JSON lines.

    Imports everything or nothing; the ledger must not exist yet. Use it to move a ledger: stop the hub before
    you export, and do not start it on the old ledger again. To replace a lost ledger, use 'duly restore'.
    """
    settings = at.settings
    with _input(file) as lines, row_progress("rows") as counted:
        report = asyncio.run(_import(settings, lines, counted))
    _end(report, f"imported into {settings.ledger_url.partition('@')[2] or settings.ledger_url}", json)


async def _import(settings: Settings, lines: IO[bytes], progress: Callable[[int], None]) -> CheckReport:
    from duly.runtime.files import new_private_folder
    from duly.server.ledger_check import check_invariants
    from duly.storage.bulk_load import fill
    from duly.storage.copy import empty_ledger
    from duly.storage.export import ExportReader

    reader = ExportReader(lines)
    with new_private_folder(None if settings.ledger else Path(settings.data)):
        async with empty_ledger(settings.ledger_url) as ledger:
            await fill(ledger, reader.rows, progress)
    if reader.secrets != "sealed":
        note("this export has no secrets: set addresses, passwords and broker logins again")
    return await check_invariants(settings)


@contextmanager
def _input(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    with Path(file).open("rb") as lines:
        yield lines


@grouped
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A ledger: URL, file or data folder.")],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="An empty database, a new file or a new data folder.")
    ],
    *,
    secret_key: SecretKey = None,
    json: Json = False,
) -> None:
    """Copy a ledger to another database, such as SQLite to PostgreSQL.

    Copies everything or nothing: rows and digests of every table are compared, and the copy is checked.
    Refuses a ledger that a hub uses, and a target that is not empty.
    """
    from duly.runtime.files import new_private_folder
    from duly.storage.copy import copy_ledger

    with new_private_folder(_folder_of(target)), row_progress("rows") as counted:
        here, there = _url(source), _url(target)
        if here == there:
            raise CommandFailed(Exit.USAGE, "FROM and TO are the same ledger; name another target")
        asyncio.run(copy_ledger(here, there, counted))
    from duly.server.ledger_check import check_invariants

    settings = StoreOptions(source if Path(source).is_dir() else ".", None, secret_key).settings
    report = asyncio.run(check_invariants(settings, url=there))
    _end(report, "copied", json)
    if not json:
        note("copy secret.key as well: its secrets need it. Do not start a hub on the old ledger again")


def _folder_of(target: str) -> Path | None:
    """Return the data folder that a new name without a suffix stands for."""
    path = Path(target)
    return None if _is_url(target) or path.exists() or path.suffix else path


def _is_url(text: str) -> bool:
    return text.startswith(("sqlite:", "postgresql:", "postgres:"))


def _url(text: str) -> str:
    """Return the address of a ledger that was named by its URL, file or data folder."""
    from duly.storage import file_url

    if _is_url(text):
        return text
    path = Path(text)
    return file_url(path / "ledger.db" if path.is_dir() else path)


def _end(report: CheckReport, done: str, json: bool) -> None:
    """Print what was done, and what the check has found; exit with 1 if something is broken."""
    if json:
        print_json(report)
    else:
        say(f"{done}: {count(sum(one.rows for one in report.tables.values()), 'row')}")
        show_report(report)
    if not report.ok:
        raise typer.Exit(Exit.FAILED)
