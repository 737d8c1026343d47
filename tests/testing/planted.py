"""Bugs to plant, each a mistake somebody once made. The checkers must find every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from duly.apps.gateway.followed_commands import FollowedCommands
from duly.apps.gateway.remote_hubs import GatewayRemoteHubs
from duly.apps.gateway.service import GatewayService
from duly.apps.gateway.shared_deliveries import SharedDeliveries
from duly.cluster import registry
from duly.cluster.holder_changes import OwnChanges
from duly.core import high_water as marks
from duly.core import horizon as horizons
from duly.core import inbox as inboxes
from duly.core import lane as lanes
from duly.core import operations as w
from duly.core.inbox import Inbox
from duly.core.lane import Release
from duly.core.lifecycle import State
from duly.core.messages import FRESH, Message, Verdict, VerdictKind
from duly.core.ordering import Lanes
from duly.core.outbox import Outbox
from duly.core.sender_gaps import EVERY_GAP, Chain
from duly.core.steps import Answered, Arrived, DeliveriesFound, Reply, Step, Todo
from duly.core.transmissions import Transmission
from duly.core.trusted_time import Floor, TrustedClock
from duly.core.units import SECOND
from duly.errors import LedgerUnavailable
from duly.identity.account_directory import AccountDirectory
from duly.identity.accounts import Principal
from duly.storage import interpreter
from duly.storage.interpreter import Interpreter
from duly.storage.ledger import Ledger
from duly.storage.memory import MemoryLedger
from duly.testing.sim.sim_ledger import SimLedger
from duly.wire.session import Session
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("stored")
def ack_before_commit(patch: Patch) -> None:
    """The sender is told before the message is stored."""
    receive = Inbox.receive

    def hasty(self: Inbox, event: Arrived, now: int) -> list[Todo]:
        todo = receive(self, event, now)
        admits = any(isinstance(t, Step) and isinstance(t.writes[0], w.Admit) for t in todo)
        return [Reply(event.origin, event.message, FRESH), *todo] if admits else todo

    patch.setattr(Inbox, "receive", hasty)


@breaks("admitted_once")
def no_unique_key(patch: Patch) -> None:
    """Every arrival is fresh."""
    patch.setattr(Interpreter, "_known", lambda self, message: None)


@breaks("stored")
def forget_too_early(patch: Patch) -> None:
    """Ids are forgotten while their senders may still repeat them."""
    patch.setattr(horizons, "remember_until", lambda message, horizon: message.made + SECOND)


@breaks("admitted_once")
def no_floor(patch: Patch) -> None:
    """After forgetting, only the clock says what is too old; then the clock is set back."""

    async def prune(self: MemoryLedger, *, limit: int = 1_000) -> int:
        now = self.clock.now()
        old = [k for k, r in self.disk.messages.items() if r.until <= now and r.state.terminal]
        for key in old:
            self.disk.withdraw(key)
        return len(old)

    patch.setattr(MemoryLedger, "prune", prune)


@breaks("floor_not_ahead")
def floor_follows_the_wall_clock(patch: Patch) -> None:
    """Pruning believes whatever the clock shows, also if that is wrong for half a minute."""

    def judge(self: TrustedClock, floor: Floor, now: int, steady: int) -> Floor:
        return msgspec.structs.replace(floor, until=max(floor.until, now))

    patch.setattr(TrustedClock, "judge", judge)


@breaks("stored")
def wrong_scope(patch: Patch) -> None:
    """An id is looked up without asking whose it is."""

    def known(self: Interpreter, message: Message) -> Verdict | None:
        for record in self._rows.messages.values():  # type: ignore[attr-defined]  # a memory ledger's disk
            if record.message.id == message.id:
                return Verdict(VerdictKind.DUPLICATE, record.state, record.answer)
        return None

    patch.setattr(Interpreter, "_known", known)


@breaks("superseded_by_later")
def clock_decides_order(patch: Patch) -> None:
    """The sender's clock, not its counter, says what is later."""

    def later(n: int, ms: int, mark: tuple[int, int] | None) -> bool:
        return mark is None or ms > mark[1]

    patch.setattr(w, "is_later", later)
    patch.setattr(lanes, "is_later", later)
    patch.setattr(marks, "is_later", later)


