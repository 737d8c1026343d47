"""Worlds of alerts: production sentinels and the production tower, with simulated sockets between them.

Monitors report signals, people cancel, processes die around every commit, links break, disks fail, clocks
are wrong; a sentinel may be cut off for so long that the tower has to notice. The checkers compare what
sentinels have stored with what the tower has at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Final, cast

import msgspec

from duly.apps.alerts.heartbeats import PROMISES
from duly.apps.alerts.model import is_undated
from duly.apps.alerts.profiles import PROFILES, Profile
from duly.apps.alerts.service import AlertService
from duly.clients.sentinel import Sentinel
from duly.core import operations as w
from duly.core.heartbeat_watch import Promise
from duly.core.lifecycle import State
from duly.core.messages import Message, Verdict, key_of, names_in
from duly.core.monitor.signals import (
    CANCEL,
    DISCONNECT,
    EVENT,
    SILENT,
    SUMMARY,
    SentinelPolicy,
    Severity,
    SignalRuling,
    read_event,
)
from duly.core.steps import Effect, MachineEffect
from duly.core.units import SECOND
from duly.errors import DulyError
from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.server.router import Router
from duly.storage.ledger import Ledger
from duly.storage.memory import Disk
from duly.testing.sim.checkers import Checker, Finding, admitted_once, states_move_forward
from duly.testing.sim.gateway import GatewayHub, HubSession, SimLink, Wire, break_link
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.world import BUSY, WantedMessage, World
from duly.testing.sim.world import ObservedEffect as Seen
from duly.wire import frames
from duly.wire.frames import Frame

if TYPE_CHECKING:
    from duly.clients.base import HubLink
    from duly.testing.sim.plan import SimPlan

POLICY: Final = SentinelPolicy(
    debounce=2, per_hour=6, cooldown=15, summary=10, countdown=4, keep=3_600, retry_first=3, retry_most=20,
    heartbeat=3,
)  # fmt: skip
PROFILE: Final = msgspec.json.encode(Profile(grace=4 * SECOND))
CHECK_SECONDS: Final = 2.0
"""How often the tower checks which sentinels are silent."""
CUT_OFF: Final = 22.0
"""Seconds for which one sentinel is cut off in worlds with cuts."""
NOTICED: Final = 3 + 4 + 2 * CHECK_SECONDS + 3
"""Seconds after its last heartbeat within which a silent sentinel is reported: the promised interval, the
grace, two checks, and the time to store it."""
START: Final = 1_700_000_000 * SECOND
"""The time at which a world begins, by a clock that is right."""
TO_1970: Final = 1_699_999_000 * SECOND
"""The error of a clock that starts in 1970. In worlds in which clocks are set, one sentinel has such a clock,
and is offline at first."""
NEAR: Final = 300 * SECOND
"""The tolerated error of the time of an alert: clocks in this world are wrong by less, and are set by
less."""
DEVICES: Final = ("belt", "band")
REASONS: Final = ("disconnect", "fall")
SIGNALS: Final = 4
"""The number of signals for each message that other worlds would send."""


class SentinelTower(GatewayHub):
    """A hub with the production alerts."""

    async def begin(self) -> None:
        """Start the alert service with one profile, and check heartbeats."""
        self.wires = []
        self.greeting = {}
        self.recorded = getattr(self, "recorded", [])
        activity = ActivityLog(self.ledger)
        self.disk.buckets.setdefault(PROFILES, {}).setdefault("home", PROFILE)
        logging.getLogger("duly.alerts").setLevel(logging.CRITICAL + 1)  # no profile here has recipients
        self.alerts = AlertService(self.ledger, activity)
        self.router = Router(activity, [self.alerts])
        self.engine = self.alerts.engine
        await self.alerts.start()
        self.spawn(self._check_heartbeats(self.alerts))

    async def _check_heartbeats(self, alerts: AlertService) -> None:
        while self.alive and self.alerts is alerts:
            await asyncio.sleep(CHECK_SECONDS)
            await alerts.heartbeats.check()

    def principal(self, name: str) -> Principal:
        """Return a sentinel's account."""
        return Principal(name, Role.SENTINEL)


