"""Alerts on the dashboard, the status page: events, episodes, deliveries, counters, sentinels, and what
people do about them.

Lists search alerts from the newest on for a limited time, and return where to continue. Addresses are never
shown, only their labels. What a person does goes through the same operations as the command line; the name
that is stored with it is that of the session.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

from duly.apps.alerts import verbs
from duly.apps.alerts.alert_queries import AlertRecord, dead_letters, show, show_delivery
from duly.apps.alerts.channels import open_channel
from duly.apps.alerts.channels.channel import Notification
from duly.apps.alerts.heartbeats import presence
from duly.apps.alerts.model import NOTHING_SAID, AlertState, AlertStatus, traits_of
from duly.core.messages import key_of
from duly.core.units import MS
from duly.errors import ChannelError, Malformed, NotFound
from duly.identity.accounts import Role
from duly.server.dashboard.alert_counters import AlertCounters
from duly.server.dashboard.requests import text_of
from duly.server.dashboard.visitors import DashboardVisitor
from duly.server.verb_arguments import VerbArguments
from duly.storage.ledger import NEWEST, Record
from duly.transports.http.query_options import number

if TYPE_CHECKING:
    from duly.server.hub import Hub

SEARCH_SECONDS: Final = 0.12
"""How long alerts are searched for one page."""
SEARCHED_AT_LEAST: Final = 100
"""So many alerts are searched for one page, however long a busy machine takes."""
PAGE_LIMIT: Final = 100
EPISODE_SHOWN: Final = 50
TEST_SECONDS: Final = 30.0
SENTINELS_SHOWN: Final = 500


class AlertViews:
    """The alerts of one hub, as the dashboard shows them and acts on them."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.counters = AlertCounters(hub)

    @property
    def _statuses(self) -> Mapping[bytes, AlertStatus]:
        return self._hub.alerts.planner.statuses

    # ── lists ────────────────────────────────────────────────────────────────────────────────────

    async def page(self, visitor: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return a page of alerts, the newest first."""
        standing, sentinel = text_of(query, "status"), text_of(query, "sentinel")
        if standing not in ("", "active", *(one.value for one in AlertState)):
            known = ", ".join(one.value for one in AlertState)
            raise Malformed(f"{standing!r} is not a status of alerts; use active, {known}")

        def fits(record: Record) -> bool:
            now = self._statuses.get(record.message.key, NOTHING_SAID).standing
            right = standing in ("", now.value) or (standing == "active" and not now.over)
            return right and sentinel in ("", record.message.scope)

        found, following = await self._find(visitor, query, fits, lambda alert: [self._row(alert)])
        return {"alerts": found, "next": following}

    async def deliveries(self, visitor: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return a page of alerts with deliveries that are open, or were given up."""
        wanted = text_of(query, "state") or "dead"
        if wanted not in ("dead", "open", "all"):
            raise Malformed(f"{wanted!r} is not a state of deliveries; use open, dead or all")

        def fits(record: Record) -> bool:
            return wanted != "open" or not record.state.terminal  # it is over when its deliveries are

        def rows(alert: AlertRecord) -> list[dict[str, object]]:
            match wanted:
                case "dead":  # also of an alert that others have received
                    chosen = dead_letters(alert)
                case "open":
                    chosen = [one for one in alert.deliveries if not one.state.terminal]
                case _:
                    chosen = alert.deliveries or dead_letters(alert)
            return [self._row(alert) | {"deliveries": [], "delivery": show_delivery(one)} for one in chosen]

        found, following = await self._find(visitor, query, fits, rows)
        return {"deliveries": found, "next": following}

    async def _find(
        self,
        visitor: DashboardVisitor,
        query: Mapping[str, str],
        fits: Callable[[Record], bool],
        rows: Callable[[AlertRecord], list[dict[str, object]]],
    ) -> tuple[list[dict[str, object]], str | None]:
        """Return the rows of the alerts that fit, newest first, and the cursor at which to continue. Alerts
        are read many at once, with three queries."""
        limit = number(query.get("limit"), 30, PAGE_LIMIT)
        reader, cursors = f"dashboard-alerts/{visitor.name}", self._hub.cursors
        cursor = text_of(query, "before", 1_000)
        place = cursors.decrypt(reader, cursor) if cursor else None
        before = NEWEST if place is None else (int.from_bytes(place[:8], "big"), place[8:])
        found, following = await self._search(limit, before, fits, rows)
        if following is None:
            return found, None
        return found, cursors.encrypt(reader, following[0].to_bytes(8, "big") + following[1])

    async def _search(
        self,
        limit: int,
        before: tuple[int, bytes],
        fits: Callable[[Record], bool],
        rows: Callable[[AlertRecord], list[dict[str, object]]],
    ) -> tuple[list[dict[str, object]], tuple[int, bytes] | None]:
        """Return the rows of the alerts below `before` that fit, and where to continue; None if that was
        all."""
        operations = self._hub.alerts.operations
        found: list[dict[str, object]] = []
        over, searched, last = monotonic() + SEARCH_SECONDS, 0, before
        async for records in operations.newest_pages(1 << 40, before, limit + 1):
            alerts = await operations.wholes([record for record in records if fits(record)])
            made = {alert.key: rows(alert) for alert in alerts}
            for record in records:
                more = made.get(record.message.key)
                if more and len(found) >= limit:
                    return found, last
                found += more or ()
                last = (record.accepted_at, record.message.key)
            searched += len(records)
            if searched >= SEARCHED_AT_LEAST and monotonic() > over:
                return found, last
        return found, None

    def _row(self, alert: AlertRecord) -> dict[str, object]:
        message = alert.record.message
        return show(alert) | {"episode": traits_of(message).episode or f"{message.scope}/{message.id}"}

    # ── one of them ──────────────────────────────────────────────────────────────────────────────

    async def one(self, visitor: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return one alert with its deliveries, and the other events of its episode."""
        sentinel, event = text_of(query, "sentinel"), text_of(query, "event")
        if not sentinel or not event:
            raise Malformed("name an alert by its sentinel and its event")
        key = key_of(sentinel, event)
        alert = await self._hub.alerts.operations.get(key)
        shown = await self._hub.alerts.show(key)
        if alert is None or shown is None:
            raise NotFound(f"nothing is known of the alert {sentinel}/{event} (any more)")
        episode = traits_of(alert.record.message).episode
        others: list[dict[str, object]] = []
        if episode:
            over = monotonic() + SEARCH_SECONDS
            async for record in self._hub.alerts.operations.newest(5_000):
                if traits_of(record.message).episode == episode and len(others) < EPISODE_SHOWN:
                    status = self._statuses.get(record.message.key, NOTHING_SAID)
                    others.append(
                        {
                            "sentinel": record.message.scope,
                            "event": record.message.id,
                            "time": record.message.time // MS,
                            "status": status.standing.value,
                            "state": record.state.word,
                        }
                    )
                if monotonic() > over:
                    break
        return shown | {"episode": episode, "events": others}

    # ── the rest of the status page ──────────────────────────────────────────────────────────────

    async def status(self, _: DashboardVisitor, query: Mapping[str, str]) -> dict[str, object]:
        """Return the counters, the sentinels, the silences and the profiles."""
        hub = self._hub
        names = {one.name for one in hub.accounts.list() if one.role is Role.SENTINEL}
        seen = await presence(hub.ledger, names)
        online = hub.alerts.online | set(seen["keeping"])
        sentinels = [
            {
                "name": name,
                "online": name in online,
                "silent": name in seen["silent"],
                "last_heard": seen["heard"].get(name),
            }
            for name in sorted(names)[:SENTINELS_SHOWN]
        ]
        silences = await verbs.administer(
            hub.alerts.operations, hub.alerts.profiles, "alert.silences", {}, ""
        )
        profiles = [verbs.show_profile(name, one) for name, one in hub.alerts.profiles.all().items()]
        return {
            "counters": await self.counters.shown(len(seen["silent"])),
            "sentinels": sentinels,
            "silences": silences["silences"] if isinstance(silences, dict) else [],
            "profiles": profiles,
        }

    # ── acting ───────────────────────────────────────────────────────────────────────────────────

    async def act(self, verb: str, visitor: DashboardVisitor, wanted: dict[str, str]) -> object:
        """Carry out a verb of the command line on alerts, in the name of the visitor."""
        hub = self._hub
        plain = VerbArguments({name: text_of(wanted, name, 2_000) for name in wanted if name != "by"})
        if verb == "alert.silence":
            _check_span(plain.get("lasts", ""))
        return await verbs.administer(hub.alerts.operations, hub.alerts.profiles, verb, plain, visitor.name)

    async def try_channel(self, _: DashboardVisitor, wanted: dict[str, str]) -> dict[str, object]:
        """Send a test to a recipient of a profile, and tell how that went."""
        label = text_of(wanted, "recipient")
        address = self._hub.alerts.profiles.address(label)
        if address is None:
            raise Malformed(f"there is no recipient {label!r}; 'duly profile list' shows them")
        settings = self._hub.settings
        channel = await asyncio.to_thread(
            open_channel,
            address.url,
            address.secret,
            folder=Path(settings.data),
            private=settings.allow_private_webhooks,
        )
        began = monotonic()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {"type": "alert.test", "timestamp": now, "data": {}}
        test = Notification(
            f"test_{secrets.token_hex(12)}", "Test from duly", "This is a test. Nothing has happened.", body
        )
        try:
            async with asyncio.timeout(TEST_SECONDS):
                await channel.send(test)
        except (ChannelError, TimeoutError) as problem:
            word = problem.word if isinstance(problem, ChannelError) else "in_doubt"
            return {"recipient": label, "fate": word, "detail": str(problem) or "no answer in time"}
        finally:
            await channel.close()
        return {"recipient": label, "fate": "arrived", "ms": round((monotonic() - began) * 1000)}


def _check_span(text: str) -> None:
    """Raise `Malformed` for a silence without a sensible length."""
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not 60 <= length <= 30 * 86_400:
        raise Malformed("a silence lasts from a minute to 30 days; say how many seconds")
