"""Worlds of the tower: the production courier, with channels that fail, hang up in the middle and
lose their answers; and a process that dies around every commit, also between telling somebody and noting it.

Whom it tells is outside: `told` is what really arrived, whoever has noted it or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from duly.core.courier import Courier
from duly.core.endings import Asks
from duly.core.lifecycle import State
from duly.core.messages import Message, names_in
from duly.core.parcels import Carried, Carry, CourierPolicy, Doubt, Fate, Load, Plan, Planned, Traits
from duly.core.retry import RetryPolicy
from duly.core.route import RoutePolicy
from duly.core.steps import Arrived, Effect, Event, Reply, Report, Tell, Told
from duly.core.units import MINUTE, SECOND
from duly.engine import Machine
from duly.testing.sim.checkers import Finding, admitted_once, explained, forward, stored
from duly.testing.sim.network import Accept, Command, Outcome, Packet
from duly.testing.sim.nodes import HORIZON, Node
from duly.testing.sim.world import World

if TYPE_CHECKING:
    from duly.testing.sim.plan import Plan as WorldPlan

DOUBTS: Final = {
    "hook#1": Doubt.RESEND,
    "mail#1": Doubt.REPEAT,
    "pager#1": Doubt.STOP,
    "boss#1": Doubt.RESEND,
}
POLICY: Final = CourierPolicy(
    retry=RetryPolicy.exponential(3 * SECOND, 20 * SECOND), lease=10 * SECOND, horizon=HORIZON, keep=MINUTE
)
LASTS: Final = 2 * MINUTE
ESCALATES: Final = 15 * SECOND


class Arrival(Struct, frozen=True):
    """Somebody was told."""

    recipient: str
    load: Load


class Tower(Node):
    """Takes messages from the network and tells everybody in `DOUBTS` of each."""

    def machine(self, worker: str) -> Machine:
        return Courier(
            POLICY,
            worker,
            Asks(
                plan=self._plan,
                traits=_traits,
                route=lambda recipient: RoutePolicy(most=6, window=10 * SECOND, together=5 * SECOND),
                doubt=lambda recipient: DOUBTS[recipient],
            ),
        )

    def _plan(self, message: Message, now: int) -> Plan:
        at_once = [Planned(name, now, now + LASTS) for name in ("hook#1", "mail#1", "pager#1")]
        later = Planned("boss#1", now + ESCALATES, now + LASTS, 1)
        return Plan((*at_once, later), traits=_traits(message))

    def perform(self, effect: Effect) -> None:
        network = self.world.network
        match effect:
            case Reply(origin=origin, message=message, verdict=verdict):
                self.world.log.replied(self, message, verdict)
                network.send("hub", str(origin), Accept(message, verdict))
            case Report(key=key, state=state, answer=answer):
                network.send("hub", names_in(key)[0], Outcome(key, state, answer))
            case Tell(what=Carry() as parcel):
                self.spawn(self._carry(parcel))
            case _:
                pass

    async def _carry(self, parcel: Carry) -> None:
        world, draw = self.world, self.world.rng.random
        assert isinstance(world, TowerWorld)
        await asyncio.sleep(draw() * 0.2)
        fate = Fate.ARRIVED
        if world.faulty and draw() < world.plan.failing:
            fate = Fate.NOT_SENT
        elif world.faulty and draw() < world.plan.drop / 2:
            fate = Fate.IN_DOUBT
        if fate is Fate.ARRIVED or (fate is Fate.IN_DOUBT and draw() < 0.5):
            for load in parcel.loads:
                world.told.append(Arrival(parcel.recipient, load))
                world.log.effect(self, load.message, load.attempt)
        await asyncio.sleep(draw() * 0.2)
        await self.take(Told(Carried(parcel, fate, fate.value)))

    def event_of(self, source: str, packet: Packet) -> Event | None:
        return Arrived(packet.message, source) if isinstance(packet, Command) else None


def _traits(message: Message) -> Traits:
    """By what the sender happened to ask for: some travel together, some are urgent."""
    order = message.order
    return Traits() if order is None else Traits(f"{message.scope}/{order.key}", order.key == "level")


class Nobody(Node):
    """There are no devices in these worlds."""

    async def begin(self) -> None:
        return


class TowerWorld(World):
    receiver = Nobody
    hub = Tower

    def __init__(self, plan: WorldPlan) -> None:
        super().__init__(plan)
        self.told: list[Arrival] = []


# ── what must hold ───────────────────────────────────────────────────────────────────────────────


def told_once(world: World) -> Iterator[Finding]:
    """[P3] Nobody is told more often than his channel declares, and a repeat says so."""
    assert isinstance(world, TowerWorld)
    told: dict[tuple[bytes, str], list[Load]] = {}
    for arrival in world.told:
        told.setdefault((arrival.load.ref.key, arrival.recipient), []).append(arrival.load)
    for (key, recipient), loads in told.items():
        match DOUBTS[recipient]:
            case Doubt.STOP if len(loads) > 1:
                yield f"{recipient} was told {len(loads)} times, though doubt means stop", key
            case Doubt.REPEAT if len(loads) > 2:
                yield f"{recipient} was told {len(loads)} times", key
            case Doubt.REPEAT if any(not load.repeat for load in loads[1:]):
                yield f"{recipient} was told again without a word that it is a repeat", key
            case Doubt.RESEND if len({load.ref for load in loads}) > 1:
                yield f"{recipient} was told under two keys", key
            case _:
                pass
        attempts = [load.attempt for load in loads]
        if len(set(attempts)) != len(attempts):
            yield f"{recipient} was told twice in one attempt", key


def truthful(world: World) -> Iterator[Finding]:
    """[P5] What is noted is what happened: done only if it arrived, failed or expired only if it did not."""
    assert isinstance(world, TowerWorld)
    arrived = {(arrival.load.ref.key, arrival.recipient) for arrival in world.told}
    for ref, delivery in world.settled_disks["hub"].deliveries.items():
        there = (ref.key, ref.recipient) in arrived
        if delivery.state is State.DONE and not there:
            yield f"noted as done, and {ref.recipient} was not told", ref.key
        if delivery.state in (State.FAILED, State.EXPIRED, State.CANCELLED) and there:
            yield f"noted as {delivery.state.word}, and {ref.recipient} was told", ref.key


def all_told(world: World) -> Iterator[Finding]:
    """[P1, P5] Every event that was accepted has all its deliveries, and they have all ended."""
    hub = world.settled_disks["hub"]
    for key, record in hub.messages.items():
        made = {ref.recipient: one for ref, one in hub.deliveries.items() if ref.key == key}
        if made.keys() != DOUBTS.keys():
            yield f"only {', '.join(sorted(made)) or 'nobody'} would be told", key
        for recipient, one in made.items():
            if not one.state.terminal:
                yield f"the delivery to {recipient} is still {one.state.word}", key
            elif not world.plan.seed % 8 and one.state is not State.DONE:
                yield f"nothing went wrong, and {recipient} was not told: {one.state.word}", key
        if not record.state.terminal:
            yield f"it is still {record.state.word}", key
    machine = getattr(world.nodes["hub"].engine, "_machine", None)
    if isinstance(machine, Courier) and len(machine):
        yield f"{len(machine)} deliveries are still in memory", b""


TOWER_CHECKERS: Final[tuple[Callable[[World], Iterator[Finding]], ...]] = (
    told_once, truthful, all_told, stored, admitted_once, forward, explained,
)  # fmt: skip
