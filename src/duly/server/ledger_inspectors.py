"""Inspectors of the items and streams in a ledger, for `duly check`.

Each inspector belongs to one part of the hub and knows its storage format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from duly.apps.alerts.profiles import ADDRESSES
from duly.errors import SecretKeyMissing
from duly.identity.account_directory import GRANTS, PRINCIPALS, TOKENS
from duly.identity.model import StoredAccount
from duly.runtime import durable_totals, trail
from duly.server import audit_chain
from duly.server.dashboard.access import USERS, DashboardUser
from duly.storage import secret_box
from duly.storage.check import Inspector
from duly.storage.invariants import BrokenInvariant, Invariant
from duly.storage.secret_box import SecretBox

_ENCRYPTED: Final = re.compile(rb"sealed:1:([0-9a-f]+):")


class AccountInspector:
    """Checks that accounts, tokens and grants refer to each other."""

    invariants: Sequence[Invariant] = (
        Invariant(
            "account-readable",
            "every account can be read",
            "remove it with 'duly remove' and add it again, or restore a backup",
        ),
        Invariant(
            "account-references",
            "every token and every grant belongs to an account that is there",
            "'duly revoke' the grant that is named, or restore a backup",
        ),
    )

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self._names: set[str] = set()
        self._referred: list[tuple[str, str]] = []

    def item(self, bucket: str, name: str, body: bytes) -> Iterator[BrokenInvariant]:
        """Note accounts, and items that refer to one."""
        if bucket == PRINCIPALS:
            self._names.add(name)
            try:
                msgspec.json.decode(body, type=StoredAccount)
            except msgspec.DecodeError as problem:
                yield BrokenInvariant("account-readable", f"the account {name!r}: {problem}")
        elif bucket == GRANTS:
            app, _, device = name.partition("/")
            self._referred += [(app, f"the grant {name!r}"), (device, f"the grant {name!r}")]
        elif bucket == TOKENS:
            self._referred.append((body.decode(errors="replace"), f"the token {name[:8]}…"))

    def entry(self, stream: str, n: int, body: bytes) -> Iterable[BrokenInvariant]:
        """Do nothing: accounts have no streams."""
        return ()

    def finish(self) -> Iterator[BrokenInvariant]:
        """Report references to missing accounts."""
        for name, what in self._referred:
            if name not in self._names:
                yield BrokenInvariant("account-references", f"{what} names {name!r}, which is not an account")


class SecretInspector:
    """Checks that encrypted secrets belong to the ledger's key, and can be decrypted with it."""

    invariants: Sequence[Invariant] = (
        Invariant(
            "secret-key",
            "every encrypted secret is encrypted with the key that the ledger names",
            "set the secrets that are named anew, or restore a backup",
        ),
        Invariant(
            "secret-openable",
            "every encrypted secret can be opened at its place",
            "set the secrets that are named anew ('duly profile set', 'duly add'), or restore a backup",
        ),
    )

    def __init__(self, box: SecretBox | None, why: str = "the secret key is not here") -> None:
        self._box = box
        self.skipped = {} if box else {"secret-openable": f"{why}; name it with --secret-key"}
        self._keys: list[tuple[str, str]] = []
        self._needed = ""

    def item(self, bucket: str, name: str, body: bytes) -> Iterator[BrokenInvariant]:
        """Try to decrypt the secrets of an item."""
        keys = _ENCRYPTED.findall(body)
        if (bucket, name) == (secret_box.BUCKET, secret_box.NAME) and keys:
            self._needed = keys[0].decode()
        self._keys += [(key.decode(), f"{bucket}/{name}") for key in keys]
        if self._box is None or not keys:
            return
        try:
            for encrypted, place in _encrypted_in(bucket, name, body):
                self._box.decrypt(encrypted, place)
        except (SecretKeyMissing, msgspec.DecodeError) as problem:
            yield BrokenInvariant("secret-openable", f"{bucket}/{name}: {problem}")

    def entry(self, stream: str, n: int, body: bytes) -> Iterable[BrokenInvariant]:
        """Do nothing: streams hold no secrets."""
        return ()

    def finish(self) -> Iterator[BrokenInvariant]:
        """Report secrets that are encrypted with another key than the ledger's."""
        for key, where in self._keys:
            if key != self._needed:
                named = self._needed or "none"
                yield BrokenInvariant(
                    "secret-key", f"{where} is encrypted with key {key}, the ledger names {named}"
                )


