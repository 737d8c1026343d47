"""The data folder of a hub: private, and with the key that seals the ledger's secrets."""

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


def prepare(data: Path) -> None:
    """Make the folder if it is not there; nobody but its owner may read what is in it. Files that are not a
    hub's are left as they are."""
    private_folder(data)
    close_to_others(data / name for name in FILES)
    for folder in FOLDERS:
        close_tree(data / folder)


async def unlock(ledger: Ledger, settings: Settings) -> SecretBox:
    """The box of the ledger's secrets, which this hub may need; those in plain are sealed first."""
    box = await open_box(ledger, Path(settings.data), settings.secret_key)
    assert box is not None
    plain = await Profiles(ledger, box=box).seal() + await Accounts(ledger, box).encrypt_passwords()
    if plain:
        LOG.warning("sealed %d secrets that lay in the ledger in plain, with key %s", plain, box.id)
        await ledger.scrub()
    return box