@breaks("ordered")
def lost_high_water_mark(patch: Patch) -> None:
    """The mark lives in memory only."""
    raise_mark = Interpreter._raise_mark

    def forgetful(self: Interpreter, rise: w.RaiseMark) -> bool:
        return True if rise.mark.startswith("[") else raise_mark(self, rise)

    patch.setattr(Interpreter, "_raise_mark", forgetful)


@breaks("refusals_explained")
def no_fingerprint(patch: Patch) -> None:
    """Other content under a known id passes for a repeat."""

    def known(self: Interpreter, message: Message) -> Verdict | None:
        record = self._rows.message(message.key)
        return None if record is None else Verdict(VerdictKind.DUPLICATE, record.state, record.answer)

    patch.setattr(Interpreter, "_known", known)


@breaks("admitted_once")
def newest_content_wins(patch: Patch) -> None:
    """Other content under a known id replaces the first."""
    known = Interpreter._known

    def naive(self: Interpreter, message: Message) -> Verdict | None:
        verdict = known(self, message)
        return None if verdict is not None and verdict.kind is VerdictKind.CONFLICT else verdict

    patch.setattr(Interpreter, "_known", naive)
    patch.setattr(Inbox, "_attach", lambda self, live, origin: [])


@breaks("settled")
def torn_commit(patch: Patch) -> None:
    """A commit that failed leaves the admission behind, without what belongs to it."""
    commit = SimLedger.commit

    async def torn(self: SimLedger, groups: Sequence[w.Group]) -> list[w.Results]:
        try:
            return await commit(self, groups)
        except LedgerUnavailable:
            for group in groups:
                for write in group:
                    if isinstance(write, w.Admit):
                        self.execute((msgspec.structs.replace(write, then=()),))
            raise

    patch.setattr(SimLedger, "commit", torn)


@breaks("once")
def run_again_after_crash(patch: Patch) -> None:
    """What must run at most once is started again after a crash in the middle."""
    begin = Outbox.__init__

    def careless(self: Outbox, policy: Any, worker: str, **more: Any) -> None:
        begin(self, policy, worker, **{**more, "repeatable": lambda message: True})

    patch.setattr(Outbox, "__init__", careless)


@breaks("states_move_forward")
def ends_may_change(patch: Patch) -> None:
    """A later answer overwrites an earlier one."""
    patch.setattr(interpreter, "SOURCES", {to: frozenset(State) for to in State})


@breaks("settled")
def silence_for_duplicates(patch: Patch) -> None:
    """A repeat is ignored, as in many protocols, so a lost answer stays lost."""
    perform = Inbox._not_fresh

    def mute(self: Inbox, live: Any, verdict: Verdict, now: int) -> list[Todo]:
        todo = perform(self, live, verdict, now)
        return (
            [t for t in todo if not isinstance(t, Reply)] if verdict.kind is VerdictKind.DUPLICATE else todo
        )

    patch.setattr(Inbox, "_not_fresh", mute)
    patch.setattr(Inbox, "repeated", lambda self, message, verdict, origin, now: [])


@breaks("settled")
def nothing_resumed(patch: Patch) -> None:
    """After a restart, what was under way is not taken up again."""
    patch.setattr(Outbox, "_resume", lambda self, item, known, now: [])


@breaks("done_without_faults")
def gaps_do_not_wait(patch: Patch) -> None:
    """What arrives runs, whatever is still missing before it."""

    def impatient(self: Chain, given_up: int = -1) -> Any:
        return follow(self, EVERY_GAP)

    follow = Chain.follow
    patch.setattr(Chain, "follow", impatient)


@breaks("once")
def effects_apart_from_the_end(patch: Patch) -> None:
    """A handler's writes are committed before, not with, the memory that it ran."""
    answered = Outbox.answered

    def apart(self: Outbox, event: Any, now: int) -> list[Todo]:
        if not event.effects:
            return answered(self, event, now)
        bare = msgspec.structs.replace(event, effects=())
        return [Step(event.effects, lambda results, now: answered(self, bare, now))]

    patch.setattr(Outbox, "answered", apart)


@breaks("settled")
def no_timer(patch: Patch) -> None:
    """Nothing is ever sent again."""
    patch.setattr(Outbox, "next_wake", lambda self: None)


