"""Profiles: the recipients of alerts, the order in which they are notified, and their quiet hours.

A profile names addresses by their labels, and so does everything that is stored or shown about an alert: the
addresses, which may contain passwords, have a bucket of their own. An address is kept when the profiles that
name it change, since deliveries to it may be under way. The step of an escalation is the round of a delivery,
and its time is the due time of that delivery; no other timer is needed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Struct

from duly.apps.alerts.channels import check_url, declared, is_outside, is_webhook, label_of
from duly.apps.alerts.channels.local import OUTSIDE
from duly.apps.alerts.channels.webhook import key_of, new_secret
from duly.core.fanout.plan import DoubtPolicy, PlannedDelivery
from duly.core.fanout.recipient_queue import RecipientPolicy
from duly.core.messages import Message
from duly.core.monitor.signals import Severity
from duly.core.operations import DropItem, PutItem, Write
from duly.core.units import DAY, MINUTE, SECOND
from duly.errors import Malformed
from duly.identity.account_names import check_name
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox, is_encrypted

LOG: Final = logging.getLogger("duly.alerts")

PROFILES: Final = "profiles"
ADDRESSES: Final = "addresses"
DEFAULT: Final = "default"
"""The profile of alerts that name a missing one."""

CONFIGURED: Final = "alerts-configured"
VERSION: Final = "version"
"""An item that changes with every profile and silence, so that hubs on one ledger notice a change with one
read."""

STEPS: Final = 20
QUIET: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")


def changed() -> PutItem:
    """Return the write that belongs to every change of a profile or a silence, so that other hubs notice
    it."""
    return PutItem(CONFIGURED, VERSION, secrets.token_bytes(8))


class EscalationStep(Struct, frozen=True):
    """The recipients of one step, and how long after the alert they are notified (µs): those of the first
    step at once, later ones unless the alert was acknowledged by then."""

    after: int
    to: tuple[str, ...]
    """labels of addresses"""


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The recipients of alerts and the rules for notifying them. Times of day are in `zone`."""

    steps: tuple[EscalationStep, ...] = ()
    quiet: str = ""
    """for example 22:00-07:00: only critical alerts are delivered then, the others afterwards"""
    zone: str = "UTC"
    lasts: int = DAY
    """how long a delivery is tried"""
    tries: int = 0
    """the most attempts per delivery; 0 sets no limit"""
    most: int = 10
    """messages to one recipient in a minute; further alerts are sent together; 0 sets no limit"""
    together: int = MINUTE
    """how long the later events of one episode wait for each other"""
    heartbeat: int = 0
    """the interval of heartbeats of a sentinel that promises none itself; 0 demands none"""
    grace: int = MINUTE
    """how much later than promised a heartbeat may be"""
    silent: Severity = Severity.CRITICAL
    """the severity of the alert about a silent sentinel"""

    def __post_init__(self) -> None:
        if self.quiet and not QUIET.fullmatch(self.quiet):
            raise Malformed(f"quiet hours are written 22:00-07:00, not {self.quiet!r}")
        try:
            ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError):
            raise Malformed(
                f"{self.zone!r} is not a time zone; write one like UTC, Europe/Berlin, Asia/Shanghai"
            ) from None
        if self.lasts < SECOND:
            raise Malformed("a delivery must be tried for at least a second")
        if self.heartbeat < 0 or 0 < self.heartbeat < SECOND or self.grace < 0:
            raise Malformed("heartbeats must be at least a second apart, and their grace 0 seconds or more")
        if self.tries < 0:
            raise Malformed("the number of tries must be 1 or more, or 0 for no limit")
        if len(self.steps) > STEPS:
            raise Malformed(f"an escalation has at most {STEPS} steps")
        if any(step.after < 0 for step in self.steps):
            raise Malformed("a step of an escalation must come after the alert, not before it")
        RecipientPolicy(most=self.most, together=self.together)

    def plan(self, now: int, *, urgent: bool) -> tuple[PlannedDelivery, ...]:
        """Return the deliveries of a new alert."""
        begins = now if urgent or not self.quiet else self._after_quiet(now)
        opens = begins if begins > now else 0
        return tuple(
            PlannedDelivery(label, begins + step.after, begins + step.after + self.lasts, round_, opens)
            for round_, step in enumerate(self.steps)
            for label in step.to
        )

    @property
    def recipient_policy(self) -> RecipientPolicy:
        """How many messages a recipient of this profile gets."""
        return RecipientPolicy(most=self.most, together=self.together)

    def _after_quiet(self, now: int) -> int:
        """Return the present time, or the end of the quiet hours.

        >>> night = Profile(quiet="22:00-07:00")
        >>> three = 3 * 3_600_000_000
        >>> night._after_quiet(three) // 3_600_000_000, night._after_quiet(4 * three) // 3_600_000_000
        (7, 12)
        """
        found = QUIET.fullmatch(self.quiet)
        assert found is not None
        begin_h, begin_m, end_h, end_m = map(int, found.groups())
        begin, end = time_of_day(begin_h, begin_m), time_of_day(end_h, end_m)
        here = datetime.fromtimestamp(now / SECOND, UTC).astimezone(ZoneInfo(self.zone))
        clock = here.time().replace(tzinfo=None)
        night = begin > end
        if not (begin <= clock or clock < end if night else begin <= clock < end):
            return now
        over = here.replace(hour=end.hour, minute=end.minute, second=0, microsecond=0)
        if over <= here:
            over += timedelta(days=1)
        return round(over.timestamp()) * SECOND


