"""Signatures: canonical bytes of a message, signatures over them, and keys trusted for a user.

The laws. The signed bytes are the values of the fields, each prefixed with its length. So two different
messages never have the same canonical bytes, and it does not matter how a JSON library formats them. A key is
trusted for one username only: a valid signature proves nothing for another one. A key's id is a hash of the
key, so it can be neither chosen nor confused.

There are two algorithms. With Ed25519 every node can verify a signature, and a verifier cannot sign. With
HMAC-SHA256 two nodes share a secret, so a signature proves something only to these two; it is for devices too
small for Ed25519.
"""

from __future__ import annotations

import binascii
import hmac
from collections.abc import Callable, Iterable
from enum import Enum
from hashlib import blake2b
from typing import Final

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from duly.errors import Malformed
from duly.extras import needed_for

KEY_SIZE: Final = 32
"""The size in bytes of a key, secret or public, of either algorithm."""


class Algorithm(Enum):
    """The signature algorithms."""

    ED25519 = "ed25519"
    HMAC = "hmac-sha256"


class Key(Struct, frozen=True, omit_defaults=True):
    """A key: its secret signs, its public half only verifies. HMAC has no public half.

    >>> Key(Algorithm.ED25519, secret=bytes(32)).shown
    'ed25519:O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik='
    """

    algorithm: Algorithm
    public: bytes = b""
    secret: bytes = b""
    kid: str = ""

    def __post_init__(self) -> None:
        for part in (self.public, self.secret):
            if len(part) not in (0, KEY_SIZE):
                raise Malformed(f"a key has {KEY_SIZE} bytes, not {len(part)}")
        if self.algorithm is Algorithm.ED25519:
            if self.secret:
                with needed_for("an Ed25519 key"):
                    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
                half = Ed25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw()
                if self.public not in (b"", half):
                    raise Malformed("the two halves of a key do not belong together")
                force_setattr(self, "public", half)
            identity = self.public
        else:
            identity = self.secret
            if self.public:
                raise Malformed("an HMAC key has a secret and no public half")
        if not identity:
            raise Malformed("a key needs a public half or a secret")
        text = b"duly key\0%b\0%b" % (self.algorithm.value.encode(), identity)
        force_setattr(self, "kid", blake2b(text, digest_size=8).hexdigest())

    @property
    def shown(self) -> str:
        """The text of the public key."""
        if self.algorithm is Algorithm.HMAC:
            return f"{self.algorithm.value} (secret)"
        return f"{self.algorithm.value}:{binascii.b2a_base64(self.public, newline=False).decode()}"

    @property
    def stored(self) -> str:
        """The text of the key as it is stored for verification. It may contain a shared secret, so it is not
        shown."""
        if self.algorithm is Algorithm.ED25519:
            return self.shown
        return f"{self.algorithm.value}:{binascii.b2a_base64(self.secret, newline=False).decode()}"

    @property
    def trusted(self) -> Key:
        """The key as a peer stores it: without its secret, unless that is a shared one."""
        return self if self.algorithm is Algorithm.HMAC else replace(self, secret=b"")

    @property
    def signer(self) -> Callable[[bytes], bytes]:
        """The function that signs bytes with this key."""
        if not self.secret:
            raise Malformed(f"key {self.kid} has no secret half here; it cannot sign")
        if self.algorithm is Algorithm.ED25519:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            return Ed25519PrivateKey.from_private_bytes(self.secret).sign
        secret = self.secret
        return lambda text: hmac.digest(secret, text, "sha256")

    @property
    def verifier(self) -> Callable[[bytes, bytes], bool]:
        """The function (signature, bytes) → whether this key signed these bytes."""
        if self.algorithm is Algorithm.HMAC:
            make = self.signer
            return lambda signature, text: hmac.compare_digest(signature, make(text))
        with needed_for("an Ed25519 signature"):
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        verify = Ed25519PublicKey.from_public_bytes(self.public).verify

        def fits(signature: bytes, text: bytes) -> bool:
            try:
                verify(signature, text)
            except InvalidSignature:
                return False
            return True

        return fits

    def __repr__(self) -> str:
        return f"Key({self.algorithm.value}, {self.kid})"  # a secret must not get into a log


def read_key(text: str) -> Key:
    """Parse a public key as written by `Key.shown`.

    >>> read_key("ed25519:O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik=").kid
    '82bf5aef22c848e4'
    """
    word, _, data = text.strip().partition(":")
    if word != Algorithm.ED25519.value:
        raise Malformed("a public key looks like ed25519:O2onv…; 'duly keys list' shows your own")
    return Key(Algorithm.ED25519, public=_from_base64(data))


def read_stored_key(text: str) -> Key:
    """Parse a key as written by `Key.stored`.

    >>> read_stored_key("hmac-sha256:ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=").kid
    'a654bd828d36d296'
    """
    word, _, data = text.partition(":")
    if word == Algorithm.HMAC.value:
        return Key(Algorithm.HMAC, secret=_from_base64(data))
    return read_key(text)


def _from_base64(data: str) -> bytes:
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error as problem:
        raise Malformed(f"the key is not base64: {problem}") from None


class TrustedKey(Struct, frozen=True):
    """A key that is trusted for this username; an HMAC key is shared with it."""

    name: str
    key: Key


class Keyring(Struct, frozen=True):
    """Our own username, our signing key, and the trusted keys of others.

    >>> key = Key(Algorithm.ED25519, secret=bytes(32))
    >>> ring = Keyring("A").trust("B", key)
    >>> ring.believed
    {('B', '82bf5aef22c848e4'): Key(ed25519, 82bf5aef22c848e4)}
    """

    name: str
    own: Key | None = None
    peers: tuple[TrustedKey, ...] = ()

    @property
    def believed(self) -> dict[tuple[str, str], Key]:
        """The trusted keys by (username, key id), including our own."""
        ours = [] if self.own is None else [TrustedKey(self.name, self.own)]
        return {(peer.name, peer.key.kid): peer.key for peer in (*self.peers, *ours)}

    @property
    def shared(self) -> dict[str, Key]:
        """The newest secret shared with each username. It signs messages to that username; our own key signs
        the rest."""
        return {peer.name: peer.key for peer in self.peers if peer.key.secret}

    def trust(self, name: str, key: Key) -> Keyring:
        """Return a keyring that also trusts this key for this username."""
        kept = (p for p in self.peers if (p.name, p.key.kid) != (name, key.kid))
        return replace(self, peers=(*kept, TrustedKey(name, key.trusted)))

    def forget(self, name: str, kid: str = "") -> Keyring:
        """Return a keyring that no longer trusts this key, or any key, of this username."""
        return replace(
            self, peers=tuple(p for p in self.peers if p.name != name or kid not in ("", p.key.kid))
        )


def canonical(fields: Iterable[str | bytes | int]) -> bytes:
    """Return the bytes that are signed: each field prefixed with its length in four bytes. Numbers are
    written in decimal.

    >>> canonical(["ab", 7])
    b'\\x00\\x00\\x00\\x02ab\\x00\\x00\\x00\\x017'
    """
    parts: list[bytes] = []
    for field in fields:
        raw = field if isinstance(field, bytes) else str(field).encode()
        parts += (len(raw).to_bytes(4, "big"), raw)
    return b"".join(parts)
