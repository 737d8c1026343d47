"""What is known of alerts: lists of them, their deliveries and dead letters, and how they are shown.

Lists are read many alerts at once: a page takes a few queries, however many rows it has. Addresses are never
shown, only their labels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

from msgspec import Struct

from duly.apps.alerts.model import (
    NOTHING_SAID,
    AlertState,
    AlertStatus,
    current,
    name_in_bucket,
    read_event,
    read_status,
    shown,
)
from duly.core.fanout.plan import PLANNED, TELLING
from duly.core.lifecycle import State
from duly.core.messages import key_of, names_in
from duly.core.monitor.signals import EVENT, Severity
from duly.core.operations import Delivery, DeliveryKind, DeliveryRef
from duly.core.units import MS
from duly.errors import Malformed
from duly.storage.ledger import NEWEST, Ledger, Record

CHANNEL: Final = "alert"
STATUSES: Final = "alerts"
"""The bucket of the statuses of alerts."""
PAGE: Final = 500
DEAD: Final = (State.FAILED, State.EXPIRED, State.UNKNOWN)
"""The ends of a delivery after which the recipient may not have been notified."""
NO_RECIPIENT: Final = "none"
"""The recipient that is shown for an alert without deliveries."""
SEARCHED: Final = 100_000
"""How many of the newest alerts are searched for an id or a status."""


class AlertRecord(Struct, frozen=True):
    """An alert with its status and its deliveries."""

    record: Record
    status: AlertStatus
    deliveries: list[Delivery]
    said: bytes | None = None
    """the status as the ledger stores it"""

    @property
    def key(self) -> bytes:
        """The key of the alert's message."""
        return self.record.message.key

    @property
    def severity(self) -> Severity:
        """The present severity."""
        return current(read_event(self.record.message.body), self.status).severity


