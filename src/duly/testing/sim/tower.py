"""Worlds of the tower: the production fanout, with channels that fail, break off and lose their answers.

Its process dies around every commit, also between notifying a recipient and storing that. `told` holds
what really arrived, stored or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from duly.core.fanout.attempts import FanoutQueries
from duly.core.fanout.machine import Fanout
from duly.core.fanout.plan import (
    AttemptEnded,
    AttemptResult,
    BatchItem,
    DeliveryPlan,
    DoubtPolicy,
    FanoutPolicy,
    GroupingTraits,
    PlannedDelivery,
    StartAttempt,
)
from duly.core.fanout.recipient_queue import RecipientPolicy
from duly.core.lifecycle import State
from duly.core.messages import Message, names_in
from duly.core.retry import RetryPolicy
from duly.core.steps import Arrived, Effect, Event, MachineEffect, MachineEvent, Reply, ReportOutcome
from duly.core.units import MINUTE, SECOND
from duly.runtime.engine import Machine
from duly.testing.sim.checkers import (
    Checker,
    Finding,
    admitted_once,
    refusals_explained,
    states_move_forward,
    stored,
)
from duly.testing.sim.network import SimAccept, SimCommand, SimOutcome, SimPacket
from duly.testing.sim.nodes import HORIZON, SimProcess
from duly.testing.sim.world import CALM, World

if TYPE_CHECKING:
    from duly.testing.sim.plan import SimPlan as WorldPlan

DOUBTS: Final = {
    "hook#1": DoubtPolicy.RESEND,
    "mail#1": DoubtPolicy.REPEAT,
    "pager#1": DoubtPolicy.STOP,
    "boss#1": DoubtPolicy.RESEND,
}
POLICY: Final = FanoutPolicy(
    retry=RetryPolicy.exponential(3 * SECOND, 20 * SECOND), lease=10 * SECOND, horizon=HORIZON, keep=MINUTE
)
LASTS: Final = 2 * MINUTE
ESCALATES: Final = 15 * SECOND
AHEAD: Final = 3 * MINUTE
"""Less than the horizon, so that messages are accepted meanwhile; more than a delivery may be late."""
LATE: Final = CALM + 90.0
"""Seconds after the beginning of the world: until then everything that was due at once has been sent."""
MISLED: Final = 0.1
"""How likely the clock is ahead when a packet comes, in worlds in which clocks are set."""


class ChannelArrival(Struct, frozen=True):
    """A notification that has arrived."""

    recipient: str
    item: BatchItem
    at: float
    """by the clock that is never set"""


class SimTower(SimProcess):
    """Takes messages from the network and delivers each to all recipients in `DOUBTS`."""

    world: TowerWorld

    def machine(self, worker: str) -> Machine:
        """Return a fanout with a limit for each recipient."""
        return Fanout(
            POLICY,
            worker,
            FanoutQueries(
                plan=self._plan,
                traits=_traits,
                route=lambda recipient: RecipientPolicy(most=6, window=10 * SECOND, together=5 * SECOND),
                doubt=lambda recipient: DOUBTS[recipient],
            ),
        )

    def _plan(self, message: Message, now: int) -> DeliveryPlan:
        at_once = [PlannedDelivery(name, now, now + LASTS) for name in ("hook#1", "mail#1", "pager#1")]
        later = PlannedDelivery("boss#1", now + ESCALATES, now + LASTS, 1)
        return DeliveryPlan((*at_once, later), traits=_traits(message))

    def perform(self, effect: Effect) -> None:
        """Start an attempt, or send a reply or an outcome to the sentinel."""
        network = self.world.network
        match effect:
            case Reply(origin=origin, message=message, verdict=verdict):
                self.world.log.replied(self, message, verdict)
                network.send("hub", str(origin), SimAccept(message, verdict))
            case ReportOutcome(key=key, state=state, answer=answer):
                network.send("hub", names_in(key)[0], SimOutcome(key, state, answer))
            case MachineEffect(what=StartAttempt() as attempt):
                self.spawn(self._attempt(attempt))
            case _:
                pass

    async def _attempt(self, attempt: StartAttempt) -> None:
        world, draw = self.world, self.world.rng.random
        await asyncio.sleep(draw() * 0.2)
        result = AttemptResult.ARRIVED
        if world.faulty and draw() < world.plan.failing:
            result = AttemptResult.NOT_SENT
        elif world.faulty and draw() < world.plan.drop / 2:
            result = AttemptResult.IN_DOUBT
        if result is AttemptResult.ARRIVED or (result is AttemptResult.IN_DOUBT and draw() < 0.5):
            for item in attempt.items:
                world.told.append(ChannelArrival(attempt.recipient, item, world.loop.time()))
                world.log.effect(self, item.message, item.attempt)
        await asyncio.sleep(draw() * 0.2)
        await self.take(MachineEvent(AttemptEnded(attempt, result, result.value)))

    def event_of(self, source: str, packet: SimPacket) -> Event | None:
        """Return the event for an alert of a sentinel."""
        return Arrived(packet.message, source) if isinstance(packet, SimCommand) else None


def _traits(message: Message) -> GroupingTraits:
    """Derive the grouping from the order of a message: some are grouped, some are urgent."""
    order = message.order
    return (
        GroupingTraits()
        if order is None
        else GroupingTraits(f"{message.scope}/{order.key}", order.key == "level")
    )


class NoTowerDevices(SimProcess):
    """A receiver that does nothing, since there are no devices in these worlds."""

    async def begin(self) -> None:
        """Do nothing: recipients take the place of devices."""
        return


class TowerWorld(World):
    """A world of senders and a tower, whose clock is sometimes ahead when an alert comes, and is set back
    while that is committed."""

    receiver = NoTowerDevices
    hub = SimTower

    def __init__(self, plan: WorldPlan) -> None:
        super().__init__(plan)
        self.told: list[ChannelArrival] = []
        self._ahead = False

    def _deliver(self, source: str, target: str, packet: SimPacket) -> None:
        if self.faulty and self.plan.steps and target == "hub" and self.rng.random() < MISLED:
            self._set_ahead(True)
        super()._deliver(source, target, packet)

    def _set_ahead(self, ahead: bool) -> None:
        if ahead is not self._ahead:
            self._ahead = ahead
            self._set_clock(self.nodes["hub"], AHEAD if ahead else -AHEAD)

    def fault(self, node: SimProcess, moment: str) -> str:
        """Return the fault of a commit; a clock that is ahead is set back while the hub commits."""
        if node.name == "hub":
            self._set_ahead(False)
        return super().fault(node, moment)

    def _calm(self) -> None:
        self._set_ahead(False)
        super()._calm()


# ── what must hold ───────────────────────────────────────────────────────────────────────────────


def notified_once(world: TowerWorld) -> Iterator[Finding]:
    """[P3] A recipient is notified no more often than its channel declares, and a repeat is marked."""
    told: dict[tuple[bytes, str], list[BatchItem]] = {}
    for arrival in world.told:
        told.setdefault((arrival.item.ref.key, arrival.recipient), []).append(arrival.item)
    for (key, recipient), items in told.items():
        match DOUBTS[recipient]:
            case DoubtPolicy.STOP if len(items) > 1:
                yield f"{recipient} was told {len(items)} times, though doubt means stop", key
            case DoubtPolicy.REPEAT if len(items) > 2:
                yield f"{recipient} was told {len(items)} times", key
            case DoubtPolicy.REPEAT if any(not item.repeat for item in items[1:]):
                yield f"{recipient} was told again, and the repeat was not marked", key
            case DoubtPolicy.RESEND if len({item.ref for item in items}) > 1:
                yield f"{recipient} was told under two keys", key
            case _:
                pass
        attempts = [item.attempt for item in items]
        if len(set(attempts)) != len(attempts):
            yield f"{recipient} was told twice in one attempt", key


def delivery_states_true(world: TowerWorld) -> Iterator[Finding]:
    """[P5] A delivery is stored as done only if it arrived, and as failed or expired only if it did not."""
    arrived = {(arrival.item.ref.key, arrival.recipient) for arrival in world.told}
    for ref, delivery in world.settled_disks["hub"].deliveries.items():
        there = (ref.key, ref.recipient) in arrived
        if delivery.state is State.DONE and not there:
            yield f"stored as done, and {ref.recipient} was not told", ref.key
        if delivery.state in (State.FAILED, State.EXPIRED, State.CANCELLED) and there:
            yield f"noted as {delivery.state.word}, and {ref.recipient} was told", ref.key


def notified_in_time(world: World) -> Iterator[Finding]:
    """[P5] A clock that is set does not delay a delivery that is due at once."""
    assert isinstance(world, TowerWorld)
    for arrival in world.told:
        if arrival.at > LATE and not arrival.item.ref.round:
            yield f"{arrival.recipient} was told after {arrival.at:.0f} s", arrival.item.ref.key


def deliveries_ended(world: World) -> Iterator[Finding]:
    """[P1, P5] Every accepted event has all its deliveries, and all of them have ended."""
    hub = world.settled_disks["hub"]
    for key, record in hub.messages.items():
        made = {ref.recipient: one for ref, one in hub.deliveries.items() if ref.key == key}
        if made.keys() != DOUBTS.keys():
            yield f"only {', '.join(sorted(made)) or 'no recipient'} would be told", key
        for recipient, one in made.items():
            if not one.state.terminal:
                yield f"the delivery to {recipient} is still {one.state.word}", key
            elif not world.plan.seed % 8 and one.state is not State.DONE:
                yield f"nothing went wrong, and {recipient} was not told: {one.state.word}", key
        if not record.state.terminal:
            yield f"it is still {record.state.word}", key
    machine = getattr(world.nodes["hub"].engine, "_machine", None)
    if isinstance(machine, Fanout) and len(machine):
        yield f"{len(machine)} deliveries are still in memory", b""


TOWER_CHECKERS: Final[tuple[Checker[TowerWorld], ...]] = (
    notified_once,
    delivery_states_true,
    notified_in_time,
    deliveries_ended,
    stored,
    admitted_once,
    states_move_forward,
    refusals_explained,
)
