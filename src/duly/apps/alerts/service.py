"""Alerts (seed 003): the tower. Sentinels report, people are told, and everybody can see how it went.

The laws. `server_ack` goes out after the alert and its deliveries are committed, in one transaction. The same
id is one alert, however often and from how many connections it comes; a repeat gets code 5 and the state. Who
reports is who has authenticated: nobody changes another sentinel's alerts. An alert that nobody would be told
of, since its profile is missing, is refused: its sentinel keeps it and says so. What is critical is never
silent: no quiet hours, and no silence that does not name it; if nobody could be told, the people of the
profile `default` are, and it is recorded.

Everything durable rides on the kernel: `Fanout` and `Engine`. Here is what a frame means, what people are
told, and the channels that tell it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

from msgspec import structs

from duly.apps.alerts.channels import open_channel
from duly.apps.alerts.channels.channel import Channel
from duly.apps.alerts.heartbeats import Heartbeats, read_beat
from duly.apps.alerts.model import (
    NAMED,
    NOTHING_SAID,
    AlertEvent,
    AlertState,
    AlertStatus,
    current,
    name_in_bucket,
    read_change,
    read_event,
    read_status,
    traits_of,
    updated,
)
from duly.apps.alerts.notifications import NotificationContext, notification
from duly.apps.alerts.operations import CHANNEL, DEAD, STATUSES, AlertOperations, Silence, calls_off
from duly.apps.alerts.profiles import CONFIGURED, VERSION, ChannelAddress, Profiles
from duly.apps.alerts.untold import Untold, note, notes
from duly.core.fanout.attempts import FanoutQueries
from duly.core.fanout.machine import Fanout
from duly.core.fanout.plan import (
    NOT_WANTED,
    Amendment,
    AttemptEnded,
    AttemptResult,
    DeliveriesChanged,
    DeliveryPlan,
    FanoutPolicy,
    GroupingTraits,
    StartAttempt,
)
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, Word, key_of, names_in
from duly.core.monitor.signals import CANCEL, EVENT, HEARTBEAT, UPDATE, Severity
from duly.core.operations import Deliver, DeliveryRef, Group, OpenDelivery
from duly.core.quota import Quota, Rate
from duly.core.steps import Arrived, Effect, MachineEffect, MachineEvent, Reply, ReportOutcome
from duly.core.units import MS
from duly.errors import (
    Declined,
    DulyError,
    InDoubt,
    LedgerUnavailable,
    Malformed,
    NoProfile,
    NotAllowed,
    NotSent,
)
from duly.identity.accounts import Principal, Role
from duly.runtime.audit import AuditLog
from duly.runtime.engine import Engine
from duly.runtime.tasks import Supervisor
from duly.storage.item_loader import ItemLoader
from duly.storage.ledger import Ledger
from duly.storage.secret_box import SecretBox
from duly.wire import outgoing
from duly.wire.frames import Frame, ServerCode
from duly.wire.outgoing import OutgoingFrame, ServerAck, WelcomeFrame
from duly.wire.session import Session

CARRY_SECONDS: Final = 50.0
"""The longest attempt, whatever a channel says; shorter than the fanout's lease."""
STOP_SECONDS: Final = 3.0
"""How long those on their way are waited for when the hub stops."""
READ_KEPT: Final = 1_000
LOOKS: Final = Rate(50)
"""How often each sentinel may make us look in the ledger for a profile that is not known here."""
EARLIEST: Final = 10**11
"""Milliseconds since 1970 that are not seconds by mistake."""


_LISTED: Final = DeliveryPlan()
"""A profile that is meant to tell nobody."""


async def _anybody(_: str) -> bool:
    return True


