"""Profiles: who is told of an alert, in which order, and when they are left in peace.

The laws. A profile names addresses; what is stored of an alert names only their labels, and so does
everything that is shown: the addresses, which may hold passwords, stay on their own bucket. An address is
kept when the profiles that named it are changed, since deliveries to it may still be under way. The step that
an escalation is at is the delivery's round, and its time is the delivery's due: nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Struct

from duly.apps.alerts.channels import check_url, declared, label_of
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
from duly.storage.secret_box import SecretBox, is_sealed

PROFILES: Final = "profiles"
ADDRESSES: Final = "addresses"
DEFAULT: Final = "default"
"""Who is told when an alert names a profile that is not there."""

CONFIGURED: Final = "alerts-configured"
VERSION: Final = "version"
"""What hubs on one ledger compare to know whether profiles or silences have changed."""

STEPS: Final = 20
QUIET: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")


def changed() -> PutItem:
    """Goes with every change of a profile or a silence: other hubs on the ledger see that they must look."""
    return PutItem(CONFIGURED, VERSION, secrets.token_bytes(8))


class EscalationStep(Struct, frozen=True):
    """Whom to tell, how long after the alert (µs): the first at once, the others if nobody has said by then
    that they take care of it."""

    after: int
    to: tuple[str, ...]
    """labels"""


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is told. Times of day are in `zone`."""

    steps: tuple[EscalationStep, ...] = ()
    quiet: str = ""
    """22:00-07:00: only what is critical is told then, the rest afterwards"""
    zone: str = "UTC"
    lasts: int = DAY
    """how long a delivery is tried"""
    tries: int = 0
    """how often at most; 0: as often as fits"""
    most: int = 10
    """messages to one recipient in a minute; what is more goes together; 0: no limit"""
    together: int = MINUTE
    """how long the later events of one episode wait for each other"""
    heartbeat: int = 0
    """how often a sentinel of this profile has to show that it is there, if it promises nothing itself; 0: it
    need not"""
    grace: int = MINUTE
    """how much later than promised a heartbeat may be"""
    silent: Severity = Severity.CRITICAL
    """how bad it is that a sentinel has fallen silent"""

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
            raise Malformed("a delivery is tried for at least a second")
        if self.heartbeat < 0 or 0 < self.heartbeat < SECOND or self.grace < 0:
            raise Malformed("a heartbeat comes every second at most, with a grace of 0 seconds or more")
        if self.tries < 0:
            raise Malformed("a delivery is tried so often, once or more; 0 is as often as fits")
        if len(self.steps) > STEPS:
            raise Malformed(f"an escalation has at most {STEPS} steps")
        if any(step.after < 0 for step in self.steps):
            raise Malformed("a step of an escalation comes after the alert, not before it")
        RecipientPolicy(most=self.most, together=self.together)

    def plan(self, now: int, *, urgent: bool) -> tuple[PlannedDelivery, ...]:
        """The deliveries of an alert that has just come in."""
        begins = now if urgent or not self.quiet else self._after_quiet(now)
        return tuple(
            PlannedDelivery(label, begins + step.after, begins + step.after + self.lasts, round_)
            for round_, step in enumerate(self.steps)
            for label in step.to
        )

    @property
    def route(self) -> RecipientPolicy:
        return RecipientPolicy(most=self.most, together=self.together)

    def _after_quiet(self, now: int) -> int:
        """Now, or when the quiet hours are over.

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
    """Where a label leads. Nobody is shown one."""

    url: str
    secret: str = ""


class ProfileDraft(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile as somebody writes it down: addresses, not labels."""

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
    """it is meant that this profile tells nobody"""


