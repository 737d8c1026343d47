"""Tracks the alerts of a sentinel: gives each alert its outcome, and the program news of what the sentinel
does.

The law: every signal is counted and reported, whether it passed or was held back, and so is every outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct

from duly.clients.base import fail, settle
from duly.clients.news_feed import NewsFeed
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message
from duly.core.monitor.machine import event_in
from duly.core.monitor.signals import EVENT, SUMMARY, Severity, SignalRuling, event_of, read_event
from duly.core.monitor.suppression import Ruling
from duly.core.steps import Origin
from duly.core.units import MS
from duly.errors import Stopped

LOG: Final = logging.getLogger("duly.sentinel")
NEWS: Final = 10_000
"""How many unread news are kept; beyond that the oldest are dropped."""

_DONE: Final = {EVENT: "sent", "alert_update": "updated", "alert_cancel": "corrected"}


class SentEvent(Struct, frozen=True):
    """The outcome of a signal. `state` is `done` (the tower has it), `cancelled`, `held` (held back, for
    `reason`), `superseded`, `expired`, `failed` or `unknown`.

    >>> SentEvent("held", "debounced").done
    False
    """

    state: str
    reason: str = ""
    event: str = ""

    @property
    def done(self) -> bool:
        """Whether the tower has it."""
        return self.state == State.DONE.word


class SentinelNews(Struct, frozen=True, omit_defaults=True):
    """One action of a sentinel. `what` is `stored`, `countdown`, `held`, `queued`, `sent`, `cancelled`,
    `correcting`, `corrected`, `updated`, `summary`, `refused`, `online`, `offline`, `denied`, `trouble` (the
    store fails) or `unstored` (a critical event could not be stored; `detail` says whether it is sent to the
    tower anyway), or how an event ended. Times are in milliseconds."""

    what: str
    time: int
    device: str = ""
    reason: str = ""
    event: str = ""
    detail: str = ""
    until: int = 0


class SentinelCounts(Struct):
    """Counts of what a sentinel has done since its start."""

    signals: int = 0
    debounced: int = 0
    cooling: int = 0
    limited: int = 0
    cancelled: int = 0
    sent: int = 0
    """events that the tower has"""
    resent: int = 0
    """transmissions after the first, of anything"""

    @property
    def held_back(self) -> dict[str, int]:
        """Signals that were not reported, by reason; reasons without signals are left out."""
        by_reason = {"debounce": self.debounced, "limit": self.limited, "cooldown": self.cooling}
        return {reason: count for reason, count in by_reason.items() if count}


class AlertOwner(Protocol):
    """The part of a sentinel that an alert uses."""

    def cancel(self, device: str, event: str = "") -> None:
        """Cancel an event."""
        ...

    def update(
        self,
        event: str,
        *,
        severity: Severity | str | None = None,
        meta: object = None,
        location: object = None,
    ) -> None:
        """Add newer information to an event."""
        ...


class Alert:
    """One signal, and what becomes of it.

    alert = sentinel.trigger("fall", "watch-1")
    alert.cancel()
    """

    def __init__(self, sentinel: AlertOwner, device: str, reason: str) -> None:
        loop = asyncio.get_running_loop()
        self._sentinel = sentinel
        self.device = device
        self.reason = reason
        self.id = ""
        """the event's id, once it is stored; for a repeat, the id of the event it repeats"""
        self._cancelled = False
        self._ruled: asyncio.Future[str] = loop.create_future()
        self._sent: asyncio.Future[SentEvent] = loop.create_future()

    async def stored(self) -> str:
        """Wait until the signal is judged and, if it passed, stored. Returns `pass`, or why it was held."""
        return await asyncio.shield(self._ruled)

    @property
    def sent(self) -> asyncio.Future[SentEvent]:
        """Await it to wait for the outcome."""
        return asyncio.shield(self._sent)

    def cancel(self) -> None:
        """Cancel it. If it was sent already, a correction follows."""
        if not self._ruled.done():
            self._cancelled = True
        elif self.id:
            self._sentinel.cancel(self.device, self.id)

    def update(
        self, *, severity: Severity | str | None = None, meta: object = None, location: object = None
    ) -> None:
        """Add newer information: it is sent with the event, or after it. Await `stored()` first."""
        self._sentinel.update(self.id, severity=severity, meta=meta, location=location)

    # ── for the sentinel ─────────────────────────────────────────────────────────────────────────

    def rule(self, event: str, ruling: str) -> None:
        """Note the ruling on the signal."""
        self.id = event
        settle(self._ruled, ruling)
        if self._cancelled:
            self.cancel()

    def end(self, end: SentEvent) -> None:
        """Note the outcome of the signal."""
        settle(self._sent, end)

    def abandon(self, problem: Stopped) -> None:
        """Note that the outcome will not be known here."""
        fail(self._ruled, problem)
        fail(self._sent, problem)