class _SimSentinel(Sentinel):
    def __init__(self, node: SimWatcher) -> None:
        super().__init__("http://tower", "", profile="home", policy=POLICY)
        self.node = node

    async def _open_ledger(self) -> Ledger:
        return self.node.ledger

    def _draw(self) -> bytes:
        return f"{self.node.name}-{self.node.world.epochs[self.node.name]}".encode()

    def _open_link(self) -> HubLink:
        return SimLink(self.node, self._up, self._heard, down=self._down)

    def _perform(self, effect: Effect) -> None:
        if not self.node.alive:
            return
        if isinstance(effect, MachineEffect) and isinstance(effect.what, SignalRuling):
            self._note(effect.what)
        super()._perform(effect)

    def _note(self, ruled: SignalRuling) -> None:
        what = f"{ruled.device} {ruled.reason}: {ruled.decision.ruling.value}"
        self.node.world.log.note(self.node.name, what, self.node.key(ruled.event) if ruled.event else b"")
        if ruled.origin is not None:
            self.node.world.judged(self.node, ruled)


class Fact(msgspec.Struct, frozen=True):
    """Something that happened at a device, with its time: a signal that the sentinel has judged and
    stored, or a report of a monitor or a person."""

    at: float
    what: str
    """a reason, `back` or `cancel`"""
    critical: bool = False
    lives: int = 0
    """how often the sentinel had been started"""


class SimWatcher(SimProcess):
    """A sentinel with its monitor and the person who carries it."""

    world: SentinelWorld

    def key(self, event: str) -> bytes:
        """Return the key of an event at the tower."""
        return key_of(self.name, event)

    async def begin(self) -> None:
        """Connect the sentinel."""
        self.sentinel = sentinel = _SimSentinel(self)
        await sentinel.__aenter__()
        if self.sentinel is sentinel:
            self.engine = sentinel._engine

    def die(self) -> None:
        """End the sentinel without closing its connection."""
        super().die()
        break_link(self.sentinel)

    def act(self) -> None:
        """Report a signal, reconnect a device, cancel or update an alert."""
        draw, sentinel = self.world.rng.random, self.sentinel
        device, reason = self.world.rng.choice(DEVICES), self.world.rng.choice(REASONS)
        severity = self.world.rng.choice(list(Severity))
        countdown = self.world.rng.choice([None, 0.0])
        what = draw()
        with suppress(DulyError):
            if what < 0.6:
                alert = sentinel.trigger(reason, device, severity=severity, countdown=countdown)
                made = asyncio.get_running_loop().time()
                self.world.reported[id(alert)] = (made, severity is Severity.CRITICAL)
            elif what < 0.75:
                sentinel.reconnect(device)
                self.world.happened(self, device, "back")
            elif what < 0.9:
                sentinel.cancel(device)
                self.world.happened(self, device, "cancel")
            elif events := sentinel._alerts.open:
                event = self.world.rng.choice(events)
                sentinel.update(event, location={"lat": round(draw(), 3)})


class NoMonitoredDevices(SimProcess):
    """A receiver that does nothing: monitors report what devices do."""

    async def begin(self) -> None:
        """Do nothing: this world has sentinels in place of devices."""
        return


