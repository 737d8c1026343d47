"""The data folder of a hub: private to its owner, with the key that encrypts secrets in the ledger."""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path
from typing import Final

from duly.apps.alerts.channels import local
from duly.apps.alerts.profiles import Profiles
from duly.identity.accounts import Accounts
from duly.runtime.files import close_to_others, close_tree, private_folder, write_private
from duly.settings import Settings
from duly.storage.ledger import Ledger
from duly.storage.secret_box import FILE, SecretBox, open_box

LOG: Final = logging.getLogger("duly.runtime.files")

LEDGER: Final = "ledger.db"
HUB_ID: Final = "hub_id"
FILES: Final = (
    LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", f"{LEDGER}-journal", f"{LEDGER}.lock",
    "hub.json", "client_id", HUB_ID, FILE,
)  # fmt: skip
_NAME: Final = re.compile(r"[a-z0-9-]{1,60}")
FOLDERS: Final = ("broker", "archive", local.FOLDER)


def prepare(folder: Path) -> None:
    """Create the folder if it does not exist, and let only its owner read the files of the hub. Other files
    in it are left alone."""
    private_folder(folder)
    close_to_others(folder / name for name in FILES)
    for name in FOLDERS:
        close_tree(folder / name)


def warn_of_lost_ledger(settings: Settings) -> None:
    """Log a warning if the ledger is gone that a hub has kept in this folder: the hub begins a new one."""
    folder = Path(settings.data)
    if not settings.ledger and (folder / HUB_ID).exists() and not (folder / LEDGER).exists():
        LOG.warning(
            "a hub has used %s before, but there is no %s; a new one begins, without accounts and without "
            "the ids that have run. If it was lost, stop this hub, remove the new one and use 'duly restore'",
            folder, LEDGER,
        )  # fmt: skip


def hub_name(folder: Path) -> str:
    """Return the name of the hub with this data folder: created once, the same after every restart."""
    path = folder / HUB_ID
    kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if _NAME.fullmatch(kept):
        return kept
    fresh = f"hub-{secrets.token_hex(4)}"
    write_private(path, fresh.encode())
    return fresh


async def unlock(ledger: Ledger, settings: Settings) -> SecretBox:
    """Open the box of the secrets in the ledger; secrets that are stored in plain are encrypted first."""
    box = await open_box(ledger, Path(settings.data), settings.secret_key)
    assert box is not None
    plain = (
        await Profiles(ledger, box=box).encrypt_addresses() + await Accounts(ledger, box).encrypt_passwords()
    )
    if plain:
        LOG.warning("encrypted %d secrets that the ledger held in plain, with key %s", plain, box.id)
        await ledger.scrub()
    return box
