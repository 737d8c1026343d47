"""`duly.Sentinel`: reports events of monitored devices; each event reaches the tower once, unless it is
cancelled.

The laws. Reporting never waits for the network: a signal is judged and stored locally, and is sent in order
when its countdown is over and the tower is reachable. Restarts and kill -9 lose nothing that was stored
(`await alert.stored()` waits for that). A sentinel can start, and work for days, without its tower. If
nothing can be stored, a critical event is sent to the tower anyway.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator
from typing import Final, Literal, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from duly.clients.base import Client, HubLink
from duly.clients.http_link import HttpLink
from duly.clients.sentinel_alerts import Alert, SentinelAlerts, SentinelNews
from duly.clients.sentinel_heartbeat import NOT_TOLD, SentinelHeartbeat
from duly.clients.websocket_link import Access, WebSocketLink
from duly.core.lifecycle import State
from duly.core.messages import NAME_LIMIT, Answer, key_of
from duly.core.monitor.devices import DEVICES
from duly.core.monitor.event_messages import SCOPE
from duly.core.monitor.machine import SELF, Monitor
from duly.core.monitor.signals import (
    DISCONNECT,
    SUMMARY,
    CancelRequest,
    CancelResult,
    ClockOffset,
    DeviceBack,
    EventChange,
    EventQueued,
    HeartbeatDue,
    Identity,
    NothingToChange,
    Report,
    SentinelPolicy,
    Severity,
    Signal,
    SignalRuling,
    Stamped,
    StopHeartbeat,
)
from duly.core.monitor.unstored_events import UnstoredEvent
from duly.core.operations import PutNewItem
from duly.core.steps import (
    Answered,
    Effect,
    MachineEffect,
    MachineEvent,
    Reachable,
    ReportOutcome,
    Transmit,
    Unreachable,
)
from duly.core.units import MS, SECOND, seconds
from duly.errors import ConnectionLost, Malformed, Stopped, TooLarge
from duly.runtime.engine import Engine
from duly.wire import frames
from duly.wire.frames import Frame, ServerCode

HALF: Final = len(r"\ud83d")
FIELD_LIMIT: Final = 64 * 1024
"""The most bytes of `meta`, and of `location`, that the tower accepts."""

FINAL: Final = frozenset({"malformed", "too_large", "id_conflict", "stale", "expired", "refused"})
"""Errors of the tower that no retry can change. After any other error the event stays in the queue: a revoked
token or a wrong clock may be corrected."""


class Sentinel(Client):
    """A sentinel: reports events of the devices that it watches.

    async with duly.Sentinel("http://hub:7800", token, store="sentinel.db", profile="home") as sentinel:
        sentinel.disconnect("aa:bb:cc:dd:ee:ff")
        alert = sentinel.trigger("fall", "watch-1", severity="critical", location={"lat": 31.2, "lon": 121.5})
        print(await alert.sent)

    `async with` does not wait for the tower; `await sentinel.ready()` does. `store` is the file of its queue
    and state; without it both are lost with the process. `profile` selects, at the tower, who is notified.
    `transport="http"` is for networks that do not allow WebSocket. `session` names what is guarded, if one
    sentinel guards several things in turn. `heartbeat=60` promises the tower a heartbeat every minute: when
    it is missing, the recipients of the profile are notified. Ending the program does not withdraw the
    promise; `stand_down` does.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        store: str | None = None,
        profile: str = "default",
        policy: SentinelPolicy | None = None,
        session: str = "",
        transport: Literal["websocket", "http"] = "websocket",
        heartbeat: float | None = None,
        access: Access | None = None,
    ) -> None:
        if transport not in ("websocket", "http"):
            raise Malformed(f"transport={transport!r} is not known; use 'websocket' or 'http'")
        super().__init__(url, token, store, access)
        self._profile = _name("profile", profile)
        self._session = session
        self._transport = transport
        self.policy = policy or SentinelPolicy()
        if heartbeat is not None:
            self.policy = structs.replace(self.policy, heartbeat=heartbeat)
        self._alerts = SentinelAlerts(self._now)
        self.counts = self._alerts.counts
        self._heartbeat = SentinelHeartbeat(
            lambda: self._link, lambda: self.tasks, self._alerts, self._profile,
            round(self.policy.heartbeat * 1000),
        )  # fmt: skip
        self._less = asyncio.Event()
        self._last = 0

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def _build_engine(self) -> Engine:
        self._monitor = Monitor(self.policy, await self._identify(), self._ledger.worker)
        engine = Engine(self._monitor, self._ledger, self._perform, recall=self._recall)
        engine.on_down = lambda problem: self._alerts.say("trouble", detail=str(problem))
        return engine

    def _open_news(self) -> None:
        self._alerts.news.open()

    def _abandon(self) -> None:
        self._less.set()  # wakes `drained`
        self._alerts.abandon(
            Stopped("the sentinel was closed; the event is stored and goes on at its next start")
        )

    def _open_link(self) -> HubLink:
        make: type[WebSocketLink] | type[HttpLink] = WebSocketLink
        if self._transport == "http":
            make = HttpLink
        return make(
            self._url, self._token, up=self._up, heard=self._heard, down=self._down,
            denied=lambda problem: self._alerts.say("denied", detail=str(problem)), access=self._access,
        )  # fmt: skip

    async def _identify(self) -> Identity:
        """Return this sentinel's identity, generated once and stored: the tower may be unreachable when it is
        first needed."""
        ledger = self._ledger
        if await ledger.item(SELF, "session") is None:
            new = (PutNewItem(SELF, "name", self._draw()), PutNewItem(SELF, "session", self._draw()))
            await ledger.write(*new)
        name, session = await ledger.item(SELF, "name"), await ledger.item(SELF, "session")
        tower = urlsplit(self._url).netloc or self._url
        return Identity(
            (name or b"").decode(), tower, self._profile, self._session or (session or b"").decode()
        )

    def _draw(self) -> bytes:
        return secrets.token_hex(8).encode()

    async def _recall(self) -> None:
        self._monitor.remember(await self._ledger.bucket(DEVICES))

    # ── signals ──────────────────────────────────────────────────────────────────────────────────

    def disconnect(self, device: str, *, meta: object = None, location: object = None) -> Alert:
        """Report that a device is no longer reachable."""
        return self.trigger(DISCONNECT, device, meta=meta, location=location)

    def reconnect(self, device: str) -> None:
        """Report that a device is reachable again. During the countdown of its disconnect this ends it
        without an alarm."""
        self._check_running()
        self._tell(DeviceBack(_name("device", device), self._now()))

    def trigger(
        self,
        reason: str,
        device: str,
        *,
        meta: object = None,
        location: object = None,
        severity: Severity | str = Severity.WARNING,
        countdown: float | None = None,
    ) -> Alert:
        """Report an event of a device. `countdown` is in seconds, and the policy's if not given; `severity`
        is `info`, `warning` or `critical`."""
        self._check_running()
        if _name("reason", reason) == SUMMARY:
            raise Malformed(f"{SUMMARY!r} is a reason that the sentinel uses itself; choose another")
        about, where = _json("meta", meta), _json("location", location)
        if countdown is not None and not 0 <= countdown < self.policy.keep:
            raise Malformed(f"countdown is a number of seconds, 0 or more, not {countdown}")
        alert = Alert(self, _name("device", device), reason)
        lasts = None if countdown is None else seconds(countdown)
        self._tell(
            Signal(device, reason, self._moment(), _severity(severity), about, where, lasts, origin=alert)
        )
        if _severity(severity) is Severity.CRITICAL:
            self._engine.hurry()
        return alert

    def cancel(self, device: str, event: str = "") -> None:
        """Cancel a device's events, or one of them: unsent events are never sent, and events sent within the
        last hour are followed by a correction."""
        self._check_running()
        self._tell(CancelRequest(self._now(), _name("device", device), event))

    def update(
        self,
        event: str,
        *,
        severity: Severity | str | None = None,
        meta: object = None,
        location: object = None,
    ) -> None:
        """Add newer information to an event: it is sent with the event, or after it."""
        self._check_running()
        if not event:
            raise Malformed("the event is not stored yet, or it was held back; await alert.stored() first")
        change = EventChange(
            event,
            self._now(),
            None if severity is None else _severity(severity),
            _json("meta", meta),
            _json("location", location),
        )
        self._tell(change)

    def stand_down(self) -> asyncio.Future[None]:
        """Withdraw the promise of a heartbeat: from now on no recipient is notified when this sentinel falls
        silent. The future is done when the tower has it; it need not be awaited."""
        self._check_running()
        if not self._link.connected:
            raise ConnectionLost(NOT_TOLD)
        self._engine.offer(MachineEvent(StopHeartbeat()))
        return self._heartbeat.stand_down()

    def news(self) -> AsyncIterator[SentinelNews]:
        """Yield what the sentinel does, as it happens, until it is closed."""
        return self._alerts.news.read()

    async def drained(self) -> None:
        """Wait until every reported event has ended."""
        self._check_running()
        handled = asyncio.Event()
        self._engine.offer(MachineEvent(None), handled.set)
        await handled.wait()
        while self.waiting:
            self._less.clear()
            await self._less.wait()

    @property
    def waiting(self) -> int:
        """How many events, updates and corrections the tower does not have yet."""
        self._check_running()
        return len(self._monitor)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────

    def _now(self) -> int:
        """Return the time; the monitor follows a clock that was set before, so that it fits its `steps`."""
        return self._engine.now()

    def _moment(self) -> int:
        """Return the time of a new signal. No two signals have the same time, so it shows which was first."""
        now = self._now()
        set_back = now < self._last - SECOND
        self._last = now if now > self._last or set_back else self._last + 1
        return self._last

    def _tell(self, report: Report) -> None:
        """Report to the monitor; the time in the report was read just now."""
        self._engine.offer(MachineEvent(Stamped(report, self._monitor.steps)))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                self._alerts.transmitted(message)
                frame = Frame(
                    message.kind, message.id, data=frames.raw(message.body), time=message.time // MS
                )
                self._link.send(frames.encode(frame))
            case ReportOutcome(key=key, state=state, answer=answer):
                self._less.set()
                self._alerts.ended(key, state, answer)
            case MachineEffect(what=SignalRuling() as ruled):
                self._alerts.ruled(ruled)
                self._heartbeat.report_held_back()
            case MachineEffect(what=UnstoredEvent() as event):
                self._hand_over(event)
            case MachineEffect(what=EventQueued(event=event, device=device, reason=reason)):
                self._alerts.say("queued", device, reason, event)
            case MachineEffect(what=HeartbeatDue()):
                self._heartbeat.beat()
            case MachineEffect(what=NothingToChange(event=event)):
                self._alerts.say("nothing to update", event=event)
            case MachineEffect(what=CancelResult() as called):
                if not called.dropped and not called.corrected and not called.held:
                    self._alerts.say("nothing to cancel", called.device)
                for reason in called.held:
                    self._alerts.say("cancelled", called.device, reason, detail="it was held back")
                for event in called.corrected:
                    self._alerts.say("correcting", called.device, event=event)

    def _hand_over(self, unstored: UnstoredEvent) -> None:
        """Send a critical event that could not be stored. The tower's answer counts as its acceptance; a copy
        that is stored and sent later is a duplicate."""
        message, events = unstored.message, self._monitor.unstored
        if not events.may_go(message):
            return
        self._alerts.unstored(message, unstored.origin, self._engine.down, self._link.connected)
        if self._link.connected:
            self._perform(Transmit(events.sent(message), 1))

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def _up(self, welcome: Frame) -> None:
        super()._up(welcome)
        self._measure(welcome)
        self._offer(Reachable(""))
        self._engine.hurry()
        self._alerts.say("online")
        self._heartbeat.connected()

    def _measure(self, frame: Frame) -> None:
        """Measure how far the tower's clock is ahead of ours, if a frame contains its time."""
        if frame.time is not None:
            offset = ClockOffset(frame.time * MS - self._now())
            self._offer(MachineEvent(Stamped(offset, self._monitor.steps)))

    def _down(self) -> None:
        self._heartbeat.disconnected()
        self._offer(Unreachable(""))
        self._alerts.say("offline")

    def _heard(self, frame: Frame) -> None:
        if frame.type != "server_ack" or self._heartbeat.answered(frame):
            return
        assert frame.seq_id is not None  # only heartbeats have none
        self._measure(frame)
        key = key_of(SCOPE, frame.seq_id)
        match frame.code:
            case ServerCode.ACCEPTED | ServerCode.DUPLICATE:
                if key in self._monitor.unstored:
                    self._alerts.taken_unstored(key)
                self._offer(Answered(key, State.DONE, Answer()))
            case ServerCode.BAD_PARAMETERS if frame.error in FINAL:
                # The tower may have accepted an earlier transmission and forgotten it since. If it has the
                # event in another form, an earlier run has sent it unstored.
                is_event = self._alerts.event_of(key) == frame.seq_id
                other_form = is_event and frame.error == "id_conflict"
                state = State.UNKNOWN if other_form or frame.error == "stale" else State.FAILED
                reason = f"{frame.error}: {frame.detail or ''}"
                self._offer(Answered(key, state, Answer(ServerCode.BAD_PARAMETERS, b"", reason)))
            case _:
                event = self._alerts.event_of(key)
                self._alerts.say("refused", event=event, detail=f"{frame.error}: {frame.detail or ''}")


