"""One run of a world: faults while messages are sent, then calm in which everything must settle, then
replays.

The log is what an observer outside sees; only the checkers read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import copy_context
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from duly.core import operations as w
from duly.core.ids import SeqId
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Verdict, VerdictKind, key_of
from duly.core.units import DAY, SECOND
from duly.errors import LedgerError
from duly.storage.memory import Disk
from duly.testing.loops import VirtualLoop
from duly.testing.sim.network import SimCommand, SimNetwork, SimPacket
from duly.testing.sim.nodes import AGAIN, LEDGER, ONCE, SimHub, SimProcess, SimReceiver, SimSender, draw_order
from duly.testing.sim.plan import SimPlan

BUSY: Final = 40.0
CALM: Final = 60.0
SETTLED: Final = 280.0
"""A time long after the last resend and deadline, and before the first id is forgotten after the calm."""
WRONG: Final = 300.0
WRONG_FOR: Final = 36.0
WRONG_BY: Final = 2 * DAY
"""When, for how long and by how much the clocks of hubs are wrong: long enough for some ids to be
forgotten."""
BEYOND: Final = 1_000.0
"""Every id sent before is older than the horizon."""
END: Final = 1_030.0
CHECK_SECONDS: Final = 0.7
"""Seconds between two checks of the engines."""


class WantedMessage(Struct, frozen=True):
    """A message as its sender meant it."""

    message: Message
    epoch: int
    n: int


class ObservedEffect(Struct, frozen=True):
    """An effect as it happened."""

    at: float
    receiver: str
    incarnation: int
    message: Message
    attempt: int


class SeenMessage(Struct, frozen=True):
    """A chat line that a person was shown."""

    who: str
    incarnation: int
    conv: str
    n: int
    sender: str
    id: str


class WorldLog:
    """The log of a world, as an outside observer writes it."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str, bytes]] = []
        self.wanted: dict[bytes, WantedMessage] = {}
        self.effects: list[ObservedEffect] = []
        self.seen: list[SeenMessage] = []
        """the chat lines that people were shown, in order"""
        self.own: dict[tuple[str, str, int], int] = {}
        """(sender, conversation, number) of lines whose sender knows their number"""
        self.outcomes: dict[bytes, list[tuple[State, Answer]]] = {}
        self.replies: list[tuple[str, Message, Verdict]] = []
        self.promised: dict[str, dict[bytes, Message]] = {}
        """messages that a process has acknowledged as stored"""
        self.reinstalled: dict[str, float] = {}
        self.freed: set[bytes] = set()
        """messages that were refused: their ids are free, and another copy may still be accepted"""
        self.abandoned: set[bytes] = set()
        """messages that a reinstalled sender has forgotten"""
        self.commits: list[tuple[str, w.Write, w.Result]] = []
        """every write of every process, in the order of the commits"""
        self.anew: list[tuple[str, int]] = []
        """processes that restarted from their disk, and after how many commits"""

    def note(self, who: str, what: str, key: bytes = b"") -> None:
        """Add a line to the log."""
        if what == "starts" or what.startswith("disk fails"):
            self.anew.append((who, len(self.commits)))
        self.lines.append((asyncio.get_running_loop().time(), who, what, key))

    def submitted(self, sender: SimProcess, message: Message, minted: SeqId) -> None:
        """Note that a sender wants a message to take effect."""
        self.wanted[message.key] = WantedMessage(message, sender.world.epochs[sender.name], minted.n)
        order = message.order
        lane = f" {order.key}/{order.mode.value}" if order else ""
        self.note(sender.name, f"wants {message.kind}{lane} of {message.recipient}", message.key)

    def effect(self, receiver: SimProcess, message: Message, attempt: int) -> None:
        """Note an effect at a receiver."""
        now = asyncio.get_running_loop().time()
        self.effects.append(ObservedEffect(now, receiver.name, receiver.incarnation, message, attempt))
        self.note(receiver.name, f"EFFECT, attempt {attempt}", message.key)

    def effect_at(self, at: float, receiver: str, incarnation: int, message: Message) -> None:
        """Note an effect with its time."""
        self.effects.append(ObservedEffect(at, receiver, incarnation, message, 1))
        self.note(receiver, "EFFECT", message.key)

    def saw(self, who: SimProcess, conv: str, n: int, sender: str, id_: str) -> None:
        """Note that a person was shown a chat line."""
        self.seen.append(SeenMessage(who.name, who.incarnation, conv, n, sender, id_))
        self.note(who.name, f"is shown {conv} {n}", key_of(sender, id_))

    def outcome(self, sender: str, key: bytes, state: State, answer: Answer) -> None:
        """Note how a message ended, as its sender learned it."""
        self.outcomes.setdefault(key, []).append((state, answer))
        self.note(sender, f"learns {state.word}: {answer.reason or answer.code}", key)

    def replied(self, node: SimProcess, message: Message, verdict: Verdict) -> None:
        """Note the verdict that a process has sent."""
        self.replies.append((node.name, message, verdict))
        if verdict.kind in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
            self.promised.setdefault(node.name, {})[message.key] = message
        state = f" {verdict.state.word}" if verdict.state is not None else ""
        self.note(node.name, f"says {verdict.kind.value}{state} {verdict.reason}".strip(), message.key)