class SentinelAlerts:
    """The alerts of one sentinel, its news and its counts; `now` returns the time."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._alerts: dict[str, list[Alert]] = {}
        self._under_way: dict[bytes, tuple[str, str]] = {}
        """the kind and the event of every transmitted message"""
        self._causes: dict[str, tuple[str, str]] = {}
        """the device and the reason of each event"""
        self._unstored: dict[str, bool] = {}
        """critical events that could not be stored, and whether the tower was reachable"""
        self._taken: set[str] = set()
        """those of them that the tower has"""
        self.news: NewsFeed[SentinelNews] = NewsFeed(NEWS)
        self.counts = SentinelCounts()

    @property
    def open(self) -> list[str]:
        """The events whose end an alert waits for."""
        return list(self._alerts)

    def transmitted(self, message: Message) -> None:
        """Note that a message is sent, for the first time or again."""
        self.counts.resent += message.key in self._under_way
        self._under_way[message.key] = (message.kind, self._about(message))

    def event_of(self, key: bytes) -> str:
        """Return the event that a transmitted message refers to."""
        return self._under_way.get(key, ("", event_in(key)))[1]

    def ruled(self, ruled: SignalRuling) -> None:
        """Note the ruling on a signal."""
        decision = ruled.decision
        if ruled.event:
            self._causes.setdefault(ruled.event, (ruled.device, ruled.reason))
        if decision.passes:
            counting = ruled.due > self._now()
            what = SUMMARY if ruled.reason == SUMMARY else "countdown" if counting else "stored"
            self.say(what, ruled.device, ruled.reason, ruled.event, until=ruled.due // MS if counting else 0)
        else:
            until = (decision.until or 0) // MS
            self.say("held", ruled.device, ruled.reason, ruled.event, decision.ruling.value, until)
        alert = ruled.origin
        if not isinstance(alert, Alert):
            return
        self._count(decision.ruling)
        if decision.passes:
            waiting = self._alerts.setdefault(ruled.event, [])
            if alert not in waiting:
                waiting.append(alert)
        else:
            alert.end(SentEvent("held", decision.ruling.value, ruled.event))
        alert.rule(ruled.event, decision.ruling.value)

    def unstored(self, message: Message, origin: Origin, problem: Exception | None, reachable: bool) -> None:
        """Note that a critical event could not be stored; it is sent to the tower if that is reachable."""
        event = self._about(message)
        if isinstance(origin, Alert):
            origin.id = event
            waiting = self._alerts.setdefault(event, [])
            if origin not in waiting:
                waiting.append(origin)
        if self._unstored.get(event) is reachable:
            return  # that was reported
        self._unstored[event] = reachable
        if reachable:
            detail = f"it cannot be stored, and goes to the tower all the same: {problem}"
            LOG.warning("critical event %s: %s", event, detail)
        else:
            detail = f"it can neither be stored nor sent, as the tower cannot be reached: {problem}"
            LOG.error("critical event %s: %s", event, detail)
        self.say("unstored", event=event, detail=detail)

    def taken_unstored(self, key: bytes) -> None:
        """Note that the tower has accepted a critical event that is not stored here: for its alert that is
        the outcome."""
        event = event_in(key)
        if event in self._taken:
            return
        self._taken.add(event)
        self.counts.sent += 1
        self.say("sent", event=event, detail="it is not stored here yet")
        for alert in self._alerts.get(event, ()):
            alert.end(SentEvent(State.DONE.word, "", event))

    def ended(self, key: bytes, state: State, answer: Answer) -> None:
        """Note the outcome of a message."""
        kind, event = self._under_way.pop(key, (EVENT, event_in(key)))
        what = _DONE[kind] if state is State.DONE else state.word
        device, reason = self._causes.get(event, ("", ""))
        told = kind == EVENT and event in self._taken and state is State.DONE
        if not told:
            self.say(what, device, reason, event, answer.reason)
        if kind != EVENT:
            return
        self._taken.discard(event)
        self._unstored.pop(event, None)
        self.counts.sent += state is State.DONE and not told
        self.counts.cancelled += state is State.CANCELLED
        self._causes.pop(event, None)
        for alert in self._alerts.pop(event, ()):
            alert.end(SentEvent(state.word, answer.reason, event))

    def say(
        self,
        what: str,
        device: str = "",
        reason: str = "",
        event: str = "",
        detail: str = "",
        until: int = 0,
    ) -> None:
        """Add a piece of news."""
        if event and not device:
            device, reason = self._causes.get(event, ("", ""))
        self.news.add(SentinelNews(what, self._now() // MS, device, reason, event, detail, until))

    def abandon(self, problem: Stopped) -> None:
        """End the news; open events continue at the next start of the sentinel."""
        self.news.close()
        for alerts in self._alerts.values():
            for alert in alerts:
                alert.abandon(problem)

    def _about(self, message: Message) -> str:
        """Return the event that a message refers to; for a message of an earlier run it is read from the
        body."""
        if message.kind != EVENT:
            return event_of(message.body)
        if message.id not in self._causes:
            data = read_event(message.body)
            self._causes[message.id] = (data.device_address, data.trigger_reason)
        return message.id

    def _count(self, ruling: Ruling) -> None:
        counts = self.counts
        counts.signals += 1
        counts.debounced += ruling is Ruling.DEBOUNCED
        counts.cooling += ruling is Ruling.COOLING
        counts.limited += ruling is Ruling.LIMITED