def _name(field: str, value: str) -> str:
    raw = value.encode(errors="replace")
    if not 0 < len(raw) <= NAME_LIMIT or b"\0" in raw or raw.decode() != value:
        raise Malformed(f"{field} is a text of 1 to {NAME_LIMIT} bytes without NUL, not {value[:80]!r}")
    return value


def _severity(value: Severity | str) -> Severity:
    try:
        return Severity(value)
    except ValueError:
        known = ", ".join(severity.value for severity in Severity)
        raise Malformed(f"severity={value!r} is not known; use one of {known}") from None


def _dump(value: object) -> bytes:
    """Return a value as JSON. Text that was cut in the middle of a character must not cost an alert: what
    cannot be encoded becomes a �."""
    try:
        return frames.dump(value)
    except UnicodeEncodeError:
        return frames.dump(json.loads(_HALVES.sub(_whole, json.dumps(value))))


_HALVES: Final = re.compile(r"\\\\|(?:\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})|\\ud[89a-f][0-9a-f]{2}")
"""In ASCII JSON: backslashes, surrogate pairs, and lone surrogates."""


def _whole(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) != HALF else "\\ufffd"


def _json(field: str, value: object) -> bytes:
    try:
        text = bytes(_dump(value))
    except (TypeError, ValueError, RecursionError) as problem:
        raise Malformed(f"{field} cannot be written as JSON: {problem}") from None
    if len(text) > FIELD_LIMIT:
        raise TooLarge(f"{field} has {len(text)} bytes, the limit is {FIELD_LIMIT}; leave something out")
    frames.check(msgspec.json.encode({"data": {field: msgspec.Raw(text)}}))  # as deep as in its frame
    return text
