"""Links by which the recipient of a notification acknowledges its alert without an account.

A link names the alert, the recipient it was sent to and when it expires, and carries an HMAC over these with
a key that all hubs on the ledger have. So every hub can check it, and its holder cannot change it. It does
one thing: it acknowledges this alert in the name of this recipient. Following it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from hashlib import sha256
from typing import Final, NamedTuple
from urllib.parse import quote

from duly.core.units import DAY, SECOND
from duly.errors import NotAllowed
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, shared_secret

NAME: Final = "ack-links"
PATH: Final = "/ack"
LASTS: Final = 7 * DAY
"""How long after an alert was received its links are valid."""
_MAC: Final = 16
_LONGEST: Final = 1_200


class AckClaim(NamedTuple):
    """The content of a valid link: the key of the alert, and the label of the recipient."""

    key: bytes
    recipient: str


class AckLinks:
    """Makes and checks the links of one ledger."""

    def __init__(self, key: bytes, base: str = "") -> None:
        self._key = key
        self._base = base
        self._reachable = asyncio.Event()
        if base:
            self._reachable.set()

    def lead_to(self, base: str) -> None:
        """Set the address at which recipients reach the hub."""
        self._base = base
        self._reachable.set()

    async def reachable(self) -> None:
        """Wait until the hub has an address. A starting hub resumes its alerts before that, and every attempt
        of a delivery must carry the same link."""
        await self._reachable.wait()

    def make(self, key: bytes, recipient: str, received: int) -> str:
        """Return the link for an alert and a recipient."""
        return f"{self._base}{PATH}?t={quote(self.token(key, recipient, received), safe='')}"

    def token(self, key: bytes, recipient: str, received: int) -> str:
        """Return the token of a link. It depends on when the alert was received, not on the present time, so
        that every attempt of a delivery carries the same one."""
        expires = (received + LASTS) // SECOND
        label = recipient.encode()
        said = expires.to_bytes(5, "big") + len(label).to_bytes(2, "big") + label + key
        return base64.urlsafe_b64encode(self._mac(said) + said).decode().rstrip("=")

    def read(self, token: str, now: int) -> AckClaim:
        """Return the content of a link; raises `NotAllowed` if it was not made here or has expired."""
        try:
            if len(token) > _LONGEST:
                raise ValueError
            raw = base64.b64decode(token.encode() + b"=" * (-len(token) % 4), b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise NotAllowed("this link is incomplete; copy the whole link from the notification") from None
        mac, said = raw[:_MAC], raw[_MAC:]
        if len(said) < 8 or not hmac.compare_digest(mac, self._mac(said)):
            raise NotAllowed("this link is not valid; copy the whole link from the notification")
        if int.from_bytes(said[:5], "big") * SECOND <= now:
            raise NotAllowed("this link has expired; acknowledge the alert on the dashboard")
        end = 7 + int.from_bytes(said[5:7], "big")
        return AckClaim(said[end:], said[7:end].decode())

    def _mac(self, said: bytes) -> bytes:
        return hmac.new(self._key, said, sha256).digest()[:_MAC]


async def open_ack_links(ledger: Ledger, box: SecretBox | None) -> AckLinks | None:
    """Open the links with this ledger's key, creating the key if there is none; returns None without a box to
    keep it in."""
    return None if box is None else AckLinks(await shared_secret(ledger, box, NAME))
