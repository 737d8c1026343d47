"""The tower, the service for alerts: sentinels report alerts, people are notified, and both can see how that
went.

`server_ack` is sent after the alert and its deliveries are committed, in one transaction. The same id is the
same alert, however often and over however many connections it arrives; a repeat gets code 5 and the state.
The reporter of an alert is the authenticated account: a sentinel cannot change the alerts of another one. An
alert whose profile is missing is refused, since no recipient would be notified: its sentinel keeps it and
reports that. A critical alert is never silent: quiet hours do not apply to it, nor does a silence unless it
includes critical alerts; if no recipient could be notified, those of the profile `default` are, and that is
recorded.

`Fanout` and `Engine` do everything durable. This module puts the parts of the tower together and performs the
effects of the fanout. `reported_alerts` and `alert_changes` handle the frames of sentinels, `planner` decides
who is notified, `configuration` keeps profiles and silences, `alert_attempts` and `notification_sender`
notify recipients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Final, cast

from msgspec import structs

from duly.apps.alerts.ack_links import AckLinks, open_ack_links
from duly.apps.alerts.alert_attempts import AlertAttempts
from duly.apps.alerts.alert_backlog import AlertBacklog
from duly.apps.alerts.alert_changes import AlertChanges
from duly.apps.alerts.alert_queries import CHANNEL, DEAD, STATUSES, show
from duly.apps.alerts.configuration import AlertConfiguration
from duly.apps.alerts.heartbeats import Heartbeats, read_beat
from duly.apps.alerts.held_back_counts import HeldBackCounts, HeldBackReport
from duly.apps.alerts.limited_alerts import LimitedAlerts
from duly.apps.alerts.model import NOTHING_SAID, read_status
from duly.apps.alerts.notification_sender import NotificationSender
from duly.apps.alerts.operations import AlertOperations
from duly.apps.alerts.planner import AlertPlanner
from duly.apps.alerts.profiles import Profiles
from duly.apps.alerts.replies import AlertReplies
from duly.apps.alerts.reported_alerts import ReportedAlerts
from duly.apps.alerts.settlement import AlertSettlement, settled, unsettled
from duly.apps.alerts.tower_alerts import TowerAlerts
from duly.apps.alerts.unnotified_alerts import UnnotifiedAlerts
from duly.core.account_limits import AccountLimits
from duly.core.fanout.attempts import FanoutQueries
from duly.core.fanout.machine import Fanout
from duly.core.fanout.plan import (
    Amendment,
    DeliveriesChanged,
    FanoutCounts,
    FanoutPolicy,
    MessageUnsettled,
    StartAttempt,
)
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of, names_in
from duly.core.monitor.signals import CANCEL, EVENT, HEARTBEAT, UPDATE
from duly.core.operations import DeliveryRef, OpenDelivery
from duly.core.steps import Effect, MachineEffect, MachineEvent, Reply, ReportOutcome
from duly.core.units import MS
from duly.errors import DulyError, Malformed, NoProfile, NotAllowed
from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import Engine, Performers
from duly.runtime.limited_repeats import LimitedRepeats
from duly.runtime.outages import Outages
from duly.runtime.tasks import Supervisor
from duly.runtime.trail import Trail
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox
from duly.wire import outgoing
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import ServerAck, WelcomeFrame
from duly.wire.session import Session

STOP_SECONDS: Final = 3.0
"""How long a hub that stops waits for attempts under way."""
_REPORTERS: Final = (Role.SENTINEL, Role.ADMIN)
_SENTINEL: Final = Role.SENTINEL  # reading a member from its class takes nine times as long


async def _every_name(_: str) -> bool:
    return True


class AlertService:
    """The tower of one hub: receives alerts and has them delivered."""

    name: Final = "alerts"

    roles = frozenset({Role.SENTINEL})
    types = frozenset({EVENT, UPDATE, CANCEL, HEARTBEAT})
    prompt = frozenset({EVENT})
    open: Final = False

    def __init__(
        self,
        ledger: Ledger,
        activity: ActivityLog,
        policy: FanoutPolicy | None = None,
        *,
        private: bool = False,
        folder: Path | None = None,
        box: SecretBox | None = None,
        known: Callable[[str], Awaitable[bool]] = _every_name,
        trail: Trail | None = None,
        limits: AccountLimits | None = None,
    ) -> None:
        self._ledger = ledger
        self._trail = Trail(ledger) if trail is None else trail
        self._replies = AlertReplies(self._trail, activity, ledger)
        self.profiles = Profiles(ledger, private=private, box=box)
        self.operations = AlertOperations(ledger, self.profiles, self._changed)
        self.planner = AlertPlanner(self.profiles)
        self.configuration = AlertConfiguration(ledger, self.profiles, self.operations, self.planner)
        self._unnotified = UnnotifiedAlerts(ledger, self.operations, activity)
        self._settlement = AlertSettlement(ledger, self.operations, self._settled)
        self._fanout = Fanout(
            policy or FanoutPolicy(CHANNEL), ledger.worker, self._queries(), sole=ledger.sole
        )
        self.engine = self._new_engine()
        own = TowerAlerts(self.engine, self.operations)
        self.backlog = AlertBacklog(self.operations, self._fanout, shared=not ledger.sole)
        self.heartbeats = Heartbeats(ledger, self.profiles, own.report, own.take_back, known)
        self.held_back = HeldBackCounts(ledger)
        self._limited = LimitedAlerts(
            (limits or AccountLimits()).alerts, ledger.worker, own.store, LimitedRepeats(ledger)
        )
        self._reported = ReportedAlerts(
            ledger, self.configuration, self.planner, self._limited, self._replies, self._trail, self.engine,
            self._fanout.counts, self._beat_with,
        )  # fmt: skip
        self._changes = AlertChanges(
            ledger, self._fanout.policy, self.configuration, self.operations, self.planner, self._limited,
            self._unnotified, self.engine,
        )  # fmt: skip
        self._sessions: dict[str, set[Session]] = {}
        self._box = box
        self.links: AckLinks | None = None
        """the links by which recipients acknowledge; None without a key to sign them with"""
        self.tasks = Supervisor()
        self.outages = Outages()
        self._attempts = AlertAttempts(
            ledger, self.planner, self.engine, self._trail, activity, self.outages, self._changed,
            self._missed,
        )  # fmt: skip
        self._sender = NotificationSender(
            ledger,
            self.profiles,
            self.planner.statuses,
            self._attempts.is_wanted,
            private=private,
            folder=folder,
        )

    def _new_engine(self) -> Engine:
        actions: Performers = {Reply: self._replies.reply, ReportOutcome: self._report_outcome}
        ours = self._trail.resuming(partial(self._ledger.open_deliveries, CHANNEL))
        # `receive` recalls alerts itself, before it counts them against their sender's limit.
        return Engine(self._fanout, self._ledger, self._perform, performers=actions, recalls=False, ours=ours)

    def _queries(self) -> FanoutQueries:
        profiles, planner = self.profiles, self.planner
        return FanoutQueries(
            plan=planner.plan,
            traits=planner.traits,
            route=profiles.recipient_policy,
            doubt=profiles.doubt,
            tries=profiles.tries,
            wanted=planner.is_wanted,
            cancelled=planner.is_corrected,
            notes=planner.notes,
            unsettled=unsettled,
            settled=settled,
        )

    async def start(self) -> None:
        """Read profiles, silences and open deliveries from the ledger, and begin to work."""
        await self.configuration.refresh()
        self.profiles.warn_of_outside_files()
        self.links = self._sender.links = await open_ack_links(self._ledger, self._box)
        for name, body in (await self._ledger.bucket(STATUSES)).items():
            scope, _, id_ = name.partition("/")
            self.planner.statuses[key_of(scope, id_)] = read_status(body)
        await self.engine.start()
        await self.heartbeats.check()  # heartbeats from now on are distinguished from earlier ones
        self._spawn(self._catch_up())

    async def _catch_up(self) -> None:
        """Finish what a crash has interrupted: the corrections after a cancellation, and the notifications
        of the default profile after a critical alert that reached no recipient."""
        for key in [key for key in self.planner.statuses if self.planner.is_corrected(key)]:
            await self._changed(key)
        await self._unnotified.catch_up()

    async def stop(self) -> None:
        """Wait a moment for attempts under way, then stop; the ledger keeps the rest."""
        await self.tasks.finish(STOP_SECONDS)
        await self.engine.stop()
        await self.tasks.stop()
        await self._sender.close()

    def state(self) -> dict[str, float]:
        """Return the counts of this tower since its start, and the number of open deliveries."""
        counts = self._fanout.counts
        average = counts.retries_well / counts.retried_well if counts.retried_well else 0.0
        return {
            "open_deliveries": len(self._fanout),
            "total_events": counts.accepted,
            "duplicate_events": counts.duplicates,
            "retry_attempts": counts.retries,
            "retry_successes": counts.retried_well,
            "average_retries": round(average, 2),
            "attempts": counts.attempts,
            "messages": counts.batches,
            "arrived": counts.arrived,
            "failed": counts.failed,
            "in_doubt": counts.in_doubt,
            "critical_untold": self._unnotified.count,
        }

    async def show(self, key: bytes) -> dict[str, object] | None:
        """Return one alert as the API shows it, or None if the ledger has none of this key. `falls_back` says
        that the recipients of the default profile are about to be notified."""
        alert = await self.operations.get(key)
        if alert is None or alert.record.state not in DEAD:
            return None if alert is None else show(alert)
        if await self._unnotified.is_noted(key):
            return show(alert) | {"falls_back": True}
        # The deliveries that the note asks for may have been planned after the alert was read.
        return show(await self.operations.get(key) or alert)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        """Greet a sentinel that has connected."""
        self._sessions.setdefault(who.name, set()).add(session)
        self._spawn(self.heartbeats.seen(who.name))
        session.push(WelcomeFrame(who.name, self._ledger.clock.now() // MS))

    async def disconnected(self, session: Session, who: Principal) -> None:
        """Forget a session that has ended."""
        sessions = self._sessions.get(who.name, set())
        sessions.discard(session)
        if not sessions:
            self._sessions.pop(who.name, None)
            self._spawn(self.heartbeats.seen(who.name))

    @property
    def counts(self) -> FanoutCounts:
        """The counts since the start."""
        return self._fanout.counts

    @property
    def pending(self) -> int:
        """The number of alerts with open deliveries at this hub."""
        return self._fanout.live

    def is_under_way(self, key: bytes) -> bool:
        """Return whether an alert has open deliveries at this hub."""
        return self._fanout.is_live(key)

    @property
    def online(self) -> set[str]:
        """The sentinels that are connected to this hub."""
        return set(self._sessions)

    def refused(self, who: Principal, seq_id: str) -> None:
        """Do nothing: no alert waits for another one."""

    def dismiss(self, name: str) -> None:
        """Close the connections of an account whose token is void."""
        for session in list(self._sessions.get(name, ())):
            session.close("your token is no longer valid")

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Handle a frame; return whether it is or will be answered. An alert is handled at once if its
        profile is known and the engine has room for it."""
        if who.role not in _REPORTERS:
            raise NotAllowed(
                f"{who.name} ({who.role.value}) may not report alerts; use an account of 'duly add sentinel'"
            )
        if who.role is _SENTINEL and who.name not in self._sessions and self.heartbeats.unseen(who.name):
            self._spawn(self.heartbeats.seen(who.name))
        if frame.type == HEARTBEAT:
            return self._beat(session, who, frame)
        if frame.seq_id is None:
            raise Malformed(f"an {frame.type} needs a seq_id, minted once and the same in every resend")
        if frame.type != EVENT:
            return self._changes.take(session, who, frame)
        return self._reported.take(session, who, frame)

    def _beat_with(self, alert: Message) -> None:
        """Store that an alert counts as a heartbeat, if its profile demands them."""
        if self.heartbeats.owed(alert.scope, alert.recipient):
            self._spawn(self.heartbeats.note(alert.scope, alert.recipient))

    async def _beat(self, session: Session, who: Principal, frame: Frame) -> bool:
        """Store a heartbeat; it is answered only if it has an id."""
        self._limited.take(who.name, len(frame.data), self._ledger.clock.now())
        beat = read_beat(bytes(frame.data))
        if beat.every and not await self.configuration.has_profile(beat.profile_id, who.name):
            raise NoProfile(
                f"there is no profile {beat.profile_id!r}, so no recipient would be told of a silence; make "
                f"it with 'duly profile set {beat.profile_id} --send URL', or one named 'default'"
            )
        if beat.held:
            report = HeldBackReport(beat.run, beat.held)
            report.check()
            await self.held_back.report(who.name, report)
        await self.heartbeats.beat(who.name, beat)
        if frame.seq_id is None:
            return False
        session.push(ServerAck(frame.seq_id, ServerCode.ACCEPTED))
        return True

    # ── effects ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        match effect:
            case MachineEffect(what=StartAttempt() as attempt):
                self._spawn(self._attempts.make(attempt, self._sender))
            case MachineEffect(what=MessageUnsettled(key)):
                self._spawn(self._settlement.settle(key))
            case MachineEffect(what=Amendment() as amend):
                self._spawn(self._changed(key_of(amend.message.scope, amend.message.recipient)))
            case MachineEffect(what=DeliveryRef() as ref):
                self._spawn(self._changed(ref.key))
            case _:
                pass

    def _report_outcome(self, outcome: ReportOutcome) -> None:
        key, state, answer = outcome.key, outcome.state, outcome.answer
        sessions = [one for one in cast("tuple[Session | None, ...]", outcome.origins) if one is not None]
        self._settled(key, state, answer, told=any(session.listening for session in sessions))
        frame = outgoing.ack(names_in(key)[1], "tower", state, answer)
        for session in sessions:
            session.push(frame)

    def _settled(self, key: bytes, state: State, answer: Answer, *, told: bool = False) -> None:
        """Record how an alert has ended, and whether its sentinel was told; for a critical one that reached
        no recipient, notify others."""
        if key in self.planner.sent_again:
            self.planner.sent_again.discard(key)
            self._trail.note(key, state.word, detail=answer.reason, told=told)
        else:
            self._trail.ended(key, state, answer.reason, told=told)
        self._replies.see_end(key, state, answer)
        if state in DEAD:
            self.backlog.touch(key)
            self._spawn(self._unnotified.notify(key))

    def _missed(self, attempt: StartAttempt) -> None:
        """Note that an attempt did not surely arrive."""
        for item in attempt.items:
            self.backlog.touch(item.message.key)
            if attempt.urgent:
                self._spawn(self._unnotified.tried(item.message.key, item.attempt))

    def _spawn(self, work: Coroutine[object, None, None]) -> None:
        self.tasks.do("background work of alerts", work)

    async def adopt(self, living: Collection[str]) -> None:
        """Take over the deliveries of other hubs on the same ledger. A delivery that a live hub has claimed
        stays with it until the lease ends; the leases of a dead hub are void."""
        await self._unnotified.catch_up()
        if self._ledger.sole:
            return
        still: dict[bytes, list[OpenDelivery]] = {}
        for one in await self._ledger.open_deliveries(CHANNEL):
            held = one.delivery
            if held.state is State.SENT and held.worker not in (self._ledger.worker, *living):
                held = structs.replace(held, due=0)
            still.setdefault(one.message.key, []).append(structs.replace(one, delivery=held))
        for key, found in still.items():
            await self._take_up(key, found)
        await self._settlement.catch_up(still.keys())

    async def _changed(self, key: bytes) -> None:
        """Read an alert again after a change in the ledger; an empty key stands for profiles and silences."""
        if not key:
            await self.configuration.refresh()
            return
        self.backlog.touch(key)
        with contextlib.suppress(DulyError):
            alert = await self.operations.get(key)
            if alert is None:
                self.planner.statuses.pop(key, None)
                return
            if alert.status is not NOTHING_SAID:
                self.planner.statuses[key] = alert.status
            if self.planner.is_corrected(key):
                # A recipient may have been notified during the cancellation.
                missing = self.operations.corrections(alert, self._ledger.clock.now())
                if missing:
                    await self._ledger.write(*missing)
                    alert = await self.operations.get(key) or alert
            record = alert.record
            still = [
                OpenDelivery(record.message, record.state, one, record.accepted_at)
                for one in alert.deliveries
                if not one.state.terminal
            ]
            await self._take_up(key, still)

    async def _take_up(self, key: bytes, still: list[OpenDelivery]) -> None:
        """Hand the open deliveries of an alert to the fanout once their addresses are known: what a broken
        attempt means depends on the channel."""
        if any(one.state.terminal for one in still):
            self.planner.sent_again.add(key)
        self._trail.resume(still)
        for one in still:
            await self.profiles.find_address(one.delivery.ref.recipient)
        await self.engine.put(MachineEvent(DeliveriesChanged(key, tuple(still))))
