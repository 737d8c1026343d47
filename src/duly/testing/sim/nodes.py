"""The processes of a world: production machines, engine and ledger, with a simulated network between them.

Only the network, and dying and restarting, are simulated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from duly.clients.local_ledger import MINTED, minted_ids
from duly.core.horizon import Horizon
from duly.core.inbox import Inbox
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Mode, Order, names_in
from duly.core.operations import AppendEntry
from duly.core.ordering import LanePolicy
from duly.core.outbox import Outbox, OutboxPolicy, heard
from duly.core.retry import RetryPolicy
from duly.core.steps import Answered, Arrived, AttemptFailed, Effect, Event, Reply, ReportOutcome, Transmit
from duly.core.units import FOREVER, HOUR, MINUTE, SECOND
from duly.errors import Stopped
from duly.runtime.engine import Engine, Machine
from duly.storage.memory import Disk
from duly.testing.loops import LoopClock
from duly.testing.sim.network import SimAccept, SimCommand, SimOutcome, SimPacket
from duly.testing.sim.sim_ledger import SimLedger

if TYPE_CHECKING:
    from duly.testing.sim.journal_ledger import JournalLedger
    from duly.testing.sim.world import World

HORIZON: Final = Horizon(keep=5 * MINUTE, skew=MINUTE)

ONCE, AGAIN, LEDGER = "at_most_once", "at_least_once", "in_the_ledger"
"""The kinds of effects that a message may ask for."""


class SimProcess:
    """A process that may die and restart from its disk."""

    def __init__(self, world: World, name: str, skew: int) -> None:
        self.world = world
        self.name = name
        self.clock = LoopClock(asyncio.get_running_loop(), skew)
        self.disk = Disk()
        self.incarnation = 0
        self.alive = False
        self.ready = False
        """whether the process has started and may be used"""
        self.tasks: set[asyncio.Task[None]] = set()

    def machine(self, worker: str) -> Machine:
        """Return the machine that this process runs."""
        raise NotImplementedError

    def perform(self, effect: Effect) -> None:
        """Carry out an effect of the machine."""
        raise NotImplementedError

    def event_of(self, source: str, packet: SimPacket) -> Event | None:
        """Return the event of the machine for a packet."""
        raise NotImplementedError

    async def started(self) -> None:
        """Called after the engine has started."""

    async def start(self) -> None:
        """Start the process with what is on its disk."""
        self.incarnation += 1
        mine = self.incarnation
        self.alive = True
        self.ledger: SimLedger | JournalLedger = self.open_ledger()
        self.world.log.note(self.name, "starts")
        await self.begin()
        if self.alive and self.incarnation == mine:  # it may have died and restarted meanwhile
            self.ready = True
            self.spawn(self._prune())

    def open_ledger(self) -> SimLedger | JournalLedger:
        """Return the ledger on the disk of the process."""
        world = self.world
        return SimLedger(
            self.clock, self.disk, f"{self.name}#{self.incarnation}",
            fault=lambda moment: world.fault(self, moment), crash=self.crash,
            watch=lambda disk, write, result: world.committed(self, disk, write, result),
        )  # fmt: skip

    def examine(self) -> None:
        """Read what is on the disk, if `disk` does not always show it."""

    def erase(self) -> None:
        """Delete what is on the disk."""
        self.disk = Disk()

    async def begin(self) -> None:
        """Start the program of the process on its ledger."""
        machine = self.machine(self.ledger.worker)
        self.engine = Engine(machine, self.ledger, self._perform_alive, capacity=64)
        await self.engine.start()
        await self.started()

    async def submit(self, recipient: str, kind: str, order: Order | None, lasts: int) -> None:
        """Send a message, as a user would."""
        raise NotImplementedError

    def _perform_alive(self, effect: Effect) -> None:
        if self.alive:
            self.perform(effect)

    def crash(self) -> None:
        """Die: everything stops, and nothing more is written."""
        if not self.alive:
            return
        self.world.log.note(self.name, "dies")
        self.alive = self.ready = False
        self.ledger.dead = True
        self.die()
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        self.world.crashed(self)

    def die(self) -> None:
        """End the program of the process."""
        if hasattr(self, "engine"):
            self.engine.kill()

    def spawn(self, program: Coroutine[object, None, None]) -> None:
        """Run a task that ends with the process."""
        task = asyncio.get_running_loop().create_task(program)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            self.world.bugs.append(problem)

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(30)
            await self.ledger.prune()

    def arrive(self, source: str, packet: SimPacket) -> None:
        """Receive a packet."""
        if not self.alive:
            return
        event = self.event_of(source, packet)
        if event is not None:
            self.spawn(self.take(event))

    async def take(self, event: Event) -> None:
        """Hand an event to the engine."""
        with suppress(Stopped):
            await self.engine.put(event)

    def answer_of(self, packet: SimPacket) -> Event | None:
        """Return the answer to the outbox in a recipient's packet."""
        match packet:
            case SimAccept(message=message, verdict=verdict):
                return heard(message.key, verdict)
            case SimOutcome(key=key, state=state, answer=answer):
                return Answered(key, state, answer)
            case SimCommand():
                return None