class SentinelWorld(World):
    """A world of sentinels and a tower."""

    sender = SimWatcher
    receiver = NoMonitoredDevices
    hub = SentinelTower

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.bodies: dict[bytes, bytes] = {}
        """the newest content of events that sentinels have stored, by their key at the tower"""
        self.started: dict[str, list[bytes]] = {}
        """the events of each sentinel, in the order in which they were first sent"""
        self.corrections: list[tuple[str, Message]] = []
        self.facts: dict[tuple[str, str], list[Fact]] = {}
        """what happened at each device of each sentinel"""
        self.reported: dict[int, tuple[float, bool]] = {}
        """when alerts were reported, and whether they are critical"""
        self.stored_at: dict[bytes, float] = {}
        self.heartbeats: dict[str, list[float]] = {}
        """when the tower stored heartbeats of each sentinel"""
        self.silences: list[tuple[float, str]] = []
        """when the tower stored an alert about a silent sentinel"""

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        super()._schedule_faults(senders, receivers, hubs)
        if self.plan.cuts:
            rng = Random(f"silence {self.plan.seed}")
            name, begin = rng.choice(senders).name, 10 + rng.random() * (BUSY - 10)
            self.loop.call_later(begin, self.network.sever, "hub", name)
            self.loop.call_later(begin + CUT_OFF, self.network.mend, "hub", name)
        if self.plan.steps:
            rng = Random(f"no clock {self.plan.seed}")
            clockless, away = rng.choice(senders), rng.random() * BUSY / 2
            self._set_clock(clockless, -TO_1970)
            self.network.sever("hub", clockless.name)
            self.loop.call_later(rng.random() * BUSY, self._set_clock, clockless, TO_1970)
            self.loop.call_later(away, self.network.mend, "hub", clockless.name)

    def happened(self, node: SimWatcher, device: str, what: str) -> None:
        """Note what a monitor or a person did."""
        fact = Fact(asyncio.get_running_loop().time(), what, lives=node.incarnation)
        self.facts.setdefault((node.name, device), []).append(fact)

    def judged(self, node: SimWatcher, ruled: SignalRuling) -> None:
        """Note a signal with the time of its report: the device may be back before it is stored."""
        now = asyncio.get_running_loop().time()
        at, critical = self.reported.get(id(ruled.origin), (now, False))
        facts = self.facts.setdefault((node.name, ruled.device), [])
        facts.append(Fact(at, ruled.reason, critical, node.incarnation))
        facts.sort(key=lambda fact: fact.at)

    async def _use(self, sender: SimProcess, receivers: list[SimProcess]) -> None:
        assert isinstance(sender, SimWatcher)
        await asyncio.sleep(0.5)
        for _ in range(self.plan.messages * SIGNALS):
            burst = self.rng.random() < 0.5
            pause = 0.3 * self.rng.random() if burst else self.rng.random() * 3 * BUSY / self.plan.messages
            await asyncio.sleep(pause / SIGNALS)
            if sender.alive and sender.ready:
                sender.act()

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        """Note what sentinels store, what the tower accepts, and which sentinels it reports as silent."""
        super().committed(node, disk, write, result)
        match write, result:
            case w.Admit(message=message), Verdict() as verdict if verdict.fresh:
                if isinstance(node, SimWatcher):
                    self._stored(node, message, started=bool(write.state))
                elif message.kind == EVENT and read_event(message.body).trigger_reason == SILENT:
                    self.silences.append((self.loop.time(), message.scope))
                    self.log.note(node.name, f"reports that {message.scope} is silent")
                elif message.kind == EVENT:
                    at = asyncio.get_running_loop().time()
                    self.log.effects.append(Seen(at, node.name, node.incarnation, message, 1))
                    self.log.note(node.name, "EVENT listed", message.key)
            case w.Take(ref=ref, attempt=0), True if isinstance(node, SimWatcher):
                self._went_out(node, ref.key)
            case ((w.PutItem(bucket=bucket, body=body) | w.PutNewItem(bucket=bucket, body=body)), _):
                if bucket == PROMISES and not (promise := msgspec.json.decode(body, type=Promise)).silent:
                    self.heartbeats.setdefault(promise.sentinel, []).append(self.loop.time())

    def _stored(self, node: SimWatcher, message: Message, *, started: bool) -> None:
        if message.kind == EVENT:
            key = node.key(message.id)
            self.stored_at.setdefault(key, asyncio.get_running_loop().time())
            self.bodies[key] = message.body
            self.log.wanted[key] = WantedMessage(message, self.epochs[node.name], 0)
        elif message.kind == CANCEL:
            self.corrections.append((node.name, message))
        if started:
            self._went_out(node, message.key)

    def _went_out(self, node: SimWatcher, key: bytes) -> None:
        theirs = node.key(names_in(key)[1])
        if theirs in self.bodies:
            self.started.setdefault(node.name, []).append(theirs)

    @property
    def tower(self) -> SentinelTower:
        """The hub with the tower."""
        return cast("SentinelTower", self.nodes["hub"])

    def _replay(self, count: int) -> None:
        """Send recorded frames of sentinels again, with their credentials."""
        self.tower.replay(count)

    def _lie(self) -> None:
        tower = self.tower
        known = [seen.message for seen in self.log.effects]
        if known and tower.ready:
            self.faults += 1
            message = self.rng.choice(known)
            forged = msgspec.structs.replace(read_event(message.body), trigger_reason="forged")
            frame = Frame(EVENT, message.id, data=frames.raw(msgspec.json.encode(forged)))
            self.log.note("liar", "sends other content under a known id", message.key)
            session = HubSession(Wire(self, "liar"), lambda raw: None)
            tower.hear(session, message.scope, frames.encode(frame))

    def _reinstall(self, sender: SimProcess) -> None:
        if sender.alive:
            left = [names_in(key)[1] for key in sender.disk.messages]
            self.log.abandoned |= {key_of(sender.name, id_) for id_ in left}
        super()._reinstall(sender)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────


