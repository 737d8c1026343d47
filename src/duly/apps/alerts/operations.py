"""The operations of people on alerts, with and without a running hub.

Every operation reads the ledger and writes to it with fenced verbs, so that it can run beside a hub that is
delivering the same alert: deliveries that the hub has claimed stay with the hub. A running hub is asked
afterwards to read the alert again (`changed`). Addresses are never shown, only their labels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import msgspec
from msgspec import structs

from duly.apps.alerts.alert_queries import CHANNEL, DEAD, STATUSES, AlertQueries, AlertRecord, calls_off
from duly.apps.alerts.model import (
    AlertEvent,
    AlertState,
    AlertStatus,
    current,
    name_in_bucket,
    read_event,
)
from duly.apps.alerts.profiles import Profiles
from duly.apps.alerts.silences import AlertSilences
from duly.core.fanout.plan import FIRST_ROUND, PLANNED, TELLING
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.core.monitor.signals import Severity
from duly.core.operations import (
    Advance,
    CheckItem,
    Deliver,
    Delivery,
    DeliveryKind,
    DeliveryRef,
    DropItem,
    Finish,
    Group,
    Postpone,
    PutItem,
    PutNewItem,
    RecordRefusal,
    Write,
)
from duly.core.units import DAY
from duly.errors import Malformed
from duly.runtime.activity_log import ID_SHOWN
from duly.storage.ledger import Ledger

UNTOLD: Final = "untold"
"""The bucket of critical alerts that have reached no recipient yet."""


async def _no_hub(_: bytes) -> None:
    pass


class AlertOperations(AlertQueries):
    """The operations on the alerts of one ledger."""

    def __init__(
        self, ledger: Ledger, profiles: Profiles, changed: Callable[[bytes], Awaitable[None]] = _no_hub
    ) -> None:
        super().__init__(ledger)
        self._profiles = profiles
        self._changed = changed
        self.silences = AlertSilences(ledger, changed)
        self.changing = asyncio.Lock()
        """held while a status is replaced by one that depends on it"""

    def now(self) -> int:
        """Return the time of the ledger's clock."""
        return self._ledger.clock.now()

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the statuses of alerts that the ledger has forgotten."""
        if keys:
            await self._ledger.write(*(DropItem(STATUSES, name_in_bucket(key)) for key in keys))
        for key in keys:
            await self._changed(key)

    # ── changing the status ──────────────────────────────────────────────────────────────────────

    async def say(
        self, alert: AlertRecord, standing: AlertState, by: str, note: str = "", claimed: str = ""
    ) -> AlertStatus:
        """Acknowledge, resolve or cancel an alert. `by` is the authenticated account, `claimed` the name that
        its client gave. The first change to a status wins, also among several hubs: a repeat changes nothing,
        and an alert that is over stays over."""
        async with self.changing:
            while True:
                if alert.status.standing is standing:
                    return alert.status
                if alert.status.standing.over:
                    raise Malformed(
                        f"this alert is already {alert.status.standing.value} by {alert.status.by or '?'}; "
                        "nothing is left to do"
                    )
                now = self._ledger.clock.now()
                status = structs.replace(
                    alert.status, standing=standing, by=by, at=now, note=note, claimed=claimed
                )
                said = await self._ledger.apply(self._unless_changed(alert, status, now))
                if said:
                    break
                alert = await self.get(alert.key) or alert
        await self._changed(alert.key)
        return status

    def _unless_changed(self, alert: AlertRecord, status: AlertStatus, now: int) -> PutNewItem | CheckItem:
        """Store a new status with what follows from it, if the status has not changed since the alert was
        read."""
        put, follow = self._put(alert, status), self._follow(alert, status, now)
        if alert.said is None:
            return PutNewItem(put.bucket, put.name, put.body, then=follow)
        return CheckItem(put.bucket, put.name, alert.said, then=(put, *follow))

    def writes(self, alert: AlertRecord, status: AlertStatus, now: int, *, silenced: bool = False) -> Group:
        """Store a new status with what follows from it. `silenced`: no notification, not even about a
        critical alert."""
        more = () if silenced else self._first_deliveries(alert, status, now)
        return (self._put(alert, status), *self._follow(alert, status, now), *more)

    def _put(self, alert: AlertRecord, status: AlertStatus) -> PutItem:
        return PutItem(STATUSES, name_in_bucket(alert.key), msgspec.json.encode(status))

    def _follow(self, alert: AlertRecord, status: AlertStatus, now: int) -> Group:
        """Return what follows from a new status: deliveries that are cancelled, and recipients that are
        notified again."""
        writes: list[Write] = []
        standing = status.standing
        reason = f"{standing.value} by {status.by}" if status.by else standing.value
        left = 0
        for one in alert.deliveries:
            if one.state.terminal:
                continue
            if calls_off(standing, one.ref.kind) and one.state is State.ACCEPTED:
                writes.append(Finish(one.ref, one.attempt, State.CANCELLED, reason))
            else:
                left += 1
        if status.corrects:
            corrections = self.corrections(alert, now)
            writes += corrections
            left += len(corrections)
        elif not standing.over:
            raised, superseded = self._raised(alert, status, now)
            writes += raised
            left -= superseded
            left += sum(isinstance(one, Deliver) for one in raised)
        if not left and not alert.record.state.terminal:
            reached = any(one.state is State.DONE for one in alert.deliveries)
            end = State.DONE if reached else State.CANCELLED
            writes.append(Advance(alert.key, end, now, Answer(0, b"", reason)))
        return tuple(writes)

    def corrections(self, alert: AlertRecord, now: int) -> list[Write]:
        """Return deliveries of the cancellation, or of the end, to recipients that were, or may have been,
        notified; one for each."""
        told = {
            one.ref.recipient
            for one in alert.deliveries
            if one.ref.kind in TELLING and one.state in (State.DONE, State.UNKNOWN)
        }
        told -= {one.ref.recipient for one in alert.deliveries if one.ref.kind is DeliveryKind.CORRECTION}
        expires = now + self._lasts(alert)
        return [Deliver(_first(alert, name, DeliveryKind.CORRECTION), now, expires) for name in sorted(told)]

    def _raised(self, alert: AlertRecord, status: AlertStatus, now: int) -> tuple[list[Write], int]:
        """Return what follows when an alert becomes critical. Notified recipients are notified once more;
        deliveries that wait for quiet hours or for other alerts go out now. Also returns how many of those
        are superseded."""
        if not self._becomes_critical(alert, status):
            return [], 0
        profile = self._profiles.get(alert.record.message.recipient)
        steps = () if profile is None else profile.steps
        writes: list[Write] = []
        again: set[str] = set()
        superseded = 0
        for one in alert.deliveries:
            round_ = one.ref.round
            if one.ref.kind not in PLANNED:
                continue
            wait = steps[round_].after if round_ < len(steps) else 0
            if one.state in (State.DONE, State.UNKNOWN, State.SENT):
                again.add(one.ref.recipient)
            elif one.state is State.ACCEPTED and not one.attempt and not wait:
                again.add(one.ref.recipient)
                superseded += 1
                writes.append(Finish(one.ref, 0, State.SUPERSEDED, "it has become critical"))
            elif one.state is State.ACCEPTED and not one.attempt and now + wait < one.due:
                writes.append(Postpone(one.ref, 0, now + wait, one.error, one.in_doubt))
        again -= {one.ref.recipient for one in alert.deliveries if one.ref.kind is DeliveryKind.RAISED}
        expires = now + self._lasts(alert)
        refs = [_first(alert, name, DeliveryKind.RAISED) for name in sorted(again)]
        return [*writes, *(Deliver(ref, now, expires) for ref in refs)], superseded

    def _first_deliveries(self, alert: AlertRecord, status: AlertStatus, now: int) -> Group:
        """Return the deliveries of an alert that becomes critical and has reached no recipient, because it
        was silenced, its profile only lists, or every address refused it. All recipients of its profile are
        notified now; if there are none, those of the default profile."""
        if not self.is_unnotified(alert, status):
            return ()
        profile = self._profiles.get(alert.record.message.recipient)
        planned = () if profile is None else profile.plan(now, urgent=True)
        tried = {(one.ref.recipient, one.ref.round) for one in alert.deliveries}
        told: dict[DeliveryRef, Deliver] = {}
        for one in planned:
            first = not one.round or (one.recipient, one.round) in tried
            ref = (
                _first(alert, one.recipient, DeliveryKind.RAISED)
                if first
                else DeliveryRef(alert.key, CHANNEL, one.recipient, one.round)
            )
            told[ref] = Deliver(ref, one.due, one.expires)
        if tried or not planned:
            known = {ref.recipient for ref in told}.union(one.ref.recipient for one in alert.deliveries)
            told |= {one.ref: one for one in self._to_fallback(alert, now, known)}
        return tuple(told.values())

    def is_unnotified(self, alert: AlertRecord, status: AlertStatus) -> bool:
        """Return whether an alert that becomes critical has reached no recipient and will reach none."""
        if status.standing.over or not self._becomes_critical(alert, status):
            return False
        return all(one.state in DEAD for one in alert.deliveries)

    def _becomes_critical(self, alert: AlertRecord, status: AlertStatus) -> bool:
        event = read_event(alert.record.message.body)
        return _critical(event, status) and not _critical(event, alert.status)

    def _lasts(self, alert: AlertRecord) -> int:
        profile = self._profiles.get(alert.record.message.recipient)
        return DAY if profile is None else profile.lasts

    # ── deliveries by hand ───────────────────────────────────────────────────────────────────────

    async def retry(self, alert: AlertRecord, recipient: str = "") -> list[Delivery]:
        """Deliver again what has failed or waits after a failed attempt. If a recipient is named, the alert
        is delivered to it again in any state: even if it arrived, was cancelled, or waits for its time."""
        now = self._ledger.clock.now()
        writes: list[Write] = []
        latest = {one.ref.recipient: one for one in sorted(alert.deliveries, key=lambda d: d.ref.round)}
        if not alert.deliveries:
            return await self._begin_again(alert, now)
        for one in latest.values():
            if recipient and recipient != one.ref.recipient:
                continue
            if one.state is State.ACCEPTED and (one.attempt or recipient):
                writes.append(Postpone(one.ref, one.attempt, now, one.error, one.in_doubt))
            elif one.state in DEAD or (one.state.terminal and recipient):
                ref = _next_by_hand(alert, one.ref.recipient)
                writes.append(Deliver(ref, now, now + self._lasts(alert)))
        if not writes:
            raise Malformed(
                "no delivery of this alert has failed; name a recipient with --to to deliver it again"
            )
        await self._ledger.write(*writes)
        await self._changed(alert.key)
        return await self._ledger.deliveries(alert.key)

    async def _begin_again(self, alert: AlertRecord, now: int) -> list[Delivery]:
        """Deliver an alert that has no deliveries, since its profile was missing or it was silenced."""
        profile = self._profiles.get(alert.record.message.recipient)
        if profile is None or not profile.steps:
            raise Malformed(
                f"profile {alert.record.message.recipient!r} names no recipient; add one with 'duly profile "
                "set'"
            )
        planned = [one for one in profile.plan(now, urgent=True) if one.round == 0]
        refs = [_first(alert, one.recipient, DeliveryKind.BY_HAND) for one in planned]
        await self._ledger.write(*(Deliver(ref, now, now + profile.lasts) for ref in refs))
        await self._changed(alert.key)
        return await self._ledger.deliveries(alert.key)

    async def fall_back(self, alert: AlertRecord, reason: str) -> bool:
        """Deliver a critical alert that reached no recipient to those of the default profile that were not
        tried, and record the failure; returns False if that was done before."""
        now, name, message = self._ledger.clock.now(), name_in_bucket(alert.key), alert.record.message
        tried = {one.ref.recipient for one in alert.deliveries}
        recorded = RecordRefusal(message.scope, message.id[:ID_SHOWN], "untold", reason, now)
        writes: Group = (DropItem(UNTOLD, name), recorded, *self._to_fallback(alert, now, tried))
        noted = await self._ledger.apply(CheckItem(UNTOLD, name, then=writes))
        if noted:
            await self._changed(alert.key)
        return noted

    def _to_fallback(self, alert: AlertRecord, now: int, tried: Collection[str]) -> list[Deliver]:
        """Return deliveries to the recipients of the default profile, except those that were tried."""
        profile = self._profiles.fallback
        to = [] if profile is None else [label for step in profile.steps for label in step.to]
        expires = now + self._lasts(alert)
        refs = [
            _first(alert, label, DeliveryKind.FALLBACK) for label in dict.fromkeys(to) if label not in tried
        ]
        return [Deliver(ref, now, expires) for ref in refs]

    async def edit(self, alert: AlertRecord, recipient: str, url: str) -> list[Delivery]:
        """Deliver an alert to another address instead of this recipient."""
        if not any(one.ref.recipient == recipient for one in alert.deliveries):
            known = ", ".join(sorted({one.ref.recipient for one in alert.deliveries})) or "no recipient"
            raise Malformed(f"this alert has no delivery to {recipient!r}; it goes to {known}")
        label = await self._profiles.add_address(url)
        async with self.changing:
            while not await self._ledger.apply(self._instead(alert, recipient, label)):
                alert = await self.get(alert.key) or alert
        await self._changed(alert.key)
        return await self._ledger.deliveries(alert.key)

    def _instead(self, alert: AlertRecord, recipient: str, label: str) -> PutNewItem | CheckItem:
        """Deliver to another address and note instead of whom, if the status has not changed since the alert
        was read."""
        now = self._ledger.clock.now()
        ended: list[Write] = [
            Finish(one.ref, one.attempt, State.SUPERSEDED, f"sent to {label} instead")
            for one in alert.deliveries
            if one.ref.recipient == recipient and one.state is State.ACCEPTED
        ]
        follow: Group = (*ended, Deliver(_next_by_hand(alert, label), now, now + self._lasts(alert)))
        noted = alert.status.instead | {recipient: label}
        put = self._put(alert, structs.replace(alert.status, instead=noted))
        if alert.said is None:
            return PutNewItem(put.bucket, put.name, put.body, then=follow)
        return CheckItem(put.bucket, put.name, alert.said, then=(put, *follow))


def _first(alert: AlertRecord, recipient: str, kind: DeliveryKind) -> DeliveryRef:
    """Return the first delivery of a kind. Its name is the same at every hub, so it is created once."""
    return DeliveryRef(alert.key, CHANNEL, recipient, FIRST_ROUND[kind], kind)


def _next_by_hand(alert: AlertRecord, recipient: str) -> DeliveryRef:
    """Return the next delivery by hand, after those that a recipient already has."""
    ref = _first(alert, recipient, DeliveryKind.BY_HAND)
    mine = (one.ref for one in alert.deliveries if one.ref.recipient == recipient)
    taken = [one.round for one in mine if one.kind is ref.kind]
    return structs.replace(ref, round=max(taken) + 1) if taken else ref


def _critical(event: AlertEvent, status: AlertStatus) -> bool:
    return current(event, status).severity is Severity.CRITICAL
