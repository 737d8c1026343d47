"""The tower, the service for alerts: sentinels report them, people are notified, and everyone concerned can
see how that went.

`server_ack` is sent after the alert and its deliveries are committed, in one transaction. The same id is
one alert, however often and over however many connections it comes; a repeat gets code 5 and the state.
The reporter of an alert is the authenticated account: a sentinel cannot change the alerts of another one.
An alert whose profile is missing is refused, since no recipient would be notified: its sentinel keeps it
and says so. A critical alert is never silent: quiet hours do not hold for it, nor does a silence that does
not name it; if no recipient could be notified, those of the profile `default` are, and that is recorded.

`Fanout` and `Engine` do everything durable. This module says what a frame means and what follows from it;
`planner` says who is notified, `configuration` keeps profiles and silences, `sender` sends notifications.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Final, cast

from msgspec import structs

from duly.apps.alerts.ack_links import AckLinks, open_ack_links
from duly.apps.alerts.configuration import AlertConfiguration
from duly.apps.alerts.heartbeats import Heartbeats, read_beat
from duly.apps.alerts.held_back_counts import HeldBackCounts, HeldBackReport
from duly.apps.alerts.limited_alerts import LimitedAlerts
from duly.apps.alerts.model import (
    NAMED,
    NOTHING_SAID,
    AlertChange,
    AlertState,
    current,
    ended_by_reporter,
    name_in_bucket,
    read_change,
    read_event,
    read_status,
    set_age,
    time_of_arrival,
    updated,
)
from duly.apps.alerts.operations import CHANNEL, DEAD, STATUSES, AlertOperations, show
from duly.apps.alerts.planner import AlertPlanner
from duly.apps.alerts.profiles import Profiles
from duly.apps.alerts.replies import AlertReplies
from duly.apps.alerts.sender import NotificationSender, SendResult
from duly.apps.alerts.settlement import AlertSettlement, settled, unsettled
from duly.apps.alerts.unnotified import UnnotifiedAlerts, note
from duly.core.account_limits import AccountLimits
from duly.core.fanout.attempts import FanoutQueries
from duly.core.fanout.machine import Fanout
from duly.core.fanout.plan import (
    Amendment,
    AttemptEnded,
    AttemptResult,
    DeliveriesChanged,
    FanoutCounts,
    FanoutPolicy,
    ItemSeen,
    MessageUnsettled,
    StartAttempt,
)
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, key_of, names_in
from duly.core.monitor.event_times import is_believable
from duly.core.monitor.signals import CANCEL, EVENT, HEARTBEAT, UPDATE, Severity
from duly.core.operations import Deliver, DeliveryRef, OpenDelivery
from duly.core.steps import Arrived, Effect, MachineEffect, MachineEvent, Reply, ReportOutcome
from duly.core.units import MS
from duly.errors import (
    DulyError,
    LedgerUnavailable,
    Malformed,
    NoProfile,
    NotAllowed,
    Overloaded,
    RateLimited,
)
from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.runtime.engine import Engine
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

    def __init__(
        self,
        ledger: Ledger,
        activity: ActivityLog,
        policy: FanoutPolicy | None = None,
        *,
        private: bool = False,
        data: Path | None = None,
        box: SecretBox | None = None,
        known: Callable[[str], Awaitable[bool]] = _every_name,
        trail: Trail | None = None,
        limits: AccountLimits | None = None,
    ) -> None:
        self._ledger = ledger
        self._activity = activity
        self._trail = Trail(ledger) if trail is None else trail
        self._replies = AlertReplies(self._trail, activity, ledger)
        self.profiles = Profiles(ledger, private=private, box=box)
        self.operations = AlertOperations(ledger, self.profiles, self._changed)
        self.planner = AlertPlanner(self.profiles)
        self.configuration = AlertConfiguration(ledger, self.profiles, self.operations, self.planner)
        self._unnotified = UnnotifiedAlerts(ledger, self.operations, activity)
        self._settlement = AlertSettlement(ledger, self.operations, self._settled)
        self._fanout = Fanout(
            policy or FanoutPolicy(CHANNEL),
            ledger.worker,
            FanoutQueries(
                plan=self.planner.plan,
                traits=self.planner.traits,
                route=self.profiles.recipient_policy,
                doubt=self.profiles.doubt,
                tries=self.profiles.tries,
                wanted=self.planner.is_wanted,
                cancelled=self.planner.is_corrected,
                notes=self.planner.notes,
                unsettled=unsettled,
                settled=settled,
            ),
            sole=ledger.sole,
        )
        actions: dict[type, Callable[..., None]] = {
            Reply: self._replies.reply,
            ReportOutcome: self._report_outcome,
        }
        # `receive` recalls alerts itself, before it counts them against their sender's limit.
        self.engine = Engine(self._fanout, ledger, self._perform, performers=actions, recalls=False)
        self.heartbeats = Heartbeats(ledger, self.profiles, self._report, self._take_back, known)
        self.held_back = HeldBackCounts(ledger)
        self._limited = LimitedAlerts(
            (limits or AccountLimits()).alerts, ledger.worker, self._store, LimitedRepeats(ledger)
        )
        self._sessions: dict[str, set[Session]] = {}
        self._box = box
        self.links: AckLinks | None = None
        """the links by which recipients acknowledge; None without a key to sign them with"""
        self._sender = NotificationSender(
            ledger, self.profiles, self.planner.statuses, self._is_attempt_wanted, private=private, data=data
        )
        self.tasks = Supervisor()
        self.outages = Outages()

    async def start(self) -> None:
        """Read profiles, silences and open deliveries from the ledger, and begin to work."""
        await self.configuration.refresh()
        self.profiles.warn_of_outside_files()
        self.links = self._sender.links = await open_ack_links(self._ledger, self._box)
        for name, body in (await self._ledger.bucket(STATUSES)).items():
            scope, _, id_ = name.partition("/")
            self.planner.statuses[key_of(scope, id_)] = read_status(body)
        await self.engine.start()
        await self.heartbeats.check()  # what is heard from now on is told apart from what was heard before
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
        """The counts of this tower since its start, and the number of open deliveries."""
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
        """One alert as the API shows it; None if the ledger has none of this key. `falls_back` says that the
        recipients of the default profile are about to be notified."""
        alert = await self.operations.get(key)
        if alert is None or alert.record.state not in DEAD:
            return None if alert is None else show(alert)
        if await self._unnotified.is_noted(key):
            return show(alert) | {"falls_back": True}
        # What the note asked for may have been planned after the alert was read.
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
        """What was counted since the start."""
        return self._fanout.counts

    @property
    def pending(self) -> int:
        """The number of alerts with open deliveries here."""
        return self._fanout.live

    def is_under_way(self, key: bytes) -> bool:
        """Whether an alert has open deliveries here."""
        return self._fanout.is_live(key)

    @property
    def online(self) -> set[str]:
        """The sentinels that are connected to this hub."""
        return set(self._sessions)

    def dismiss(self, name: str) -> None:
        """Close the connections of an account whose token is void."""
        for session in list(self._sessions.get(name, ())):
            session.close("your token is no longer valid")

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def receive(self, session: Session, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        """Handle a frame; returns whether it is or will be answered: an alert at once, if its profile is
        known and the engine has room for it."""
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
            return self._change(session, who, frame)
        now = self._ledger.clock.now()
        message = self._message(who, frame, now)
        if not self._repeated(message, session, now):
            event = Arrived(message, session)
            refusal = self._limited.excess(who.name, len(message.body), now)
            if refusal is not None:
                return self._take_excess(event, refusal)
            if not self.configuration.is_sure_of_profile(message.recipient):
                return self._take_later(event)
            try:
                self.engine.offer(event)
            except Overloaded:
                return self._take_later(event)
        self._beat_with(message)
        return True

    async def _take_excess(self, event: Arrived, refusal: RateLimited) -> bool:
        """Take an alert beyond the limit if it is a repeat, or critical; before a critical one is refused,
        people are told."""
        message = event.message
        if not await self._limited.is_refused(message.scope, message.id, refusal):
            return await self._take_later(event)
        if read_event(message.body).severity is not Severity.CRITICAL:
            raise refusal
        await self.configuration.check_profile(message)
        now = self._ledger.clock.now()
        try:
            self._limited.take_reserve(message.scope, len(message.body), now, refusal)
        except RateLimited:
            await self._limited.tell(message.scope, message.recipient, str(refusal), now)
            raise
        return await self._take_later(event)

    async def _take_later(self, event: Arrived) -> bool:
        """Take an alert in when the ledger has been asked for its profile, and there is room for it."""
        await self.configuration.check_profile(event.message)
        await self.engine.put(event)
        self._beat_with(event.message)
        return True

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
        if beat.every is not None:
            await self.heartbeats.beat(who.name, beat)
        if frame.seq_id is None:
            return False
        session.push(ServerAck(frame.seq_id, ServerCode.ACCEPTED))
        return True

    def _repeated(self, message: Message, session: Session, now: int) -> bool:
        """Answer a repeat of an alert that has ended, if memory knows it: it need not pass the engine."""
        known = self._ledger.recall(message, now)
        if known is None or known.state is None or not known.state.terminal:
            return False
        self._fanout.counts.duplicates += 1
        self._replies.reply(Reply(session, message, known))
        return True

    def _message(self, who: Principal, frame: Frame, now: int) -> Message:
        body = bytes(frame.data)
        event = read_event(body)
        if event.sentinel_id not in (None, who.name):
            raise NotAllowed(f"{who.name} may not report for another sentinel")
        offset = event.offset_ms or 0
        at = ((event.timestamp or frame.time or 0) + offset) * MS
        expires = (frame.exp and max(1, frame.exp + offset) * MS) or 0
        if event.offset_ms is not None:
            self._trail.skewed(offset / 1000)
        if event.undated or not is_believable(at, now):
            at, expires = time_of_arrival(now), 0
        message = Message(who.name, str(frame.seq_id), EVENT, event.profile_id, body, at, expires)
        self.planner.expect(set_age(message, at), event)
        return message

    async def _change(self, session: Session, who: Principal, frame: Frame) -> bool:
        """Store an update or a cancellation; one at a time, since each depends on the status before it."""
        body = bytes(frame.data)
        change = read_change(body)
        if not self._ledger.sole:
            await self.configuration.catch_up()
        await self._take_change(who, change, frame.seq_id, len(body))
        async with self.operations.changing:
            now = self._ledger.clock.now()
            alert = await self.operations.get(key_of(who.name, change.event))
            if alert is None:
                # The alert may still be under way; a sentinel that sends in order succeeds soon.
                raise LedgerUnavailable(f"{who.name} has not reported {change.event!r} (yet); try again")
            message = Message(who.name, str(frame.seq_id), frame.type, change.event, body, now)
            if not now - self._fanout.policy.horizon.keep < message.made <= now:
                set_age(message, now)  # it knows no offset; as long as its alert is here, its id is, too
            status = updated(alert.status, change, now)
            if frame.type == CANCEL and not status.standing.over:
                status = ended_by_reporter(status, change, who.name, now)
            reported = alert.record.message
            silence = self.planner.silence_over(reported, current(read_event(reported.body), status), now)
            writes = self.operations.writes(alert, status, now, silenced=silence is not None)
            notified = any(isinstance(one, Deliver) for one in writes)
            missed = not notified and silence is None and self.operations.is_unnotified(alert, status)
            writes = (*writes, note(alert.key)) if missed else writes
            seen = ItemSeen(STATUSES, name_in_bucket(alert.key), alert.said)
            await self._commit(Amendment(message, session, writes, seen))
        if missed:
            await self._unnotified.notify(alert.key)
        return True

    async def _take_change(self, who: Principal, change: AlertChange, id_: str | None, size: int) -> None:
        """Count a change of an alert. Before one that makes an alert critical is refused, people are told."""
        now = self._ledger.clock.now()
        refusal = self._limited.excess(who.name, size, now)
        if refusal is not None and await self._limited.is_refused(who.name, id_, refusal):
            try:
                self._limited.take_reserve(who.name, size, now, refusal)
            except RateLimited:
                alert = await self.operations.get(key_of(who.name, change.event))
                if alert is not None and change.severity is Severity.CRITICAL:
                    await self._limited.tell(who.name, alert.record.message.recipient, str(refusal), now)
                raise

    # ── effects ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        match effect:
            case MachineEffect(what=StartAttempt() as attempt):
                self._spawn(self._attempt(attempt))
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
        """Record how an alert has ended, and whether its sentinel was told; a critical one that reached no
        recipient is told to others."""
        self._trail.ended(key, state, answer.reason, told=told)
        self._replies.see_end(key, state, answer)
        if state in DEAD:
            self._spawn(self._unnotified.notify(key))

    def _spawn(self, work: Coroutine[object, None, None]) -> None:
        self.tasks.do("background work of alerts", work)

    async def adopt(self, living: Collection[str]) -> None:
        """Take over the deliveries of other hubs on the same ledger. A delivery that a living hub has
        claimed stays its own until the lease ends; the lease of a dead hub is over."""
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
                OpenDelivery(record.message, record.state, one)
                for one in alert.deliveries
                if not one.state.terminal
            ]
            await self._take_up(key, still)

    async def _take_up(self, key: bytes, still: list[OpenDelivery]) -> None:
        """Hand the open deliveries of an alert to the fanout, when the addresses they go to are known: what a
        broken attempt means depends on the channel."""
        for one in still:
            await self.profiles.find_address(one.delivery.ref.recipient)
        await self.engine.put(MachineEvent(DeliveriesChanged(key, tuple(still))))

    async def _report(self, message: Message) -> None:
        """Store an alert that the tower itself reports, and have it delivered."""
        await self.engine.put(Arrived(self._made_now(message), None))

    def _made_now(self, message: Message) -> Message:
        """An alert of the tower's own, as old as its report: the clock that dated it may be another hub's."""
        return set_age(message, self._ledger.clock.now())

    async def _take_back(self, key: bytes, note: str) -> None:
        """Cancel an alert that the tower itself has reported; its recipients are notified of that."""
        alert = await self.operations.get(key)
        if alert is not None and not alert.status.standing.over:
            await self.operations.say(alert, AlertState.CANCELLED, "tower", note)

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, attempt: StartAttempt) -> None:
        """Make one attempt and store how it went."""
        sent = await self._sender.send(attempt)
        why = f"{attempt.recipient}: {sent.reason}" if sent.reason else attempt.recipient
        for item in attempt.items:
            self._trail.note(item.message.key, sent.result.value, item.attempt, why)
        self._note_channel(attempt.recipient, sent)
        if self._activity.watchers:
            for item in attempt.items:
                self._activity.see(
                    "told",
                    scope=item.message.scope,
                    id=item.message.id,
                    to=attempt.recipient,
                    fate=sent.result.value,
                )
        with contextlib.suppress(DulyError):  # the hub stops: the ledger says that the attempt was under way
            await self._commit(AttemptEnded(attempt, sent.result, sent.reason, sent.rest))
            # A cancellation at another hub meanwhile did not see that this recipient was notified.
            for key in await self._catch_up_on(attempt):
                await self._changed(key)

    def _note_channel(self, recipient: str, sent: SendResult) -> None:
        """Note whether a channel works: one line when that changes."""
        if sent.result is AttemptResult.CALLED_OFF:
            return
        works = sent.result is AttemptResult.ARRIVED
        self.outages.see({f"the channel to {recipient}": None if works else sent.reason or "no answer"})

    async def _is_attempt_wanted(self, attempt: StartAttempt) -> bool:
        with contextlib.suppress(DulyError):  # without the ledger, memory decides
            await self._catch_up_on(attempt)
        return any(self.planner.is_wanted(item.ref) for item in attempt.items)

    async def _catch_up_on(self, attempt: StartAttempt) -> list[bytes]:
        """Read what other hubs have changed about these alerts; returns those that were cancelled."""
        if self._ledger.sole:
            return []
        names = {name_in_bucket(item.message.key): item.message.key for item in attempt.items}
        if len(names) > NAMED:
            stored = await self._ledger.bucket(STATUSES)
        else:
            found = {name: await self._ledger.item(STATUSES, name) for name in names}
            stored = {name: body for name, body in found.items() if body is not None}
        for name in names.keys() & stored.keys():
            self.planner.statuses[names[name]] = read_status(stored[name])
        return [key for key in names.values() if self.planner.is_corrected(key)]

    async def _store(self, message: Message) -> None:
        """Store an alert that the tower itself reports; returns when it is stored with its deliveries."""
        await self._put(Arrived(self._made_now(message), None))

    async def _commit(self, what: Amendment | AttemptEnded) -> None:
        """Hand an event to the fanout; returns when what follows from it is stored."""
        await self._put(MachineEvent(what))

    async def _put(self, event: Arrived | MachineEvent) -> None:
        stored = asyncio.Event()
        await self.engine.put(event, stored.set)
        await stored.wait()
