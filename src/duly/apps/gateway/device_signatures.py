"""Checks the signatures of MQTT devices that have a key.

The law: from a device with a key only signed messages are accepted; from a device without one, all are.
"""

from __future__ import annotations

from duly.core.acl import HUB
from duly.core.signing import Keyring, read_stored_key
from duly.identity.accounts import Accounts
from duly.wire import fd
from duly.wire.fd_signatures import FdSignatures


class DeviceSignatures:
    """The keys of the devices and the verifier for each."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._checks: dict[tuple[str, str], FdSignatures] = {}

    def check(self, message: fd.Fd, device: str) -> None:
        """Refuse a message that its device should have signed and has not."""
        key = self._accounts.key_of(device)
        if not key:
            return
        signatures = self._checks.get((device, key))
        if signatures is None:
            ring = Keyring(HUB).trust(device, read_stored_key(key))
            signatures = self._checks[device, key] = FdSignatures(ring, required=True)
        signatures.check(message, by=device)

    def required(self, device: str) -> bool:
        """Return whether a device has a key."""
        return bool(self._accounts.key_of(device))