class ChannelAddress(Struct, frozen=True, omit_defaults=True):
    """The address behind a label; it is never shown."""

    url: str
    secret: str = ""


class ProfileDraft(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile as an operator writes it, with addresses instead of labels."""

    send: tuple[str, ...] = ()
    escalate: tuple[tuple[float, str], ...] = ()
    """(seconds, address)"""
    secret: str = ""
    quiet: str = ""
    zone: str = "UTC"
    lasts: float = 86_400.0
    tries: int = 0
    most: int = 10
    together: float = 60.0
    heartbeat: float = 0.0
    grace: float = 60.0
    silent: Severity = Severity.CRITICAL
    nobody: bool = False
    """confirms that this profile has no recipients"""


class Profiles:
    """The profiles and addresses of one ledger, in memory; `refresh` reads them."""

    def __init__(self, ledger: Ledger, *, private: bool = True, box: SecretBox | None = None) -> None:
        self._ledger = ledger
        self._box = box
        self._private = private
        self._profiles: dict[str, Profile] = {}
        self._addresses: dict[str, ChannelAddress] = {}
        self._policies: dict[str, RecipientPolicy] = {}
        self._missing: set[str] = set()
        """labels that the ledger did not know when it was last read"""

    async def refresh(self) -> None:
        """Read all profiles and addresses again."""
        self._missing.clear()
        profiles, addresses = await self._ledger.bucket(PROFILES), await self._ledger.bucket(ADDRESSES)
        self._profiles = {name: msgspec.json.decode(body, type=Profile) for name, body in profiles.items()}
        self._addresses = {
            label: address
            for label, body in addresses.items()
            if (address := self._decrypt(label, body)) is not None
        }
        self._index_policies()

    def warn_of_outside_files(self) -> None:
        """Log which profiles name a file outside of the folder of files, as older versions allowed."""
        outside = {label for label, address in self._addresses.items() if is_outside(address.url)}
        for name, profile in self._profiles.items():
            for label in sorted({label for step in profile.steps for label in step.to} & outside):
                LOG.warning(
                    "profile %s: nothing is written to %s: %s; 'duly profile set %s' replaces it",
                    name, label, OUTSIDE, name,
                )  # fmt: skip

    async def encrypt_addresses(self) -> int:
        """Encrypt the addresses that an older version has stored in plain; returns how many there were."""
        plain = [
            PutItem(ADDRESSES, label, self._encrypt(label, msgspec.json.decode(body, type=ChannelAddress)))
            for label, body in (await self._ledger.bucket(ADDRESSES)).items()
            if self._box is not None and not is_encrypted(body.decode())
        ]
        if plain:
            await self._ledger.write(*plain)
        return len(plain)

    def _encrypt(self, label: str, address: ChannelAddress) -> bytes:
        body = msgspec.json.encode(address)
        return body if self._box is None else self._box.encrypt(body.decode(), _box_context(label)).encode()

    def _decrypt(self, label: str, body: bytes) -> ChannelAddress | None:
        """Return the address; None if it is encrypted and there is no key, so that only its label can be
        shown."""
        text = body.decode()
        if self._box is not None:
            text = self._box.decrypt(text, _box_context(label))
        elif is_encrypted(text):
            return None
        return msgspec.json.decode(text, type=ChannelAddress)

    def _index_policies(self) -> None:
        """Give a recipient that several profiles name the most generous of their limits."""
        policies: dict[str, RecipientPolicy] = {}
        for profile in self._profiles.values():
            for step in profile.steps:
                for label in step.to:
                    other = policies.get(label)
                    if other is None or not profile.most or 0 < other.most < profile.most:
                        policies[label] = profile.recipient_policy
        self._policies = policies

    async def knows(self, name: str) -> bool:
        """Return whether there is a profile for alerts that name this one; it may be one that another hub has
        just stored."""
        if self.get(name) is None and not self._ledger.sole:
            for one in (name, DEFAULT):
                if await self._ledger.item(PROFILES, one) is not None:
                    await self.refresh()
                    break
        return self.get(name) is not None

    # ── from memory ──────────────────────────────────────────────────────────────────────────────

    def get(self, name: str) -> Profile | None:
        """Return the profile for alerts that name this one; the default profile if it is missing."""
        return self._profiles.get(name) or self._profiles.get(DEFAULT)

    @property
    def fallback(self) -> Profile | None:
        """The profile whose recipients get critical alerts that reached no other recipient."""
        return self._profiles.get(DEFAULT)

    def tries(self, message: Message) -> int:
        """Return the most attempts for a delivery of this alert; 0 for no limit."""
        profile = self.get(message.recipient)
        return 0 if profile is None else profile.tries

    def all(self) -> dict[str, Profile]:
        """Return all profiles, sorted by name."""
        return dict(sorted(self._profiles.items()))

    def named(self, name: str) -> Profile:
        """Return the profile of this name; raises `Malformed` if there is none."""
        if name not in self._profiles:
            raise Malformed(f"there is no profile {name!r}; 'duly profile list' shows which there are")
        return self._profiles[name]

    def address(self, label: str) -> ChannelAddress | None:
        """Return the address behind a label."""
        return self._addresses.get(label)

    async def find_address(self, label: str) -> ChannelAddress | None:
        """Return the address behind a label; it may be one that another hub has just stored."""
        if label not in self._addresses and label not in self._missing and not self._ledger.sole:
            await self.refresh()
            if label not in self._addresses:
                self._missing.add(label)
        return self._addresses.get(label)

    def recipient_policy(self, label: str) -> RecipientPolicy:
        """Return how many messages a recipient gets."""
        return self._policies.get(label, _DEFAULT_POLICY)

    def doubt(self, label: str) -> DoubtPolicy:
        """Return what follows an attempt of which it is not known whether it arrived."""
        address = self._addresses.get(label)
        return DoubtPolicy.STOP if address is None else declared(address.url)

    # ── changing: in the ledger, then in memory ──────────────────────────────────────────────────

    async def set(self, name: str, draft: ProfileDraft) -> tuple[Profile, dict[str, str]]:
        """Store a profile. Returns it with the secrets made for new webhooks, which cannot be shown again."""
        check_name(name)
        made: dict[str, str] = {}
        writes: list[Write] = []
        steps: dict[int, list[str]] = {}
        for after, url in [(0.0, url) for url in draft.send] + list(draft.escalate):
            label, write, secret = await self._prepare_address(url, draft.secret)
            writes += write
            if secret:
                made[label] = secret
            labels = steps.setdefault(round(after * SECOND), [])
            if label not in labels:
                labels.append(label)
        profile = Profile(
            steps=tuple(EscalationStep(after, tuple(to)) for after, to in sorted(steps.items())),
            quiet=draft.quiet,
            zone=draft.zone,
            lasts=round(draft.lasts * SECOND),
            tries=draft.tries,
            most=draft.most,
            together=round(draft.together * SECOND),
            heartbeat=round(draft.heartbeat * SECOND),
            grace=round(draft.grace * SECOND),
            silent=draft.silent,
        )
        if not profile.steps and not draft.nobody:
            raise Malformed(
                f"profile {name!r} names no recipient; name an address with --send, or use --nobody if its "
                "alerts are only to be listed"
            )
        writes.append(PutItem(PROFILES, name, msgspec.json.encode(profile)))
        await self._ledger.write(*writes, changed())
        await self.refresh()
        return profile, made

    async def add_address(self, url: str) -> str:
        """Store an address that no profile names; returns its label."""
        label, writes, _ = await self._prepare_address(url, "")
        if writes:
            await self._ledger.write(*writes, changed())
            await self.refresh()
        return label

    async def remove(self, name: str) -> bool:
        """Remove a profile; returns whether there was one. Its addresses stay."""
        gone = await self._ledger.apply(DropItem(PROFILES, name), changed())
        await self.refresh()
        return gone

    async def _prepare_address(self, url: str, secret: str) -> tuple[str, list[Write], str]:
        """Return the label of an address, the writes that store it, and its secret if that is new."""
        await asyncio.to_thread(check_url, url, private=self._private)  # some services are slow to load
        label = self._label(url)
        known = self._addresses.get(label)
        if known is not None and known.url != url:
            raise Malformed("two addresses have the same label by chance; change one of them a little")
        webhook = is_webhook(url)
        if secret and webhook:
            key_of(secret)
        elif known is not None:
            return label, [], ""
        made = "" if secret or not webhook else new_secret()
        address = ChannelAddress(url, (secret or made) if webhook else "")
        return label, [PutItem(ADDRESSES, label, self._encrypt(label, address))], made

    def _label(self, url: str) -> str:
        """Return the label of an address; a known address keeps its own."""
        known = (label for label, address in self._addresses.items() if address.url == url)
        return next(known, None) or label_of(url, b"" if self._box is None else self._box.tag_key)


def _box_context(label: str) -> str:
    return f"{ADDRESSES}/{label}"


_DEFAULT_POLICY: Final = RecipientPolicy()