@breaks("settled")
def memory_is_the_truth(patch: Patch) -> None:
    """The memory of hot ids is filled once and never corrected."""
    patch.setattr(Ledger, "_moved", lambda self, write: None)
    patch.setattr("duly.runtime.engine._end_of", lambda ledger, message, now: ledger.recall(message, now))


@breaks("ordered")
def handlers_side_by_side(patch: Patch) -> None:
    """A lane's next handler starts before the last one has finished."""
    patch.setattr(
        Lanes, "_start", lambda self, message, mark="", n=0, ms=0: [Release(message, mark, n, ms, -1)]
    )


@breaks("refusals_explained")
def refusals_not_recorded(patch: Patch) -> None:
    """What was refused is refused in silence."""
    patch.setattr(Interpreter, "_told", lambda self, message, verdict, at: verdict)


@breaks("settled")
def held_is_forgotten(patch: Patch) -> None:
    """A message that waits for a gap is acknowledged but not stored with its delivery."""
    admit = inboxes.Inbox._admit

    def buffered(self: Inbox, live: Any, move: Any, horizon: Any, now: int) -> Step:
        step = admit(self, live, move, horizon, now)
        if move is None:
            (write,) = step.writes
            bare = msgspec.structs.replace(write, then=())
            return msgspec.structs.replace(step, writes=(bare,))
        return step

    patch.setattr(Inbox, "_admit", buffered)


@breaks("superseded_by_later")
def superseded_by_what_only_waits(patch: Patch) -> None:
    """A late message is superseded by a later one that was not handed over yet."""
    start = Lanes._start

    def eager(self: Any, message: Message, mark: str = "", n: int = 0, ms: int = 0) -> Any:
        newest = self.__dict__.setdefault("newest", {})
        if mark and (n, ms) < newest.get(mark, (-1, 0)):
            return [lanes.Supersede(message, "late", mark, n, ms)]
        newest[mark] = (n, ms)
        return start(self, message, mark, n, ms)

    patch.setattr(Lanes, "_start", eager)


PLANTED = planted(
    ack_before_commit, no_unique_key, forget_too_early, no_floor, floor_follows_the_wall_clock,
    wrong_scope, clock_decides_order,
    lost_high_water_mark, no_fingerprint, newest_content_wins, torn_commit, run_again_after_crash,
    ends_may_change, silence_for_duplicates, nothing_resumed, gaps_do_not_wait,
    effects_apart_from_the_end, no_timer, memory_is_the_truth, handlers_side_by_side,
    refusals_not_recorded, held_is_forgotten, superseded_by_what_only_waits,
)  # fmt: skip


# ── where there are several hubs ─────────────────────────────────────────────────────────────────


@breaks("attempts_not_seized")
def restores_what_is_others(patch: Patch) -> None:
    """A hub that starts goes on with everything, as if it were alone."""

    async def everything(self: GatewayRemoteHubs) -> list[w.OpenDelivery]:
        return await self._ledger.open_deliveries(self._channel)

    patch.setattr(GatewayRemoteHubs, "open_deliveries", everything)


@breaks("requests_answered")
def follows_nothing(patch: Patch) -> None:
    """What was left to another hub is forgotten: its home is not rung, and its end not waited for."""
    patch.setattr(GatewayRemoteHubs, "follow", lambda self, message, verdict, origin: None)


@breaks("requests_answered")
def only_apps_are_followed(patch: Patch) -> None:
    """A request that waits at another hub than the device's is not told how its command ended."""
    follow = GatewayRemoteHubs.follow
    patch.setattr(
        GatewayRemoteHubs,
        "follow",
        lambda self, message, verdict, origin: follow(self, message, verdict, None),
    )


@breaks("attempts_not_seized")
def takes_what_is_others(patch: Patch) -> None:
    """A hub sees to devices that it does not have."""

    async def greedy(self: SharedDeliveries, devices: Any) -> None:
        open_ = await self._ledger.open_deliveries(self._channel)
        await self._local.engine.put(DeliveriesFound(tuple(open_)))

    patch.setattr(SharedDeliveries, "take_over", greedy)


@breaks("attempts_fenced")
def no_attempt_fence(patch: Patch) -> None:
    """A late attempt may end, or begin anew, what another hub has taken over."""
    fenced = Interpreter._fenced
    patch.setattr(Interpreter, "_fenced", lambda self, ref, attempt: fenced(self, ref, None))


