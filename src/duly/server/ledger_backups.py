"""Backups of a hub's ledger, and new ledgers from backups, with the key of the secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from duly.errors import LedgerDamaged, LedgerError, LedgerInUse, SecretKeyMissing
from duly.runtime.clock import SystemClock
from duly.runtime.files import new_private_folder, private_folder, write_private
from duly.server import runfile
from duly.server.audit_chain import AuditChain
from duly.server.diagnostics import margins
from duly.server.ledger_check import check_invariants, key_at_hand
from duly.server.policies import command_timing
from duly.settings import Settings
from duly.storage import file_url, open_snapshot
from duly.storage.backup import BackupInfo, about_backup, restore_rows, write_backup
from duly.storage.copy import empty_ledger
from duly.storage.new_file import refuse_existing
from duly.storage.secret_box import FILE

Progress = Callable[[int], None]

REPEATABLE: Final = frozenset({"alert", "hub", "push", "task", "tower"})
"""Channels whose receivers recognise a repeat, or whose deliveries may be repeated: alerts, and messages that
a client keeps to send again."""


class RestoreReport(Struct, frozen=True):
    """What a restore has done."""

    about: BackupInfo
    stale_before: int
    """messages created before this (µs) that are not in the backup are stale"""
    unknown: int
    """messages that were open and may have ended since"""
    open: int
    """messages that continue: alerts, and messages that are sent again until they are answered"""
    key: str
    """what must be done about the key of the secrets; empty if it is in place"""


async def back_up(
    settings: Settings, path: Path, *, with_key: bool = False, progress: Progress = lambda rows: None
) -> BackupInfo:
    """Write a backup of the ledger of these settings to a new file, and check it."""
    refuse_existing(path)
    key = None
    if with_key:
        box, why = key_at_hand(settings)
        if box is None:
            raise SecretKeyMissing(f"the backup cannot include the key: {why}")
        key = _key_file(settings).read_bytes()
    now = SystemClock().now()
    async with await open_snapshot(settings.ledger_url) as snapshot:
        about = await write_backup(snapshot, path, now, key=key, progress=progress)
    report = await check_invariants(settings, url=file_url(path))
    broken = [finding.name for finding in report.invariants if finding.holds is False]
    if broken:
        raise LedgerDamaged(
            f"{path} was written, and holds what the ledger holds; in both {', '.join(broken)} is broken; "
            "see 'duly check'"
        )
    return about


def _key_file(settings: Settings) -> Path:
    return Path(settings.secret_key) if settings.secret_key else Path(settings.data) / FILE


async def restore(
    settings: Settings,
    path: Path,
    *,
    lost_at: int | None = None,
    skew: int | None = None,
    progress: Progress = lambda rows: None,
) -> RestoreReport:
    """Create the ledger of these settings from a backup.

    `lost_at` is when the ledger was lost (µs), now if it is not known; `skew` is how far ahead of that the
    clock of a sender may have been. Raises an error if a hub runs there, or if there is a ledger already.
    """
    folder = Path(settings.data)
    if not settings.ledger:
        _refuse_in_use(folder)
    if skew is None:
        skew = margins(command_timing(settings))["skew"]
    now = SystemClock().now()
    if lost_at is not None and lost_at > now:
        raise LedgerError("--lost-at is in the future; the ledger was lost before now")
    lost = (now if lost_at is None else lost_at) + skew
    async with await open_snapshot(file_url(path)) as backup:
        if problems := await backup.problems():
            raise LedgerDamaged(f"{path} is damaged ({problems[0][1]}); take an older backup")
        about, key = await about_backup(backup)
        if about is not None and about.at > lost:
            raise LedgerError(
                "the backup is from after --lost-at; name the time at which the ledger was lost"
            )
        if about is not None:
            _refuse_other_key(settings, about)
        with new_private_folder(None if settings.ledger else folder), _placed(settings, about, key) as left:
            async with empty_ledger(settings.ledger_url) as ledger:
                done = await restore_rows(backup, ledger, lost=lost, repeatable=REPEATABLE, progress=progress)
                await AuditChain(ledger).add("local", "admin", "restore", path.name)
    report = await check_invariants(settings)
    broken = [finding.name for finding in report.invariants if finding.holds is False]
    if broken:
        raise LedgerDamaged(
            f"the ledger is restored, and {', '.join(broken)} is broken in it; see 'duly check'"
        )
    return RestoreReport(done.about, lost, done.unknown, done.open, left)


def _refuse_in_use(folder: Path) -> None:
    running = runfile.read(folder)
    if running is not None:
        raise LedgerInUse(f"a hub runs in {folder} (pid {running.pid}); stop it first. Nothing was changed")
    refuse_existing(folder / "ledger.db")


def _refuse_other_key(settings: Settings, about: BackupInfo) -> None:
    box, _ = key_at_hand(settings)
    if box is not None and about.key and box.id != about.key:
        raise SecretKeyMissing(
            f"the backup's secrets need key {about.key}, and {_key_file(settings)} holds key {box.id}; move "
            "that file away, or name the right one with --secret-key. Nothing was changed"
        )


@contextmanager
def _placed(settings: Settings, about: BackupInfo | None, key: bytes | None) -> Iterator[str]:
    """Put the key that a backup includes in its place, and yield what is left to do. It is there before the
    ledger has its name: a restore that is killed is then repeated, or needs nothing more. If the block fails,
    the key is removed again."""
    path = _key_file(settings)
    if about is None or not about.key or path.exists():
        yield ""
        return
    if key is None:
        yield f"copy the secret key {about.key} to {path} before a hub is started"
        return
    private_folder(path.parent)
    write_private(path, key)
    try:
        yield ""
    except BaseException:
        path.unlink(missing_ok=True)
        raise