def _encrypted_in(bucket: str, name: str, body: bytes) -> Iterator[tuple[str, str]]:
    """Yield the encrypted values of an item, each with its place."""
    if bucket == secret_box.BUCKET:
        yield body.decode(), secret_box.BUCKET
    elif bucket in (secret_box.SHARED, ADDRESSES):
        yield body.decode(), f"{bucket}/{name}"
    elif bucket == PRINCIPALS:
        yield msgspec.json.decode(body, type=StoredAccount).password, f"{PRINCIPALS}/{name}/password"
    elif bucket == USERS:
        yield msgspec.json.decode(body, type=DashboardUser).password, f"{USERS}/{name}"


class AuditInspector:
    """Checks the audit chain, in which each entry names the hash of the one before it."""

    invariants: Sequence[Invariant] = (
        Invariant(
            "audit-chain",
            "every entry of the audit chain follows the one before it, and the last is the one written last",
            "'duly audit verify' shows where; find out who could write to the ledger",
        ),
    )

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self._head = audit_chain.NOTHING_BEFORE
        self._last = audit_chain.NOTHING_BEFORE
        self._broken = False

    def item(self, bucket: str, name: str, body: bytes) -> Iterable[BrokenInvariant]:
        """Note the head of the chain."""
        if (bucket, name) == (audit_chain.BUCKET, audit_chain.HEAD):
            self._head = body.decode(errors="replace")
        return ()

    def entry(self, stream: str, n: int, body: bytes) -> Iterator[BrokenInvariant]:
        """Follow the chain; a break is reported once."""
        if stream != audit_chain.STREAM:
            return
        try:
            before = msgspec.json.decode(body, type=audit_chain.AuditEntry).before
        except msgspec.DecodeError:
            before = "unreadable"
        if before != self._last and not self._broken:
            self._broken = True
            yield BrokenInvariant("audit-chain", f"entry {n} does not follow the one before it")
        self._last = sha256(body).hexdigest()

    def finish(self) -> Iterator[BrokenInvariant]:
        """Compare the last entry with the head."""
        if self._last != self._head and not self._broken:
            yield BrokenInvariant("audit-chain", "the last entry is not the one that was written last")


class RecordInspector:
    """Checks trails and totals: the hops and counters that hubs have recorded."""

    invariants: Sequence[Invariant] = (
        Invariant(
            "trail-readable",
            "every entry of a trail can be read, and its hub is listed",
            "the trail is for people: messages are not affected; report it",
        ),
        Invariant(
            "totals-readable",
            "the totals of every hub can be read, and none is below zero",
            "the totals are for people: messages are not affected; report it",
        ),
    )

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self._hubs: set[str] = set()

    def item(self, bucket: str, name: str, body: bytes) -> Iterator[BrokenInvariant]:
        """Read totals, and note hubs that have a trail."""
        if bucket == trail.HUBS:
            self._hubs.add(name)
        elif bucket == durable_totals.BUCKET:
            try:
                row = msgspec.msgpack.decode(body, type=durable_totals.TotalRow)
                if any(value < 0 for _, _, value in row.totals):
                    yield BrokenInvariant("totals-readable", f"a total of {name!r} is below zero")
            except msgspec.DecodeError as problem:
                yield BrokenInvariant("totals-readable", f"the totals of {name!r}: {problem}")

    def entry(self, stream: str, n: int, body: bytes) -> Iterator[BrokenInvariant]:
        """Read an entry of a trail."""
        if not stream.startswith(trail.STREAMS):
            return
        if not trail.is_readable(body):
            yield BrokenInvariant("trail-readable", f"entry {n} of {stream!r} cannot be read")
        if stream.removeprefix(trail.STREAMS) not in self._hubs:
            self._hubs.add(stream.removeprefix(trail.STREAMS))
            yield BrokenInvariant("trail-readable", f"{stream!r} is of a hub that is not listed")

    def finish(self) -> Iterable[BrokenInvariant]:
        """Do nothing: there is nothing left to report."""
        return ()


def hub_inspectors(box: SecretBox | None, why: str = "the secret key is not here") -> list[Inspector]:
    """Return the inspectors of everything that a hub stores; `why` says why there is no box."""
    return [AccountInspector(), SecretInspector(box, why), AuditInspector(), RecordInspector()]