@breaks("settled")
def no_takeover(patch: Patch) -> None:
    """What a dead hub held waits for its device, though that never comes back."""
    strays = Ledger.strays

    async def timid(self: Ledger, channel: str, *, here: Any, **more: Any) -> list[w.OpenDelivery]:
        found = await strays(self, channel, here=here, **more)
        return [item for item in found if item.message.recipient in here or not item.delivery.worker]

    patch.setattr(Ledger, "strays", timid)


@breaks("settled")
def no_hub_ever_dies(patch: Patch) -> None:
    """A hub that says nothing any more is waited for."""
    patch.setattr(registry, "LAPSE", 1e9)


@breaks("registered")
def an_old_goodbye_undoes_a_new_home(patch: Patch) -> None:
    """A hub that notices late that a device has left removes its registration at another hub."""

    async def drop(self: registry.HubRegistry, device: str, home: bytes) -> bool:
        gone = await self._ledger.apply(w.DropItem(registry.REGISTRY, device))
        return bool(gone)

    patch.setattr(registry.HubRegistry, "_drop", drop)


@breaks("registered")
def a_late_goodbye_ends_the_next_session(patch: Patch) -> None:
    """The end of a session is noted after the next one has begun, and no hub looks whether what is connected
    to it is registered: the device is connected, and registered at no hub."""
    disconnected = GatewayService.disconnected

    async def careless(self: GatewayService, session: Session, who: Principal) -> None:
        await disconnected(self, session, who)
        await self.remote.unregister(who.name)

    patch.setattr(GatewayService, "disconnected", careless)
    patch.setattr(registry.HubRegistry, "is_registered", lambda self, device: True)


@breaks("holders_known")
def moves_are_known_by_hints_alone(patch: Patch) -> None:
    """No hub reads what the others have changed, and all hints of moves are lost."""

    async def lose(self: GatewayRemoteHubs, devices: Any) -> None:
        return None

    patch.setattr(GatewayRemoteHubs, "_learn_moves", lose)
    patch.setattr(OwnChanges, "note", lambda self, device: None)


@breaks("given_up_by_its_hub")
def silence_is_not_fenced(patch: Patch) -> None:
    """A hub that a device has left calls unanswered what the device is doing for another."""
    end = Outbox._end

    def unfenced(self: Outbox, one: Transmission, said: Answered, now: int) -> list[Todo]:
        open_ = msgspec.structs.replace(said, attempt=None) if said.state is State.UNKNOWN else said
        return end(self, one, open_, now)

    patch.setattr(Outbox, "_end", unfenced)


@breaks("settled")
def a_fenced_hub_does_not_let_go(patch: Patch) -> None:
    """Whoever was overtaken keeps what is no longer theirs."""
    patch.setattr(Outbox, "_give_away", lambda self, entry, attempt, now: [])


@breaks("requests_answered")
def rings_are_the_only_way(patch: Patch) -> None:
    """What a lost ring would have told is never found."""
    patch.setattr(GatewayRemoteHubs, "_refresh", lambda self: self.registry.refresh())


@breaks("requests_answered")
def ends_are_not_looked_for(patch: Patch) -> None:
    """How a command has ended is known to the hub where it did."""

    async def ignore(self: FollowedCommands, keys: Any) -> None:
        return None

    patch.setattr(FollowedCommands, "_learn", ignore)


@breaks("revoked_is_refused")
def revoked_elsewhere_is_allowed_here(patch: Patch) -> None:
    """A hub believes its own memory of grants, which is a second old."""
    patch.setattr(AccountDirectory, "proof", lambda self, principal, device="": ())


PLANTED_BETWEEN_HUBS = planted(
    restores_what_is_others, follows_nothing, only_apps_are_followed, takes_what_is_others,
    no_attempt_fence, no_takeover,
    no_hub_ever_dies, an_old_goodbye_undoes_a_new_home, a_late_goodbye_ends_the_next_session,
    moves_are_known_by_hints_alone,
    silence_is_not_fenced,
    a_fenced_hub_does_not_let_go, rings_are_the_only_way, ends_are_not_looked_for,
    revoked_elsewhere_is_allowed_here,
)  # fmt: skip
