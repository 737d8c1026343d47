"""The secrets in a ledger, encrypted with a key that is not in it.

The laws. A copy of the database reveals no secret: channel addresses, webhook secrets, password and broker
hashes are encrypted (AES-256-GCM) with a key from a file. The place in the ledger is authenticated, too, so
an encrypted value cannot be moved. The ledger records which key it needs; a process with another
key, or none, gets an error before it changes anything. All hubs on one ledger need the same key.

Values that an older version stored in plain text are read as they are; a hub encrypts them when it starts.
"""

from __future__ import annotations

import base64
import os
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from duly.core.operations import PutNewItem
from duly.errors import Malformed, SecretKeyMissing
from duly.runtime.files import close_to_others, write_private
from duly.storage.ledger import Ledger

FILE: Final = "secret.key"
"""The name of the key file in the data folder; it is made at the first start unless another file is given."""
NAMED: Final = "DULY_SECRET_KEY=FILE, or with --secret-key where a verb has it"
"""How error messages tell a user to name another key file."""
BUCKET: Final = "secret_key"
NAME: Final = "check"
PREFIX: Final = "sealed:1:"
KEY_SIZE: Final = 32
NONCE: Final = 12
SHORTEST: Final = 32
"""The fewest characters of a key file: a shorter key could be guessed."""


class SecretBox:
    """Encrypts and decrypts secrets with one key."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(_derive(key, b"seal"))
        self.tag_key = _derive(key, b"tag")
        """the key for names that are the same for the same secret and do not reveal it"""
        self.id = _derive(key, b"id")[:4].hex()

    def encrypt(self, secret: str, place: str) -> str:
        """Return the secret encrypted for one place in the ledger; elsewhere it cannot be decrypted."""
        nonce = secrets.token_bytes(NONCE)
        encrypted = self._cipher.encrypt(nonce, secret.encode(), place.encode())
        return f"{PREFIX}{self.id}:{base64.b64encode(nonce + encrypted).decode()}"

    def decrypt(self, encrypted: str, place: str) -> str:
        """Return the secret; a value in plain text is returned as it is."""
        from cryptography.exceptions import InvalidTag

        if not is_encrypted(encrypted):
            return encrypted
        key, _, text = encrypted.removeprefix(PREFIX).partition(":")
        if key != self.id:
            raise SecretKeyMissing(f"{place} is encrypted with key {key}, but this program has key {self.id}")
        with suppress(InvalidTag, ValueError):
            raw = base64.b64decode(text, validate=True)
            return self._cipher.decrypt(raw[:NONCE], raw[NONCE:], place.encode()).decode()
        raise SecretKeyMissing(f"{place} cannot be decrypted: it was changed, or belongs to another ledger")


def is_encrypted(value: str) -> bool:
    """Return whether a stored value is encrypted rather than plain text."""
    return value.startswith(PREFIX)


def _derive(key: bytes, purpose: bytes) -> bytes:
    return blake2b(key=key, person=b"duly:" + purpose, digest_size=KEY_SIZE).digest()


# ── key files ────────────────────────────────────────────────────────────────────────────────────


def read_key(path: Path) -> SecretBox:
    """Return the box of a key file: any text of 32 characters or more, such as a line of random base64."""
    try:
        text = path.read_bytes().strip()
    except OSError as problem:
        raise Malformed(f"the secret key {path} cannot be read: {problem.strerror}") from None
    if len(text) < SHORTEST:
        raise Malformed(
            f"the secret key {path} is too short; it needs {SHORTEST} characters, which "
            "'openssl rand -base64 32' makes"
        )
    close_to_others((path,))
    return SecretBox(blake2b(text, digest_size=KEY_SIZE).digest())


def make_key(path: Path) -> None:
    """Create a key file of random bytes; an existing file is kept."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        write_private(fresh, base64.b64encode(secrets.token_bytes(KEY_SIZE)) + b"\n")
        with suppress(FileExistsError):
            os.link(fresh, path)
    except OSError as problem:
        raise Malformed(f"the secret key {path} cannot be made: {problem.strerror}") from None
    finally:
        fresh.unlink(missing_ok=True)


# ── the key of a ledger ──────────────────────────────────────────────────────────────────────────


async def open_box(
    ledger: Ledger, folder: Path, given: str = "", *, make: bool = True, reading: bool = False
) -> SecretBox | None:
    """Return the box of this ledger, with the key in the given file or in the one in the data folder.

    A ledger that has no key yet gets one, and the key file is created if it does not exist; without `make`,
    only a given file is used. None means that nothing is encrypted yet. Raises `SecretKeyMissing` if the key
    that the ledger needs is not available.
    """
    path = Path(given) if given else folder / FILE
    needed = await needed_key(ledger)
    made = False
    if not path.exists():
        if needed:
            raise SecretKeyMissing(
                f"this ledger's secrets are encrypted with key {needed}, and {path} is not there; copy "
                f"{FILE} from the data folder of a hub that has it, or name it with {NAMED}"
            )
        if reading or not (make or given):
            return None
        make_key(path)
        made = True
    box = read_key(path)
    if not needed and not reading:
        await ledger.write(PutNewItem(BUCKET, NAME, box.encrypt(NAME, BUCKET).encode()))
        needed = await needed_key(ledger)
        if needed != box.id and made:  # another hub has stored its own key first
            path.unlink()
    if needed and needed != box.id:
        raise SecretKeyMissing(
            f"this ledger's secrets are encrypted with key {needed}, and {path} holds key {box.id}; "
            f"copy {FILE} from the data folder of a hub that has the right one, or name it with {NAMED}"
        )
    return box


async def needed_key(ledger: Ledger) -> str:
    """Return the id of the key that the ledger needs; empty if it needs none yet."""
    found = (await ledger.item(BUCKET, NAME) or b"").decode()
    return found.removeprefix(PREFIX).partition(":")[0]


# ── secrets that hubs share ──────────────────────────────────────────────────────────────────────

SHARED: Final = "secrets"


async def shared_secret(ledger: Ledger, box: SecretBox, name: str, size: int = KEY_SIZE) -> bytes:
    """Return the random secret of this name that all hubs on the ledger share; create and
    encrypt it if there is none."""
    place = f"{SHARED}/{name}"
    fresh = base64.b64encode(secrets.token_bytes(size)).decode()
    await ledger.write(PutNewItem(SHARED, name, box.encrypt(fresh, place).encode()))
    stored = await ledger.item(SHARED, name)
    assert stored is not None
    return base64.b64decode(box.decrypt(stored.decode(), place))