class SimSender(SimProcess):
    """An app: mints ids, sends messages through the hub, and learns how they ended."""

    def machine(self, worker: str) -> Machine:
        """Return an outbox that resends with growing pauses."""
        resend = RetryPolicy.exponential(3 * SECOND, 30 * SECOND)
        return Outbox(OutboxPolicy("hub", resend, patience=HOUR), worker, minted=MINTED)

    async def started(self) -> None:
        """Continue minting ids after the last one that was stored."""
        self.ids = await minted_ids(self.ledger)

    async def submit(self, recipient: str, kind: str, order: Order | None, lasts: int) -> None:
        """Mint an id, note the message for the checkers, and hand it to the outbox."""
        now = self.clock.now()
        minted = self.ids.next(now)
        if order is not None:
            order = Order(order.key, order.mode, minted.n)
        message = Message(
            self.name,
            str(minted),
            kind,
            recipient,
            b"wanted",
            expires=now + lasts if lasts else 0,
            order=order,
        )
        self.world.log.submitted(self, message, minted)
        await self.take(Arrived(message))

    def perform(self, effect: Effect) -> None:
        """Send a message to the hub, or note how one ended."""
        match effect:
            case Transmit(message=message):
                self.world.network.send(self.name, "hub", SimCommand(message))
            case ReportOutcome(key=key, state=state, answer=answer):
                self.world.log.outcome(self.name, key, state, answer)
            case Reply():
                pass

    def event_of(self, source: str, packet: SimPacket) -> Event | None:
        """Return the event for what the hub says about a message."""
        return self.answer_of(packet)


class SimHub(SimProcess):
    """A hub: stores and orders messages, passes them on, and passes the answers back."""

    def machine(self, worker: str) -> Machine:
        """Return an inbox that passes messages on to devices, with six resends."""
        resend = RetryPolicy.fixed(3 * SECOND, tries=6)
        return Inbox(
            OutboxPolicy("device", resend, patience=30 * SECOND), worker,
            lanes=LanePolicy(), horizon=lambda kind: HORIZON,
        )  # fmt: skip

    def perform(self, effect: Effect) -> None:
        """Send a message to its device, or a reply or an outcome to its sender."""
        network = self.world.network
        match effect:
            case Transmit(message=message, after=after):
                if message.order is not None:
                    order = msgspec.structs.replace(message.order, after=after)
                    message = msgspec.structs.replace(message, order=order)
                network.send("hub", message.recipient, SimCommand(message))
            case Reply(origin=origin, message=message, verdict=verdict):
                self.world.log.replied(self, message, verdict)
                network.send("hub", str(origin), SimAccept(message, verdict))
            case ReportOutcome(key=key, state=state, answer=answer):
                network.send("hub", names_in(key)[0], SimOutcome(key, state, answer))

    def event_of(self, source: str, packet: SimPacket) -> Event | None:
        """Return the event for a command of a sender, or for what a device says about one."""
        if isinstance(packet, SimCommand):
            return Arrived(packet.message, source)
        return self.answer_of(packet)


class SimReceiver(SimProcess):
    """A device: runs handlers whose effects cannot be undone."""

    def machine(self, worker: str) -> Machine:
        """Return an inbox that runs one message at a time."""
        policy = OutboxPolicy(
            "run", resend=None, patience=FOREVER,
            retry=RetryPolicy.exponential(SECOND, 5 * SECOND, tries=3),
        )  # fmt: skip
        return Inbox(
            policy, worker, lanes=LanePolicy(serial=True), horizon=lambda kind: HORIZON,
            repeatable=lambda message: message.kind != ONCE,
        )  # fmt: skip

    def perform(self, effect: Effect) -> None:
        """Run the handler, or send a reply or an outcome to the hub."""
        match effect:
            case Transmit(message=message, attempt=attempt):
                self.spawn(self._handle(message, attempt))
            case Reply(message=message, verdict=verdict):
                self.world.log.replied(self, message, verdict)
                self.world.network.send(self.name, "hub", SimAccept(message, verdict))
            case ReportOutcome(key=key, state=state, answer=answer):
                self.world.network.send(self.name, "hub", SimOutcome(key, state, answer))

    async def _handle(self, message: Message, attempt: int) -> None:
        draw = self.world.rng.random
        await asyncio.sleep(draw() * 0.1)
        if draw() < self.world.plan.failing and self.world.faulty:
            await self.take(AttemptFailed(message.key, attempt, "busy"))
            return
        effects = (
            (AppendEntry("effects", b"", self.clock.now(), message.key),) if message.kind == LEDGER else ()
        )
        if not effects:
            self.world.log.effect(self, message, attempt)
        await asyncio.sleep(draw() * 0.1)
        done = Answered(message.key, State.DONE, Answer(0, message.body), attempt, effects)
        await self.take(done)

    def event_of(self, source: str, packet: SimPacket) -> Event | None:
        """Return the event for a command of the hub; a device ignores everything else."""
        return Arrived(packet.message, source) if isinstance(packet, SimCommand) else None


def draw_order(draw: float) -> Order | None:
    """Draw the order of a message; most have one, since that is the harder case."""
    if draw < 0.2:
        return None
    return Order("power" if draw < 0.7 else "level", Mode.REPLAY if draw < 0.5 else Mode.LATEST)