def events_arrived(world: SentinelWorld) -> Iterator[Finding]:
    """[P1, P5] Every event that a sentinel has stored is at the tower, or ended at the sentinel for a
    reason."""
    tower = world.settled_disks["hub"]
    for key, body in world.bodies.items():
        name, event = names_in(key)
        home = world.settled_disks[name].messages.get(key_of("sentinel", event))
        ended = home is not None and home.state in (State.CANCELLED, State.SUPERSEDED)
        listed = tower.messages.get(key)
        if key in world.log.abandoned:
            continue
        if listed is None and not ended:
            yield f"it was stored, and is not in the tower ({home.state.word if home else 'gone'})", key
        elif listed is not None and ended:
            yield "it was called off before it left, and the tower has it", key
        elif listed is not None and listed.message.body != body:
            yield "the tower has other content than its sentinel", key


def no_signal_lost(world: SentinelWorld) -> Iterator[Finding]:
    """[P5] The tower knows of every device that has disconnected for good, and of every critical signal,
    unless it was cancelled. This does not hold if the sentinel died since the device was last connected:
    it may have died before it knew."""
    if world.plan.reinstalls:
        return
    for (name, device), facts in world.facts.items():
        quiet = max((n for n, fact in enumerate(facts) if fact.what in ("back", "cancel")), default=-1)
        since = facts[quiet].at if quiet >= 0 else 0.0
        if len({fact.lives for fact in facts[max(quiet, 0) :]}) > 1:
            continue
        # What counted down when the device was last there may have become the event of its absence.
        told = _told(world, name, device, since - POLICY.countdown)
        if any(fact.what == DISCONNECT for fact in facts[quiet + 1 :]) and DISCONNECT not in told:
            yield f"{name} did not report that {device} stays away", b""
        fresh = _told(world, name, device, since - POLICY.countdown, critical=True)
        for fact in facts[quiet + 1 :]:
            if fact.critical and fact.what not in fresh:
                before = _told(world, name, device, fact.at - POLICY.debounce, critical=True)
                if fact.what not in before:
                    yield f"{name} did not report a critical {fact.what} of {device}", b""


def _told(world: SentinelWorld, name: str, device: str, since: float, *, critical: bool = False) -> set[str]:
    """Return the reasons of the events about a device that were stored since then and are in the tower's
    list."""
    listed = world.settled_disks["hub"].messages
    found: set[str] = set()
    for key, at in world.stored_at.items():
        if at >= since and names_in(key)[0] == name and key in listed:
            data = read_event(world.bodies[key])
            if data.device_address == device and (data.severity is Severity.CRITICAL or not critical):
                found.add(data.trigger_reason)
    return found


def silence_taken_back(world: SentinelWorld) -> Iterator[Finding]:
    """After the calm every sentinel is connected: none counts as silent, and every alert about a silence is
    cancelled."""
    hub = world.nodes["hub"].disk
    for name, body in hub.buckets.get(PROMISES, {}).items():
        promise = msgspec.json.decode(body, type=Promise)
        if promise.silent or promise.event:
            yield f"{name} is connected, and counts as silent", b""
    if not hub.buckets.get(PROMISES) and not world.plan.faulty_disk:
        yield "no sentinel has ever been heard", b""


def silence_noticed(world: SentinelWorld) -> Iterator[Finding]:
    """[P5] The tower stores an alert soon after a sentinel fell silent. This does not hold if the tower died,
    its disk failed or its clock was set meanwhile: then every silence begins anew."""
    shaken = [at for at, who, what, _ in world.log.lines if who == "hub" and what.startswith(_SHAKEN)]
    for name, heard in world.heartbeats.items():
        for last, following in pairwise(heard):
            until = last + NOTICED
            if following <= until or any(last <= at <= until for at in shaken):
                continue
            if not any(who == name and last < at <= until for at, who in world.silences):
                yield f"{name} was silent for {following - last:.0f} s, and the tower did not notice", b""


