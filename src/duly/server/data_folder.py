"""The data folder of a hub: private to its owner, with the key that encrypts secrets in the ledger."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from duly.apps.alerts.profiles import Profiles
from duly.identity.accounts import Accounts
from duly.runtime.files import close_to_others, close_tree, private_folder
from duly.settings import Settings
from duly.storage.ledger import Ledger
from duly.storage.secret_box import FILE, SecretBox, open_box

LOG: Final = logging.getLogger("duly.runtime.files")

LEDGER: Final = "ledger.db"
FILES: Final = (
    LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", f"{LEDGER}-journal", f"{LEDGER}.lock",
    "hub.json", "client_id", FILE,
)  # fmt: skip
FOLDERS: Final = ("broker", "archive")


def prepare(folder: Path) -> None:
    """Make the folder if it does not exist, and let only its owner read the files of the hub. Other files
    in it are left as they are."""
    private_folder(folder)
    close_to_others(folder / name for name in FILES)
    for name in FOLDERS:
        close_tree(folder / name)


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