class AlertService:
    """One tower on one ledger."""

    name: Final = "alerts"

    roles = frozenset({Role.SENTINEL})
    types = frozenset({EVENT, UPDATE, CANCEL, HEARTBEAT})
    prompt = frozenset({EVENT})

    def __init__(
        self,
        ledger: Ledger,
        journal: AuditLog,
        policy: FanoutPolicy | None = None,
        *,
        private: bool = False,
        box: SecretBox | None = None,
        known: Callable[[str], Awaitable[bool]] = _anybody,
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._private = private
        self.profiles = Profiles(ledger, private=private, box=box)
        self.operations = AlertOperations(ledger, self.profiles, self._changed)
        self._untold = Untold(ledger, self.operations, journal)
        self._fanout = Fanout(
            policy or FanoutPolicy(CHANNEL),
            ledger.worker,
            FanoutQueries(
                plan=self._plan,
                traits=self._traits,
                route=self.profiles.route,
                doubt=self.profiles.doubt,
                tries=self.profiles.tries,
                wanted=self._is_wanted,
                cancelled=self._is_cancelled,
                notes=self._notes,
            ),
            sole=ledger.sole,
        )
        self.engine = Engine(self._fanout, ledger, self._perform)
        self.heartbeats = Heartbeats(ledger, self.profiles, self._report, self._take_back, known)
        self._looks = Quota(LOOKS)
        self._version: bytes | None = None
        """of the profiles and silences that are known here"""
        self._items = ItemLoader(ledger)
        self._refreshing = asyncio.Lock()
        self._received: dict[bytes, int] = {}
        """when alerts were received, by the ledger: every attempt, at every hub, says the same"""
        self._sessions: dict[str, set[Session]] = {}
        self._statuses: dict[bytes, AlertStatus] = {}
        """of the alerts that something has been said about"""
        self._read: dict[bytes, tuple[Message, AlertEvent]] = {}
        """alerts that were just read, and will be planned next"""
        self._silences: list[Silence] = []
        self._channels: dict[str, tuple[ChannelAddress, Channel]] = {}
        self.tasks = Supervisor()

    async def start(self) -> None:
        await self.refresh()
        for name, body in (await self._ledger.bucket(STATUSES)).items():
            scope, _, id_ = name.partition("/")
            self._statuses[key_of(scope, id_)] = read_status(body)
        await self.engine.start()
        self._spawn(self._catch_up())

    async def _catch_up(self) -> None:
        """A crash may have come between a cancellation and its corrections, or between the end of a critical
        alert that nobody was told of and those who are told instead."""
        for key in [key for key in self._statuses if self._is_cancelled(key)]:
            await self._changed(key)
        await self._untold.catch_up()

    async def stop(self) -> None:
        await self.tasks.finish(STOP_SECONDS)
        await self.engine.stop()
        await self.tasks.stop()
        for _, channel in self._channels.values():
            await channel.close()

    def state(self) -> dict[str, Any]:
        """The figures of the seed, since the start; and how much is open."""
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
            "messages": counts.parcels,
            "arrived": counts.arrived,
            "failed": counts.failed,
            "in_doubt": counts.in_doubt,
            "critical_untold": self._untold.count,
        }

    # ── who is here ──────────────────────────────────────────────────────────────────────────────

    async def connected(self, session: Session, who: Principal, cursors: dict[str, int] | None) -> None:
        self._sessions.setdefault(who.name, set()).add(session)
        self._spawn(self.heartbeats.seen(who.name))
        session.push(WelcomeFrame(who.name, self._ledger.clock.now() // MS))

    async def disconnected(self, session: Session, who: Principal) -> None:
        sessions = self._sessions.get(who.name, set())
        sessions.discard(session)
        if not sessions:
            self._sessions.pop(who.name, None)
            self._spawn(self.heartbeats.seen(who.name))

    @property
    def online(self) -> set[str]:
        """The sentinels that are connected here."""
        return set(self._sessions)

    def dismiss(self, name: str) -> None:
        for session in list(self._sessions.get(name, ())):
            session.close("your token is no longer valid")

    # ── what they say ────────────────────────────────────────────────────────────────────────────

    async def receive(self, session: Session, who: Principal, frame: Frame) -> bool:
        if who.role not in (Role.SENTINEL, Role.ADMIN):
            raise NotAllowed(f"{who.name} ({who.role.value}) may not report alerts; 'duly add sentinel'")
        if who.role is Role.SENTINEL and who.name not in self._sessions and self.heartbeats.unseen(who.name):
            self._spawn(self.heartbeats.seen(who.name))
        if frame.type == HEARTBEAT:
            return await self._beat(session, who, frame)
        if frame.seq_id is None:
            raise Malformed(f"an {frame.type} needs a seq_id, minted once and the same in every resend")
        if frame.type == EVENT:
            message = self._message(who, frame)
            if not self._repeated(message, session):
                await self._check_profile(message)
                await self.engine.put(Arrived(message, session))
            if self.heartbeats.owed(who.name, message.recipient):
                self._spawn(self.heartbeats.note(who.name, message.recipient))
        else:
            await self._change(session, who, frame)
        return True

    async def _beat(self, session: Session, who: Principal, frame: Frame) -> bool:
        """A sign of life: answered, if it has an id, when it is stored."""
        beat = read_beat(bytes(frame.data))
        if beat.every and not await self._is_told(beat.profile_id, who.name):
            raise NoProfile(
                f"there is no profile {beat.profile_id!r}, so nobody would be told of a silence; make it "
                f"with 'duly profile set {beat.profile_id} --send URL', or one named 'default'"
            )
        await self.heartbeats.beat(who.name, beat)
        if frame.seq_id is None:
            return False
        session.push(ServerAck(frame.seq_id, ServerCode.ACCEPTED))
        return True

    async def _check_profile(self, message: Message) -> None:
        """Refuse what nobody would be told of; a repeat of what is known is none of that."""
        if await self._is_told(message.recipient, message.scope):
            return
        if await self._ledger.find(message.key) is not None:
            return
        raise NoProfile(
            f"there is no profile {message.recipient!r}, so nobody would be told; make it with "
            f"'duly profile set {message.recipient} --send URL', or one named 'default'"
        )

    async def _is_told(self, profile: str, sentinel: str) -> bool:
        """Whether there is somebody to be told by this profile; before it says no, it looks in the ledger."""
        if not self._ledger.sole:
            await self._catch_up_on_changes()
        if self.profiles.get(profile) is not None:
            return True
        if self._looks.take(sentinel, self._ledger.clock.now()):
            raise LedgerUnavailable(f"{sentinel} names too many profiles that are not known; try again")
        return await self.profiles.knows(profile)

    async def _catch_up_on_changes(self) -> None:
        """Learn what other hubs have changed about profiles and silences, if anything. Alerts that come
        together ask together; each asks after it has come, so that no change is overlooked."""
        (version,) = await self._items.get((CONFIGURED, VERSION))
        if version != self._version:
            await self.refresh(unless=version)

    def _repeated(self, message: Message, session: Session) -> bool:
        """Answer what has ended, as far as memory can tell: it need not wait its turn in the engine."""
        known = self._ledger.recall(message, self._ledger.clock.now())
        if known is None or known.state is None or not known.state.terminal:
            return False
        self._fanout.counts.duplicates += 1
        self._reply(session, message, known)
        return True

    def _message(self, who: Principal, frame: Frame) -> Message:
        body = bytes(frame.data)
        event = read_event(body)
        if event.sentinel_id not in (None, who.name):
            raise NotAllowed(f"{who.name} may not report for another sentinel")
        made = (event.timestamp or frame.time or 0) + (event.offset_ms or 0)
        if made < EARLIEST:
            raise Malformed("an alert needs its timestamp, in milliseconds since 1970: set the clock")
        expires = 0 if frame.exp is None else frame.exp * MS
        message = Message(who.name, str(frame.seq_id), EVENT, event.profile_id, body, made * MS, expires)
        if len(self._read) >= READ_KEPT:
            self._read.clear()  # repeats are never planned
        self._read[message.key] = (message, event)
        return message

    async def _change(self, session: Session, who: Principal, frame: Frame) -> None:
        """An update or a cancellation: one at a time, so that none overlooks another."""
        body = bytes(frame.data)
        change = read_change(body)
        if not self._ledger.sole:
            await self._catch_up_on_changes()
        async with self.operations.changing:
            now = self._ledger.clock.now()
            alert = await self.operations.get(key_of(who.name, change.event))
            if alert is None:
                # Its alert may be on its way yet; who sends in order need not wait long.
                raise LedgerUnavailable(f"{who.name} has not reported {change.event!r} (yet); try again")
            message = Message(
                who.name, str(frame.seq_id), frame.type, change.event, body, (frame.time or 0) * MS or now
            )
            status = updated(alert.status, change, now)
            if frame.type == CANCEL:
                status = structs.replace(
                    status, standing=AlertState.CANCELLED, by=who.name, at=now, note=change.reason
                )
            reported = alert.record.message
            silence = self._silence_over(reported, current(read_event(reported.body), status), now)
            writes = self.operations.writes(alert, status, now, silenced=silence is not None)
            told = any(isinstance(one, Deliver) for one in writes)
            untold = not told and silence is None and self.operations.is_untold(alert, status)
            await self._commit(Amendment(message, session, (*writes, note(alert.key)) if untold else writes))
        if untold:
            await self._untold.tell(alert.key)

    def _plan(self, message: Message, now: int) -> DeliveryPlan:
        known = self._read.pop(message.key, None)
        event = known[1] if known is not None and known[0] is message else read_event(message.body)
        silence = self._silence_over(message, event, now)
        if silence is not None:
            by = f" by {silence.by}" if silence.by else ""
            return DeliveryPlan(end=(State.DONE, Answer(0, b"", f"silenced{by}; nobody was told")))
        profile = self.profiles.get(event.profile_id)
        if profile is None:
            reason = f"there is no profile {event.profile_id!r}, so nobody was told; see 'duly profile set'"
            return DeliveryPlan(end=(State.FAILED, Answer(2, b"", reason)))
        traits = traits_of(message, event)
        if not profile.steps and traits.urgent:
            reason = f"profile {event.profile_id!r} names nobody, so nobody was told; see 'duly profile set'"
            return DeliveryPlan(end=(State.FAILED, Answer(2, b"", reason)))
        if not profile.steps:
            return _LISTED
        return DeliveryPlan(profile.plan(now, urgent=traits.urgent), traits=traits)

    def _silence_over(self, message: Message, event: AlertEvent, now: int) -> Silence | None:
        return next((one for one in self._silences if one.covers(message, event, now)), None)

    def _traits(self, message: Message) -> GroupingTraits:
        """An alert that has become critical is urgent from then on."""
        traits, status = traits_of(message), self._statuses.get(message.key)
        raised = status is not None and status.severity is Severity.CRITICAL
        return structs.replace(traits, urgent=True) if raised else traits

    def _notes(self, message: Message, state: State) -> Group:
        return notes(message.key, state, urgent=self._traits(message).urgent)

    def _is_wanted(self, ref: DeliveryRef) -> bool:
        status = self._statuses.get(ref.key)
        return status is None or not calls_off(status.standing, ref.kind)

    def _is_cancelled(self, key: bytes) -> bool:
        status = self._statuses.get(key)
        return status is not None and status.standing is AlertState.CANCELLED

    # ── what follows ─────────────────────────────────────────────────────────────────────────────

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(origin, message, verdict):
                self._reply(origin, message, verdict)
            case ReportOutcome(key, state, answer, origins):
                scope, id_ = names_in(key)
                if self._journal.watchers:
                    self._journal.see("ended", scope=scope, id=id_, state=state.word, code=answer.code)
                if state in DEAD:
                    self._spawn(self._untold.tell(key))
                frame = outgoing.ack(id_, "tower", state, answer)
                for origin in origins:
                    _push(origin, frame)
            case MachineEffect(what=StartAttempt() as parcel):
                self._spawn(self._carry(parcel))
            case MachineEffect(what=Amendment() as amend):
                self._spawn(self._changed(key_of(amend.message.scope, amend.message.recipient)))
            case MachineEffect(what=DeliveryRef() as ref):
                self._spawn(self._changed(ref.key))
            case _:
                pass

    def _reply(self, origin: Any, message: Message, verdict: Verdict) -> None:
        if self._journal.watchers:
            self._journal.see(
                "said", scope=message.scope, id=message.id, word=verdict.named, kind=message.kind
            )
        if origin is None:
            return
        origin.push(outgoing.server_ack(message.id, verdict))
        if verdict.word is Word.DUPLICATE and verdict.state is not None and verdict.state.terminal:
            ended = outgoing.ack(message.id, "tower", verdict.state, verdict.answer or Answer())
            origin.push(ended)

    def _spawn(self, work: Any) -> None:
        self.tasks.do("a job of alerts", work)

    async def refresh(self, unless: bytes | None = None) -> None:
        """Read again who is told, and what is silenced; `unless` this version was read meanwhile."""
        async with self._refreshing:
            if unless is not None and unless == self._version:
                return
            version = None if self._ledger.sole else await self._ledger.item(CONFIGURED, VERSION)
            await self.profiles.refresh()
            self._silences = list((await self.operations.silences()).values())
            self._version = version  # it was read first: what is known now is this one, or newer

    async def adopt(self, living: Collection[str]) -> None:
        """Take up what other hubs on the same ledger have left. What a living one has claimed is its own
        until its lease ends; a dead one's lease is over."""
        await self._untold.catch_up()
        if self._ledger.sole:
            return
        still: dict[bytes, list[OpenDelivery]] = {}
        for one in await self._ledger.open_deliveries(CHANNEL):
            held = one.delivery
            if held.state is State.SENT and held.worker not in (self._ledger.worker, *living):
                held = structs.replace(held, due=0)
            still.setdefault(one.message.key, []).append(structs.replace(one, delivery=held))
        for key, found in still.items():
            await self.engine.put(MachineEvent(DeliveriesChanged(key, tuple(found))))

    async def _changed(self, key: bytes) -> None:
        """Somebody has changed something in the ledger: look again. No key: what is configured."""
        if not key:
            await self.refresh()
            return
        with contextlib.suppress(DulyError):
            alert = await self.operations.get(key)
            if alert is None:
                self._statuses.pop(key, None)
                return
            if alert.status is not NOTHING_SAID:
                self._statuses[key] = alert.status
            if self._is_cancelled(key):
                # Somebody may have been told just while it was being cancelled.
                missing = self.operations.corrections(alert, self._ledger.clock.now())
                if missing:
                    await self._ledger.write(*missing)
                    alert = await self.operations.get(key) or alert
            record = alert.record
            still = tuple(
                OpenDelivery(record.message, record.state, one)
                for one in alert.deliveries
                if not one.state.terminal
            )
            await self.engine.put(MachineEvent(DeliveriesChanged(key, still)))

    async def _report(self, message: Message) -> None:
        """Store an alert of the tower's own, and have it told."""
        await self.engine.put(Arrived(message, None))

    async def _take_back(self, key: bytes, note: str) -> None:
        """An alert of the tower's own is over: who was told of it is told that."""
        alert = await self.operations.get(key)
        if alert is not None and not alert.status.standing.over:
            await self.operations.say(alert, AlertState.CANCELLED, "tower", note)

    # ── telling people ───────────────────────────────────────────────────────────────────────────

    async def _carry(self, parcel: StartAttempt) -> None:
        fate, reason, rest = AttemptResult.ARRIVED, "", 0
        try:
            channel = await self._channel(parcel.recipient)
            with contextlib.suppress(DulyError):  # then by what is known here
                await self._catch_up_on(parcel)
            if any(self._is_wanted(load.ref) for load in parcel.loads):
                known = await self._known(parcel)
                # Thousands of alerts take a while to write down: others want to store something, too.
                many = len(parcel.loads) > NAMED
                words = (
                    await asyncio.to_thread(notification, parcel, known)
                    if many
                    else notification(parcel, known)
                )
                async with asyncio.timeout(CARRY_SECONDS):
                    await channel.send(words)
            else:
                fate, reason = AttemptResult.CALLED_OFF, NOT_WANTED
        except NotSent as problem:
            fate, reason, rest = AttemptResult.NOT_SENT, str(problem), problem.rest
        except (Declined, Malformed) as problem:
            fate, reason = AttemptResult.REFUSED, str(problem)
        except InDoubt as problem:
            fate, reason = AttemptResult.IN_DOUBT, str(problem)
        except TimeoutError:
            fate, reason = AttemptResult.IN_DOUBT, f"no answer within {CARRY_SECONDS:.0f} s"
        except Exception as problem:  # a channel's bug must not stop the others; its words may hold secrets
            fate, reason = AttemptResult.IN_DOUBT, f"the channel failed: {type(problem).__name__}"
        if self._journal.watchers:
            for load in parcel.loads:
                self._journal.see(
                    "told", scope=load.message.scope, id=load.message.id, to=parcel.recipient, fate=fate.value
                )
        with contextlib.suppress(DulyError):  # stopping: the ledger says that it was under way
            await self._commit(AttemptEnded(parcel, fate, reason, rest))
            # Whoever was cancelling it meanwhile, at another hub, did not see that somebody was told.
            for key in await self._catch_up_on(parcel):
                await self._changed(key)

    async def _known(self, parcel: StartAttempt) -> NotificationContext:
        """What a notice needs to know. When each of a few alerts was received is looked up, if need be."""
        if len(parcel.loads) <= NAMED:
            if len(self._received) >= READ_KEPT:
                self._received.clear()
            for load in parcel.loads:
                key = load.message.key
                if key not in self._received:
                    with contextlib.suppress(DulyError):
                        record = await self._ledger.find(key)
                        if record is not None:
                            self._received[key] = record.accepted_at
        keys = [load.message.key for load in parcel.loads]
        names = {load.message.recipient for load in parcel.loads}
        profiles = {name: self.profiles.get(name) for name in names}
        return NotificationContext(
            self._ledger.clock.now(),
            {key: self._statuses[key] for key in keys if key in self._statuses},
            {key: self._received[key] for key in keys if key in self._received},
            {name: profile.zone for name, profile in profiles.items() if profile is not None},
        )

    async def _catch_up_on(self, parcel: StartAttempt) -> list[bytes]:
        """What was said about these alerts at other hubs; those that have been cancelled."""
        if self._ledger.sole:
            return []
        names = {name_in_bucket(load.message.key): load.message.key for load in parcel.loads}
        if len(names) > NAMED:
            said = await self._ledger.bucket(STATUSES)
        else:
            found = {name: await self._ledger.item(STATUSES, name) for name in names}
            said = {name: body for name, body in found.items() if body is not None}
        for name in names.keys() & said.keys():
            self._statuses[names[name]] = read_status(said[name])
        return [key for key in names.values() if self._is_cancelled(key)]

    async def _commit(self, what: Amendment | AttemptEnded) -> None:
        """Tell the fanout; returns when what follows from it is stored."""
        stored = asyncio.get_running_loop().create_future()

        def committed() -> None:
            if not stored.done():
                stored.set_result(None)

        await self.engine.put(MachineEvent(what), committed)
        await stored

    async def _channel(self, label: str) -> Channel:
        address = self.profiles.address(label)
        if address is None:
            raise Declined("its address is not known any more; 'duly deliveries edit' gives it another")
        known = self._channels.get(label)
        if known is not None and known[0] == address:
            return known[1]
        channel = await asyncio.to_thread(open_channel, address.url, address.secret, private=self._private)
        others = self._channels.get(label)
        if others is not known and others is not None and others[0] == address:
            return others[1]  # somebody was faster
        self._channels[label] = (address, channel)
        if known is not None:
            await known[1].close()
        return channel


def _push(origin: Any, frame: OutgoingFrame) -> None:
    if origin is not None:
        origin.push(frame)