_SHAKEN: Final = ("dies", "disk fails", "clock is set")


def alerts_dated(world: SentinelWorld) -> Iterator[Finding]:
    """Every alert at the tower has the time of its signal, or says that it is undated."""
    for seen in world.log.effects:
        message, stored = seen.message, world.stored_at.get(seen.message.key)
        if stored is None or is_undated(message):
            continue
        wrong = message.time - (START + round(stored * SECOND))
        if abs(wrong) > NEAR:
            yield f"its time is wrong by {wrong / SECOND:.0f} s, and it does not say so", message.key


def listed_once(world: World) -> Iterator[Finding]:
    """[P2] The tower lists every event once, and only events of sentinels."""
    for key, count in Counter(seen.message.key for seen in world.log.effects).items():
        if count > 1:
            yield f"the tower listed it {count} times", key
        if key not in world.log.wanted:
            yield "the tower lists what no sentinel stored", key


def in_order(world: SentinelWorld) -> Iterator[Finding]:
    """[P4] Of two events of a sentinel, the one that was noticed first and sent first is listed first.
    This does not hold if the tower's disk fails, since refused events are sent again after later ones, nor
    with replays."""
    if world.plan.faulty_disk or world.plan.reinstalls or world.plan.replays:
        return
    position = {key: n for keys in world.started.values() for n, key in enumerate(keys)}
    listed: dict[str, list[tuple[int, int]]] = {}
    for seen in world.log.effects:
        here = position[seen.message.key], world.log.wanted[seen.message.key].message.time
        before = listed.setdefault(seen.message.scope, [])
        if any(went_out > here[0] and noticed > here[1] for went_out, noticed in before):
            yield "the tower got it after one that is later in every way", seen.message.key
        before.append(here)


def corrections_arrived(world: SentinelWorld) -> Iterator[Finding]:
    """[P5] Every stored correction reaches the tower."""
    for name, message in world.corrections:
        key = key_of(name, message.id)
        if key not in world.settled_disks["hub"].messages and key not in world.log.abandoned:
            yield "a correction is missing at the tower", key


def nothing_left_to_do(world: World) -> Iterator[Finding]:
    """[P5] After the calm nothing is left to do."""
    for name, disk in world.settled_disks.items():
        for key, record in disk.messages.items():
            if not record.state.terminal:
                yield f"{name} still has it as {record.state.word}", key
        for ref, delivery in disk.deliveries.items():
            if not delivery.state.terminal:
                yield f"{name} still has an open delivery of it", ref.key


def repeats_held_back(world: SentinelWorld) -> Iterator[Finding]:
    """For one device and reason there are no two events within the debounce, and no more in an hour than
    allowed, unless a clock was set or a sentinel was reinstalled. Critical events are only held back as
    repeats."""
    if world.plan.steps or world.plan.reinstalls:
        return
    events: dict[tuple[str, str], list[tuple[float, str, bool]]] = {}
    for key, want in world.log.wanted.items():
        data = read_event(want.message.body)
        if data.trigger_reason != SUMMARY:
            critical = data.severity is Severity.CRITICAL
            cause = (names_in(key)[0], data.device_address)
            events.setdefault(cause, []).append((world.stored_at[key], data.trigger_reason, critical))
    for (name, device), told in events.items():
        told.sort()
        for kind in {(reason, critical) for _, reason, critical in told}:
            times = [at for at, reason, critical in told if (reason, critical) == kind]
            # Storing takes a moment: a little less than the debounce counts as the debounce.
            least = POLICY.debounce - 0.5
            if not kind[1] and any(after - before < least for before, after in pairwise(times)):
                yield f"{name} let a repeat of {kind[0]} at {device} pass", b""
        limited = [at for at, reason, critical in told if not critical and reason != DISCONNECT]
        if len(limited) > POLICY.per_hour:
            yield f"{name} let more pass from {device} than {POLICY.per_hour} in an hour", b""


SENTINEL_CHECKERS: Final[tuple[Checker[SentinelWorld], ...]] = (
    events_arrived,
    no_signal_lost,
    alerts_dated,
    silence_taken_back,
    silence_noticed,
    listed_once,
    in_order,
    corrections_arrived,
    nothing_left_to_do,
    repeats_held_back,
    admitted_once,
    states_move_forward,
)