class Profiles:
    """The profiles and addresses of one ledger, in memory. `refresh` before use."""

    def __init__(self, ledger: Ledger, *, private: bool = True, box: SecretBox | None = None) -> None:
        self._ledger = ledger
        self._box = box
        self._private = private
        self._profiles: dict[str, Profile] = {}
        self._addresses: dict[str, ChannelAddress] = {}
        self._routes: dict[str, RecipientPolicy] = {}

    async def refresh(self) -> None:
        """Read everything again."""
        profiles, addresses = await self._ledger.bucket(PROFILES), await self._ledger.bucket(ADDRESSES)
        self._profiles = {name: msgspec.json.decode(body, type=Profile) for name, body in profiles.items()}
        self._addresses = {
            label: address
            for label, body in addresses.items()
            if (address := self._decrypt(label, body)) is not None
        }
        self._note_routes()

    async def encrypt_addresses(self) -> int:
        """Seal the addresses that an older version has stored in plain; how many there were."""
        plain = [
            PutItem(ADDRESSES, label, self._encrypt(label, msgspec.json.decode(body, type=ChannelAddress)))
            for label, body in (await self._ledger.bucket(ADDRESSES)).items()
            if self._box is not None and not is_sealed(body.decode())
        ]
        if plain:
            await self._ledger.write(*plain)
        return len(plain)

    def _encrypt(self, label: str, address: ChannelAddress) -> bytes:
        body = msgspec.json.encode(address)
        return body if self._box is None else self._box.seal(body.decode(), _place(label)).encode()

    def _decrypt(self, label: str, body: bytes) -> ChannelAddress | None:
        """None if it is sealed and there is no key here: its label can be shown all the same."""
        text = body.decode()
        if self._box is not None:
            text = self._box.open(text, _place(label))
        elif is_sealed(text):
            return None
        return msgspec.json.decode(text, type=ChannelAddress)

    def _note_routes(self) -> None:
        """A recipient that several profiles name can take what the most generous one says."""
        routes: dict[str, RecipientPolicy] = {}
        for profile in self._profiles.values():
            for step in profile.steps:
                for label in step.to:
                    other = routes.get(label)
                    if other is None or not profile.most or 0 < other.most < profile.most:
                        routes[label] = profile.route
        self._routes = routes

    async def knows(self, name: str) -> bool:
        """Whether there is a profile for alerts that name this one; if not here, then in the ledger, where
        another hub may just have put it."""
        if self.get(name) is None and not self._ledger.sole:
            for one in (name, DEFAULT):
                if await self._ledger.item(PROFILES, one) is not None:
                    await self.refresh()
                    break
        return self.get(name) is not None

    # ── asking: from memory ──────────────────────────────────────────────────────────────────────

    def get(self, name: str) -> Profile | None:
        return self._profiles.get(name) or self._profiles.get(DEFAULT)

    @property
    def fallback(self) -> Profile | None:
        """Who is told of something critical that could not be told to anybody else."""
        return self._profiles.get(DEFAULT)

    def tries(self, message: Message) -> int:
        profile = self.get(message.recipient)
        return 0 if profile is None else profile.tries

    def all(self) -> dict[str, Profile]:
        return dict(sorted(self._profiles.items()))

    def named(self, name: str) -> Profile:
        if name not in self._profiles:
            raise Malformed(f"there is no profile {name!r}; 'duly profile list' shows which there are")
        return self._profiles[name]

    def address(self, label: str) -> ChannelAddress | None:
        return self._addresses.get(label)

    def route(self, label: str) -> RecipientPolicy:
        return self._routes.get(label, _ORDINARY)

    def doubt(self, label: str) -> DoubtPolicy:
        address = self._addresses.get(label)
        return DoubtPolicy.STOP if address is None else declared(address.url)

    # ── changing: in the ledger, then in memory ──────────────────────────────────────────────────

    async def set(self, name: str, draft: ProfileDraft) -> tuple[Profile, dict[str, str]]:
        """Store a profile; it, and the secrets made for new webhooks, which cannot be had again."""
        check_name(name)
        made: dict[str, str] = {}
        writes: list[Write] = []
        steps: dict[int, list[str]] = {}
        for after, url in [(0.0, url) for url in draft.send] + list(draft.escalate):
            label, write, secret = await self._note(url, draft.secret)
            writes += write
            if secret:
                made[label] = secret
            told = steps.setdefault(round(after * SECOND), [])
            if label not in told:
                told.append(label)
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
                f"profile {name!r} would tell nobody; say whom with --send, or --nobody if its alerts are "
                "only to be listed"
            )
        writes.append(PutItem(PROFILES, name, msgspec.json.encode(profile)))
        await self._ledger.write(*writes, changed())
        await self.refresh()
        return profile, made

    async def add_address(self, url: str) -> str:
        """Note an address that no profile names (yet); its label."""
        label, writes, _ = await self._note(url, "")
        if writes:
            await self._ledger.write(*writes, changed())
            await self.refresh()
        return label

    async def remove(self, name: str) -> bool:
        """Forget a profile; whether there was one. Its addresses stay."""
        gone, _ = await self._ledger.write(DropItem(PROFILES, name), changed())
        await self.refresh()
        return bool(gone)

    async def _note(self, url: str, secret: str) -> tuple[str, list[Write], str]:
        """The label of an address, what to write down of it, and its secret if that is new."""
        await asyncio.to_thread(check_url, url, private=self._private)  # some services are slow to load
        label = self._label(url)
        known = self._addresses.get(label)
        if known is not None and known.url != url:
            raise Malformed("two addresses have the same label by chance; change one of them a little")
        webhook = url.startswith(("http://", "https://"))
        if secret and webhook:
            key_of(secret)
        elif known is not None:
            return label, [], ""
        made = "" if secret or not webhook else new_secret()
        address = ChannelAddress(url, (secret or made) if webhook else "")
        return label, [PutItem(ADDRESSES, label, self._encrypt(label, address))], made

    def _label(self, url: str) -> str:
        """An address keeps the label it has."""
        known = (label for label, address in self._addresses.items() if address.url == url)
        return next(known, None) or label_of(url, b"" if self._box is None else self._box.tag_key)


def _place(label: str) -> str:
    return f"{ADDRESSES}/{label}"


_ORDINARY: Final = RecipientPolicy()