class AlertQueries:
    """The queries about the alerts of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def get(self, key: bytes) -> AlertRecord | None:
        """Return the alert of this key."""
        record = await self._ledger.find(key)
        return None if record is None or record.message.kind != EVENT else await self.whole(record)

    async def get_all(self, keys: Collection[bytes]) -> list[AlertRecord]:
        """Return the alerts of these keys that are known, in any order."""
        found = await self._ledger.find_all(keys)
        return await self.wholes([record for record in found if record.message.kind == EVENT])

    async def find(self, id_: str, sentinel: str = "") -> AlertRecord:
        """Return the alert of this id, or the only one whose id begins with it; raises `Malformed`
        otherwise."""
        if sentinel and (exact := await self.get(key_of(sentinel, id_))) is not None:
            return exact
        found = [
            record
            async for record in self.newest(SEARCHED)
            if record.message.id.startswith(id_) and sentinel in ("", record.message.scope)
        ]
        found = [record for record in found if record.message.id == id_] or found
        if len(found) > 1:
            who = ", ".join(f"{one.message.scope}/{one.message.id}" for one in found[:5])
            raise Malformed(f"the id {id_!r} fits several alerts: {who}; give more of the id, or --sentinel")
        if not found:
            raise Malformed(f"there is no alert {id_!r}; 'duly alert list' shows the newest")
        return await self.whole(found[0])

    async def newest(self, limit: int, before: tuple[int, bytes] = NEWEST) -> AsyncIterator[Record]:
        """Yield the newest alerts below `before`, newest first."""
        async for records in self.newest_pages(limit, before):
            for record in records:
                yield record

    async def newest_pages(
        self, limit: int, before: tuple[int, bytes] = NEWEST, first: int = PAGE
    ) -> AsyncIterator[list[Record]]:
        """Yield the newest alerts below `before`, newest first, as many at once as are read with one query:
        `first`, and then `PAGE`."""
        size = first
        while limit > 0 and (page := await self._ledger.of_kind(EVENT, before, min(size, limit))):
            yield page
            before = (page[-1].accepted_at, page[-1].message.key)
            limit -= len(page)
            size = PAGE

    async def whole(self, record: Record) -> AlertRecord:
        """Return the alert of this record, with its status and deliveries."""
        return (await self.wholes([record]))[0]

    async def wholes(self, records: Sequence[Record]) -> list[AlertRecord]:
        """Return the alerts of these records, with their statuses and deliveries: two queries, however many
        they are."""
        keys = [record.message.key for record in records]
        bodies, deliveries = await asyncio.gather(
            self._ledger.items([(STATUSES, name_in_bucket(key)) for key in keys]),
            self._ledger.deliveries_of(keys),
        )
        return [
            AlertRecord(record, read_status(said), deliveries[record.message.key], said)
            for record, said in zip(records, bodies, strict=True)
        ]

    async def alerts(self, *, standing: str = "", sentinel: str = "", limit: int = 50) -> list[AlertRecord]:
        """Return the newest alerts with this status and of this sentinel."""
        return (await self.page(standing=standing, sentinel=sentinel, limit=limit))[0]

    async def page(
        self,
        *,
        standing: str = "",
        sentinel: str = "",
        limit: int = 50,
        before: tuple[int, bytes] = NEWEST,
        since: int = 0,
    ) -> tuple[list[AlertRecord], tuple[int, bytes] | None]:
        """Return a page of the newest alerts below `before` that were accepted after `since`, and where the
        next page begins; None after the last page. A page may be short or empty and still have a next one,
        since only so many alerts are searched for one page."""
        found, following = await self._search(standing, sentinel, limit, before, since)
        return await self.wholes(found), following

    async def _search(
        self, standing: str, sentinel: str, limit: int, before: tuple[int, bytes], since: int
    ) -> tuple[list[Record], tuple[int, bytes] | None]:
        """Find the alerts of a page."""
        wanted = None if not standing else _standing(standing)
        said = await self._ledger.bucket(STATUSES) if wanted is not None else {}
        found: list[Record] = []
        most = SEARCHED if standing or sentinel else limit + 1
        searched, position = 0, before
        async for record in self.newest(most, before):
            if record.accepted_at < since:
                break
            searched += 1
            if sentinel in ("", record.message.scope) and (
                wanted is None or read_status(said.get(name_in_bucket(record.message.key))).standing is wanted
            ):
                if len(found) == limit:
                    return found, position
                found.append(record)
            if len(found) < limit or found[-1] is record:
                position = (record.accepted_at, record.message.key)
            if searched == most:
                return found, position
        return found, None

    async def deliveries(self, *, state: str = "", limit: int = 50) -> list[tuple[AlertRecord, Delivery]]:
        """Return the newest deliveries in a state; `open` are those that have not ended, `dead` the
        `dead_letters`. An alert that failed without a delivery, as its profile was missing, is shown with one
        to `none`."""
        if state not in ("", "open", "dead", *(one.word for one in State)):
            words = ", ".join(one.word for one in State)
            raise Malformed(f"{state!r} is not a state of deliveries; use open, dead, {words}")
        found: list[tuple[AlertRecord, Delivery]] = []
        async for records in self.newest_pages(SEARCHED if state else limit):
            for alert in await self.wholes(records):
                if state == "dead":
                    made = dead_letters(alert)
                else:
                    every = alert.deliveries or _to_no_recipient(alert)
                    made = [one for one in every if _is(state, one.state)]
                found += ((alert, one) for one in made)
            if len(found) >= limit:
                break
        return found[:limit]


def calls_off(standing: AlertState, kind: DeliveryKind) -> bool:
    """Return whether a delivery of this kind is no longer wanted; one that was requested by hand always
    is."""
    match standing:
        case AlertState.OPEN:
            return False
        case AlertState.ACKNOWLEDGED:
            return kind in PLANNED  # becoming critical is news even then
        case AlertState.RESOLVED | AlertState.CANCELLED:
            return kind in TELLING


def dead_letters(alert: AlertRecord) -> list[Delivery]:
    """Return deliveries of an alert that ended without having surely arrived and that still need a person:
    the last one to each recipient, unless it was sent to another address since, or is no longer wanted."""
    standing = alert.status.standing
    last = {one.ref.recipient: one for one in sorted(alert.deliveries, key=lambda one: one.ref.round)}
    return [
        one
        for one in list(last.values()) or _to_no_recipient(alert)
        if one.state in DEAD
        and one.ref.recipient not in alert.status.instead
        and not calls_off(standing, one.ref.kind)
        and not (standing.over and one.ref.kind is DeliveryKind.BY_HAND)
    ]


def _to_no_recipient(alert: AlertRecord) -> list[Delivery]:
    """Return the delivery that is shown for an alert that failed without one."""
    record = alert.record
    if record.state not in DEAD:
        return []
    reason = "" if record.answer is None else record.answer.reason
    return [Delivery(DeliveryRef(alert.key, CHANNEL, NO_RECIPIENT), record.state, 0, 0, 0, "", reason)]


def _standing(word: str) -> AlertState:
    try:
        return AlertState(word)
    except ValueError:
        known = ", ".join(one.value for one in AlertState)
        raise Malformed(f"{word!r} is not a status of alerts; use one of {known}") from None


def _is(wanted: str, state: State) -> bool:
    match wanted:
        case "":
            return True
        case "open":
            return not state.terminal
        case _:
            return wanted == state.word


# ── presentation ─────────────────────────────────────────────────────────────────────────────────


def named(alert: AlertRecord) -> dict[str, object]:
    """Return the names of an alert: its event and its sentinel."""
    return {"event": alert.record.message.id, "sentinel": alert.record.message.scope}


def show(alert: AlertRecord) -> dict[str, object]:
    """Return an alert as the API shows it; times are in milliseconds."""
    record, status = alert.record, alert.status
    event = read_event(record.message.body) if record.message.kind == EVENT else None
    seen = shown(record.message, status) | {
        "state": record.state.word,
        "accepted_at": record.accepted_at // MS,
        "offset_ms": None if event is None else event.offset_ms,
        "deliveries": [show_delivery(one) for one in alert.deliveries],
    }
    if record.answer is not None and record.answer.reason:
        seen["detail"] = record.answer.reason
    if status is not NOTHING_SAID and status.by:
        seen |= {"by": status.by, "at": status.at // MS, "note": status.note}
        seen |= {"claimed": status.claimed} if status.claimed else {}
    return seen


def show_delivery(one: Delivery) -> dict[str, object]:
    """Return a delivery as the API shows it; times are in milliseconds."""
    seen: dict[str, object] = {
        "recipient": one.ref.recipient,
        "round": one.ref.round,
        "kind": one.ref.kind.word,
        "state": one.state.word,
        "attempts": one.attempt,
        "error": one.error,
        "in_doubt": one.in_doubt,
    }
    if one.state is State.ACCEPTED:
        seen["due"] = one.due // MS
    if not one.state.terminal and one.expires:
        seen["expires"] = one.expires // MS
    return seen


def show_forgotten(one: Delivery) -> dict[str, object]:
    """Return a delivery without its alert, as the archive keeps it."""
    sentinel, event = names_in(one.ref.key)
    return {"event": event, "sentinel": sentinel} | show_delivery(one)