class World:
    """A world of the kernel alone. Other worlds put other processes into the same course of events."""

    sender: type[SimProcess] = SimSender
    receiver: type[SimProcess] = SimReceiver
    hub: type[SimProcess] = SimHub
    kinds: tuple[str, ...] = (ONCE, AGAIN, LEDGER)
    at_most_once: frozenset[str] = frozenset({ONCE, LEDGER})

    def __init__(self, plan: SimPlan) -> None:
        self.plan = plan
        self.rng = Random(f"world {plan.seed}")
        self.log = WorldLog()
        self.network = SimNetwork(
            Random(f"network {plan.seed}"), drop=plan.drop, repeat=plan.repeat, slow=plan.slow
        )
        self.network.deliver = self._deliver
        self.nodes: dict[str, SimProcess] = {}
        self.epochs: dict[str, int] = {}
        self.gone: set[str] = set()
        """processes that do not come back: nothing is expected of them"""
        self.faulty = True
        self.faults = 0
        self._outside = copy_context()
        """the context of no process"""
        self.bugs: list[BaseException] = []
        """exceptions that ended a program unexpectedly"""
        self.asleep: set[str] = set()
        """processes whose engine slept beyond a timer of its machine"""
        self.loop = self._open_loop()

    def pushed(self, client: str, session: object, frame: bytes) -> None:
        """Called when a hub sends a frame to a client."""

    def views(self) -> dict[str, dict[str, list[SeenMessage]]]:
        """Return the chat lines that each person was shown, by conversation."""
        return {}

    def _open_loop(self) -> VirtualLoop:
        return VirtualLoop()

    def run(self) -> None:
        """Run the world to its end."""
        self.loop.call_later(CHECK_SECONDS, self._check_timers)
        self.loop.play(self._run())

    def _check_timers(self) -> None:
        """Find engines that sleep beyond a timer of their machine, which is a bug even if nothing came of
        it."""
        for node in self.nodes.values():
            engine = getattr(node, "engine", None)
            if node.alive and node.ready and engine is not None and engine.sleeps_past_a_timer:
                self.asleep.add(node.name)
        self.loop.call_later(CHECK_SECONDS, self._check_timers)

    # ── called by the processes ──────────────────────────────────────────────────────────────────

    def fault(self, node: SimProcess, moment: str) -> str:
        """Draw a fault of a commit: 'crash', 'fail' or ''."""
        if not self.faulty:
            return ""
        draw = self.rng.random()
        if draw < self.plan.crash:
            return "crash"
        if draw > 1 - self.plan.faulty_disk:
            self.faults += 1
            self.log.note(node.name, f"disk fails {moment} a commit")
            return "fail"
        return ""

    def crashed(self, node: SimProcess) -> None:
        """Start a process again after a while."""
        self.faults += 1
        delay = 0.05 + self.rng.random() * 5
        # The process's next life does not belong to the task in which it died, and does not end with it.
        asyncio.get_running_loop().call_later(delay, self._revive, node, context=self._outside)

    def committed(self, node: SimProcess, disk: Disk, write: w.Write, result: w.Result) -> None:
        """Note a write that was committed."""
        self.log.commits.append((node.name, write, result))
        if isinstance(write, w.AppendEntry) and write.stream == "effects":
            self.log.note(node.name, "EFFECT committed", write.key)
        if isinstance(write, w.Advance) and isinstance(result, w.Advanced) and result.moved:
            self.log.note(node.name, f"commits {write.to.word}", write.key)

    def _revive(self, node: SimProcess) -> None:
        if not node.alive and node.name not in self.gone:
            self._spawn(self._start(node))

    async def _start(self, node: SimProcess) -> None:
        try:
            await node.start()
        except LedgerError:
            node.crash()  # the process cannot use its disk: it is started again

    def _spawn(self, program: Coroutine[object, None, None]) -> None:
        task = self.loop.create_task(program)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            self.bugs.append(problem)

    def hub_for(self, client: str, tries: int) -> SimProcess:
        """Return the hub to which a client connects after this many lost connections."""
        return self.nodes["hub"]

    def accepting(self, app: str) -> None:
        """Called before an app is told that a hub has stored its command; a world may use the moment."""

    def is_cut_off(self, client: str) -> bool:
        """Return whether the link between a client and the hub is cut."""
        return ("hub", client) in self.network.cut

    def _deliver(self, source: str, target: str, packet: SimPacket) -> None:
        if target in self.nodes:
            self.nodes[target].arrive(source, packet)

    # ── the course of events ─────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        plan, rng = self.plan, self.rng

        def skew() -> int:
            return round((rng.random() * 2 - 1) * plan.skew * SECOND)

        senders = [self.sender(self, f"app{i}", skew()) for i in range(plan.senders)]
        receivers = [self.receiver(self, f"dev{i}", skew()) for i in range(plan.receivers)]
        hubs = self._hubs()
        for node in (*hubs, *receivers, *senders):
            self.nodes[node.name] = node
            self.epochs[node.name] = 0
            self._spawn(self._start(node))
        self._schedule_faults(senders, receivers, hubs)
        for sender in senders:
            self._spawn(self._use(sender, receivers))
        await asyncio.sleep(CALM)
        self._calm()
        await asyncio.sleep(SETTLED - CALM)
        self.log.note("world", "should have settled")
        self.settled_promises = {name: dict(promised) for name, promised in self.log.promised.items()}
        for node in self.nodes.values():
            node.examine()
        self.settled_disks = {name: _snapshot(node.disk) for name, node in self.nodes.items()}
        await asyncio.sleep(WRONG - SETTLED)
        await self._wrong_for_a_while(hubs if plan.skew else [])
        await asyncio.sleep(BEYOND - WRONG - WRONG_FOR)
        if plan.steps:
            for node in self.nodes.values():
                self._set_clock(node, -round((BEYOND - CALM) * SECOND))
        self._replay(len(self.network.captured) if plan.replays else 0)
        await asyncio.sleep(END - BEYOND)
        for node in self.nodes.values():
            node.examine()

    async def _use(self, sender: SimProcess, receivers: list[SimProcess]) -> None:
        rng, plan = self.rng, self.plan
        # All senders begin at the same moment: with clocks that agree, their first ids are the same.
        await asyncio.sleep(0.5)
        for i in range(plan.messages):
            # In bursts, so that messages can overtake each other; some within the same millisecond.
            burst = rng.choice([0, 0.02])
            if i:
                await asyncio.sleep(burst if rng.random() < 0.6 else rng.random() * 2 * BUSY / plan.messages)
            recipient = rng.choice(receivers).name
            kind = rng.choice(self.kinds)
            order = draw_order(rng.random())
            lasts = round(rng.uniform(5, 60) * SECOND) if rng.random() < 0.2 and plan.drop else 0
            if sender.alive and sender.ready:
                sender.spawn(sender.submit(recipient, kind, order, lasts))

    def _hubs(self) -> list[SimProcess]:
        return [self.hub(self, "hub", 0)]

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        rng, plan, later = self.rng, self.plan, self.loop.call_later
        others = [*senders, *receivers]
        for _ in range(plan.cuts):
            other, begin = rng.choice(others).name, rng.random() * BUSY
            later(begin, self.network.sever, "hub", other)
            later(begin + rng.random() * 10, self.network.mend, "hub", other)
        for _ in range(plan.steps):
            node = rng.choice([*others, *hubs])
            by = round(rng.uniform(-15, 15) * SECOND)
            later(rng.random() * BUSY, self._set_clock, node, by)
        for _ in range(plan.conflicts):
            later(rng.random() * BUSY, self._lie)
        for _ in range(plan.replays):
            later(rng.random() * CALM, self._replay, 1)
        for _ in range(plan.reinstalls):
            later(rng.random() * BUSY, self._reinstall, rng.choice(senders))

    def _calm(self) -> None:
        self.log.note("world", "calms down")
        self.faulty = False
        self.network.heal()
        for node in self.nodes.values():
            self._revive(node)

    def _set_clock(self, node: SimProcess, by: int) -> None:
        self.faults += 1
        self.log.note(node.name, f"clock is set by {by / SECOND:+.1f} s")
        node.clock.step(by)

    async def _wrong_for_a_while(self, hubs: list[SimProcess]) -> None:
        """Set the clocks of hubs to another day, and back after half a minute, in which ids are forgotten."""
        for hub in hubs:
            self._set_clock(hub, WRONG_BY)
        await asyncio.sleep(WRONG_FOR)
        for hub in hubs:
            self._set_clock(hub, -WRONG_BY)

    def _replay(self, count: int) -> None:
        """Send recorded frames again."""
        captured = self.network.captured
        chosen = captured if count >= len(captured) else self.rng.sample(captured, count)
        for source, target, packet in list(chosen):
            self.faults += 1
            self._deliver(source, target, packet)

    def _lie(self) -> None:
        """Send other content under an id that the hub knows, with the credentials of its sender."""
        known = list(self.log.promised.get("hub", {}).values())
        if known:
            self.faults += 1
            message = msgspec.structs.replace(self.rng.choice(known), body=b"forged")
            self.log.note("liar", "sends other content under a known id", message.key)
            self._deliver("liar", "hub", SimCommand(message))

    def _reinstall(self, sender: SimProcess) -> None:
        """Remove and install an app again: it loses its memory and keeps its name."""
        if not sender.alive:
            return
        self.log.note(sender.name, "is reinstalled and counts anew")
        sender.crash()
        sender.examine()
        self.log.abandoned |= self.log.wanted.keys() & sender.disk.messages.keys()
        self.log.reinstalled[sender.name] = asyncio.get_running_loop().time()
        sender.erase()
        self.epochs[sender.name] += 1


def _snapshot(disk: Disk) -> Disk:
    copy = Disk()
    copy.messages = dict(disk.messages)
    copy.deliveries = dict(disk.deliveries)
    copy.streams = {name: list(entries) for name, entries in disk.streams.items()}
    copy.refusals = list(disk.refusals)
    return copy
