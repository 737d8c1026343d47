"""Signatures on FD messages: the optional fields `sig` and `kid`, which old peers ignore.

The law: everything with a meaning is covered, so that a signature is valid only for its intended reader. It
covers the format's name, the prefix, the kind, the signer and the reader (even where the wire names neither),
the id, and per kind action, times in whole seconds, content, and `order` or `heartbeat` if there is one. So
an `ack` cannot pass for a `complete`, nor B's task for C's, and only the receiver of a task can answer it. A
repeat of the same message passes: the inbox knows its id, and a message older than the inbox remembers has
expired, which is covered as well.

The signature covers what the reader will decode, so a message is encoded and decoded once before signing.
Content is signed as JSON, independent of how a string is escaped and of guesses whether it is base64: `s` and
the characters of a string (`b` or `t` where `enc` says base64 or text), `j` and the text of any other value,
`n` for nothing or null.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from duly.core.signing import Key, Keyring, canonical
from duly.core.units import MS, SECOND
from duly.errors import Forged, UnknownKey, Unsigned
from duly.wire import fd
from duly.wire.fd import FdKind, Form

FORMAT: Final = "duly-fd-1"

SignedFd = TypeVar("SignedFd", fd.FdPending, fd.FdAck, fd.FdComplete, fd.FdFailed, fd.FdStatus)

Signer: TypeAlias = tuple[str, Callable[[bytes], bytes]]
Verifier: TypeAlias = Callable[[bytes, bytes], bool]

_KINDS: Final[dict[type[fd.Fd], FdKind]] = {
    fd.FdPending: FdKind.PENDING,
    fd.FdAck: FdKind.ACK,
    fd.FdComplete: FdKind.COMPLETE,
    fd.FdFailed: FdKind.FAILED,
    fd.FdStatus: FdKind.STATUS,
}

_string: Final = msgspec.json.Decoder(str).decode


class FdSignatures:
    """Signs and checks messages with a node's keys. With `required`, unsigned messages are refused; otherwise
    only wrongly signed ones.

    >>> from duly.core.signing import Algorithm, Key
    >>> key = Key(Algorithm.ED25519, secret=bytes(32))
    >>> a, b = FdSignatures(Keyring("A", own=key)), FdSignatures(Keyring("B").trust("A", key), required=True)
    >>> task = a.sign(fd.FdPending("A", "B", "1", "turn_on"), to="B")
    >>> b.check(fd.decode_pending(fd.encode(task)), by="A")
    True
    """

    def __init__(self, keys: Keyring, *, prefix: str = fd.PREFIX, required: bool = False) -> None:
        self.keys = keys
        self.required = required
        self._prefix = prefix
        self._own = None if keys.own is None else _signer(keys.own)
        self._shared = {name: _signer(key) for name, key in keys.shared.items()}
        self._silent = self._own is None and not self._shared and not required
        """nothing is signed"""
        self._believed = keys.believed
        self._verifiers: dict[tuple[str, str], Verifier] = {}

    def sign(self, message: SignedFd, to: str = "", form: Form = Form.BASE64) -> SignedFd:
        """Return the message with our signature, to be encoded in exactly this form. `to` is its reader; a
        status is for all readers. Without a key for that reader it stays unsigned, unless signing is
        required."""
        signer = self._shared.get(to, self._own)
        if signer is None:
            if self.required and to:
                raise UnknownKey(f"there is no key to sign with for {to}; 'duly keys new' makes one")
            return replace(message, sig="", kid="") if message.sig else message
        kid, sign = signer
        read = fd.decode(_KINDS[type(message)], fd.encode(message, form))
        assert read is not None
        signature = sign(self._canonical(read, self.keys.name, to))
        return replace(message, sig=binascii.b2a_base64(signature, newline=False).decode(), kid=kid)

    def encode(self, message: SignedFd, to: str = "", form: Form = Form.BASE64) -> bytes:
        """Return the bytes of the signed message."""
        return fd.encode(message if self._silent and not message.sig else self.sign(message, to, form), form)

    def check(self, message: fd.Fd, by: str) -> bool:
        """Refuse a message that this user did not write for us and for this place; return whether a signature
        proves it. `by` is a task's sender, for an answer the task's receiver, for a status the name in its
        topic."""
        if not message.sig:
            if self.required:
                raise Unsigned(f"{by} did not sign this, but this receiver requires signatures")
            return False
        verify = self._verifier(by, message.kid)
        if verify is None:
            if not self.required:
                return False  # equivalent to unsigned: an attacker would have left the signature out
            raise UnknownKey(f"signed with key {message.kid[:40]!r}, which is not trusted as one of {by}")
        us = "" if isinstance(message, fd.FdStatus) else self.keys.name
        try:
            signature = binascii.a2b_base64(message.sig, strict_mode=True)
        except ValueError:
            signature = b""
        if not verify(signature, self._canonical(message, by, us)):
            raise Forged(f"the signature is not one of {by} on this message for {us or 'every node'}")
        if isinstance(message, fd.FdPending) and (message.sender, message.receiver or us) != (by, us):
            raise Forged(f"it names {message.sender} and {message.receiver}, and was signed for other names")
        return True

    def open_status(self, text: bytes, by: str) -> fd.FdStatus | None:
        """Return a checked status; None if it was removed, which cannot be signed."""
        status = fd.decode_status(text)
        if status is not None:
            self.check(status, by)
        elif self.required:
            raise Unsigned(f"the status of {by} was removed; a removal cannot be signed")
        return status

    def _verifier(self, by: str, kid: str) -> Verifier | None:
        found = self._verifiers.get((by, kid))
        if found is None and (key := self._believed.get((by, kid))) is not None:
            found = self._verifiers[by, kid] = key.verifier
        return found

    def _canonical(self, message: fd.Fd, signer: str, reader: str) -> bytes:
        place = (FORMAT, self._prefix, _KINDS[type(message)].value, signer, reader)
        match message:
            case fd.FdPending(_, _, msg_id, action, time, exp, payload):
                times = (time // SECOND, exp // SECOND)
                order = (message.order,) if message.order else ()
                return canonical((*place, msg_id, action, *times, _tagged(payload), *order))
            case fd.FdAck(msg_id, progress=content):
                return canonical((*place, msg_id, _tagged(content)))
            case fd.FdComplete(msg_id, content) | fd.FdFailed(msg_id, content):
                return canonical((*place, msg_id, _tagged(content)))
            case fd.FdStatus() as it:
                online = "" if it.online is None else int(it.online)
                numbers = ("" if n is None else n for n in (it.battery, it.rssi))
                texts = (it.ip, it.version, it.uptime // SECOND, it.session)
                heartbeat = (it.heartbeat // MS,) if it.heartbeat else ()
                return canonical(
                    (*place, it.time // SECOND, online, *numbers, *texts, _tagged(it.data), *heartbeat)
                )


def _signer(key: Key) -> Signer:
    return key.kid, key.signer


def _tagged(content: fd.Content) -> bytes:
    raw = content.raw
    if raw in (b"", b"null"):
        return b"n"
    if raw[:1] != b'"':
        return b"j" + raw
    tag = b"s" if not content.sure else b"b" if content.form is Form.BASE64 else b"t"
    return tag + _string(raw).encode()
