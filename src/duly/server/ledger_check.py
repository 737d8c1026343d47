"""Checks the ledger of a hub, or of a device, node or sentinel, while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duly.errors import LedgerDamaged, LedgerTooNew, Malformed
from duly.server.ledger_inspectors import hub_inspectors
from duly.settings import Settings
from duly.storage import open_snapshot
from duly.storage.check import CheckReport, LedgerCheck
from duly.storage.secret_box import FILE, SecretBox, read_key


async def check_invariants(
    settings: Settings,
    progress: Callable[[str, int], None] = lambda table, rows: None,
    url: str = "",
) -> CheckReport:
    """Check every invariant of the ledger of these settings, or of the one at a URL. A journal that cannot be
    read is a finding; the tables are then checked without it."""
    url = url or settings.ledger_url
    box, why = key_at_hand(settings)
    try:
        snapshot = await open_snapshot(url)
    except (LedgerDamaged, LedgerTooNew) as problem:
        if "journal" not in str(problem):
            raise
        snapshot = await open_snapshot(url, overlay=False)
    async with snapshot:
        return await LedgerCheck(snapshot, hub_inspectors(box, why)).run(progress)


def key_at_hand(settings: Settings) -> tuple[SecretBox | None, str]:
    """Return the box of the secret key of these settings; or None, and why there is none."""
    path = Path(settings.secret_key) if settings.secret_key else Path(settings.data) / FILE
    if not path.exists():
        return None, f"there is no key at {path}"
    try:
        return read_key(path), ""
    except Malformed as problem:
        return None, str(problem)
