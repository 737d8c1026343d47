"""Page cursors: where the next page of a list begins, encrypted for its reader.

The law: a cursor is opaque, has a fixed length, and is valid for one list and one account only. It may point
to a row that its reader may not see, so it is encrypted. A cursor that was encrypted with another key or for
another account is refused. The key is in the ledger, so every hub on it can read the cursors of the others.
"""

from __future__ import annotations

import base64
import secrets
from typing import Final

from duly.errors import Malformed
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, shared_secret

NAME: Final = "cursors"
LONGEST: Final = 432
"""The longest place in a list: a message's key and eight more bytes."""
_NONCE: Final = 12


class PageCursors:
    """Encrypts and decrypts cursors with one key."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)

    def encrypt(self, reader: str, place: bytes) -> str:
        """Return a cursor for this place in a list, for this reader of it."""
        nonce = secrets.token_bytes(_NONCE)
        padded = len(place).to_bytes(2, "big") + place.ljust(LONGEST, b"\0")
        encrypted = nonce + self._cipher.encrypt(nonce, padded, reader.encode(errors="surrogatepass"))
        return base64.urlsafe_b64encode(encrypted).decode().rstrip("=")

    def decrypt(self, reader: str, cursor: str) -> bytes:
        """Return the place that a cursor stands for."""
        from cryptography.exceptions import InvalidTag

        try:
            raw = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), b"-_", validate=True)
            padded = self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], reader.encode(errors="surrogatepass"))
        except (InvalidTag, ValueError):
            raise Malformed(
                "before is not the 'next' of a page of this list that was given to you; begin without it"
            ) from None
        return padded[2 : 2 + int.from_bytes(padded[:2], "big")]


async def open_cursors(ledger: Ledger, box: SecretBox) -> PageCursors:
    """Return cursors with the key of this ledger, which is created if there is none."""
    return PageCursors(await shared_secret(ledger, box, NAME))
