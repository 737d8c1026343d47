"""Worlds of nodes: the production `duly.Node` with a broker that forgets.

There is no hub. The same checkers judge senders and receivers: a receiver has promised what it
acknowledged on the wire, and a sender has learned what its task returned.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from duly.clients.node.node import Node as FdNode
from duly.clients.node.tasks import SentTask, Task
from duly.core.ids import SeqId
from duly.core.lifecycle import State
from duly.core.messages import Answer, Message, Order, key_of
from duly.core.operations import PutNewItem
from duly.core.retry import RetryPolicy
from duly.core.units import SECOND
from duly.errors import DulyError, Expired, SenderError, Stopped, TaskFailed, Unknown
from duly.storage.ledger import Ledger
from duly.testing.loops import VirtualLoop
from duly.testing.sim.broker import SimBroker, WiredLoop, version_of
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.world import BUSY, World
from duly.wire import fd
from duly.wire.fd import FdKind

ONCE, AGAIN = "open", "light"
"""Kinds of tasks: opening must happen at most once, lighting may be repeated."""

LASTS: Final = 3_600.0
RESEND: Final = RetryPolicy.exponential(3 * SECOND, 30 * SECOND)
WANTED: Final = b'"wanted"'

own_tasks: ContextVar[dict[asyncio.Task[object], None] | None] = ContextVar("duly_sim_process", default=None)
"""The tasks of the running process: they die with it."""


class _SimNode(FdNode):
    def __init__(self, node: SimPeer) -> None:
        version = version_of(node.world.plan, node.name)
        super().__init__(
            f"mqtt://{node.name}@{node.name}?version={version}",
            store="simulated",
            serve=node.serves,
            resend=RESEND,
        )
        self.node = node

    async def _open_ledger(self, serve: bool) -> Ledger:
        return self.node.ledger


def end_node(node: FdNode) -> None:
    """End a node as the death of its process does."""
    node.tasks.kill()
    if hasattr(node, "_mailbox"):
        node._mailbox._cancel_timers()
        node._mailbox.link._tasks.kill()


class SimPeer(SimProcess):
    """A process with a node."""

    serves = False
    world: NodesWorld

    async def begin(self) -> None:
        """Start the node, and connect it to the simulated broker."""
        self.own: dict[asyncio.Task[object], None] = {}
        own_tasks.set(self.own)
        self.peer = peer = _SimNode(self)
        await self.ledger.write(PutNewItem("node", "id", self.name.encode().hex().encode()))
        self.prepare(peer)
        await peer.start()
        if self.peer is peer:
            half = peer._incoming if self.serves else peer._outgoing
            self.engine = half.engine
            peer._outgoing._random = self.world.rng.randbytes(10 * 256)
            await self.resumed(peer)

    def prepare(self, peer: _SimNode) -> None:
        """Called before the node starts."""

    async def resumed(self, peer: _SimNode) -> None:
        """Called after the node has started or restarted."""

    def die(self) -> None:
        """End the node and its connection to the broker at once."""
        peer = getattr(self, "peer", None)
        if peer is not None:
            end_node(peer)
        for task in list(self.own):
            task.cancel()
        self.world.broker.hang_up(self.name)


class AskingPeer(SimPeer):
    """A node that sends tasks."""

    async def submit(self, recipient: str, kind: str, order: Order | None, lasts: int) -> None:
        """Begin a task, and wait for its end."""
        until = self.clock.now() + lasts if lasts else 0
        try:
            sent = self.peer._outgoing.begin(recipient, kind, "wanted", lasts / SECOND if lasts else LASTS)
        except Stopped:
            return
        message = Message(self.name, sent.id, kind, recipient, WANTED, expires=until)
        self.world.log.submitted(self, message, SeqId(0, len(self.world.log.wanted)))
        self.spawn(self._watch(sent))

    async def resumed(self, peer: _SimNode) -> None:
        """Wait again for every task that had not ended before the crash."""
        for record in list(self.disk.messages.values()):
            if not record.state.terminal:
                self.spawn(self._watch(await peer.find(record.message.id)))

    async def _watch(self, sent: SentTask) -> None:
        """Note how a task ended, and again if a late result settles it."""
        state, told = State.UNKNOWN, None
        while state is State.UNKNOWN:
            if sent.result is told:
                await asyncio.sleep(5)
                continue
            told = sent.result
            try:
                answer = Answer(0, msgspec.json.encode(await told))
                state = State.DONE
            except (Expired, Unknown, TaskFailed) as problem:
                state = _state_of(problem)
                answer = Answer(1, b"", str(problem))
            except DulyError:
                return
            self.world.log.outcome(self.name, key_of(self.name, sent.id), state, answer)


def _state_of(problem: Expired | Unknown | TaskFailed) -> State:
    match problem:
        case Expired():
            return State.EXPIRED
        case Unknown():
            return State.UNKNOWN
        case TaskFailed():
            return State[problem.state.upper()]


class DoingPeer(SimPeer):
    """A node that runs tasks."""

    serves = True

    def prepare(self, peer: _SimNode) -> None:
        """Register one handler for each kind of effect."""
        peer.task(ONCE, effect="at_most_once")(self._handle)
        peer.task(AGAIN, effect="at_least_once")(self._handle)

    async def _handle(self, task: Task) -> object:
        world, draw = self.world, self.world.rng.random
        await asyncio.sleep(draw() * 0.1)
        if world.faulty and draw() < world.plan.failing:
            raise TaskFailed("busy")
        want = world.log.wanted[key_of(task.sender, task.id)].message
        forged = task.payload != "wanted"
        world.log.effect(
            self, msgspec.structs.replace(want, body=b"forged") if forged else want, task.attempt
        )
        await asyncio.sleep(draw() * 0.1)
        return "wanted"


class NodesWorld(World):
    """A world of nodes and a broker, without a hub."""

    sender: type[SimProcess] = AskingPeer
    receiver: type[SimProcess] = DoingPeer
    kinds = (ONCE, AGAIN)
    at_most_once = frozenset({ONCE})

    def _open_loop(self) -> VirtualLoop:
        self.broker = SimBroker(self, self.heard)
        loop = WiredLoop(self.broker.accept)
        loop.set_task_factory(owned_task)
        return loop

    def _hubs(self) -> list[SimProcess]:
        return []

    def _schedule_faults(
        self, senders: list[SimProcess], receivers: list[SimProcess], hubs: list[SimProcess]
    ) -> None:
        super()._schedule_faults(senders, receivers, hubs)
        for _ in range(self.plan.cuts):
            self.loop.call_later(self.rng.random() * BUSY, self.broker.die)

    def heard(self, topic: str, payload: bytes) -> None:
        """Called for every published message: an `ack` is a promise."""
        sender, kind = fd.parse_topic(fd.PREFIX, topic)
        if kind is not FdKind.ACK:
            return
        try:
            key = key_of(sender, fd.decode_ack(payload).msg_id)
        except SenderError:
            return
        want = self.log.wanted.get(key)
        if want is not None:
            self.log.promised.setdefault(want.message.recipient, {})[key] = want.message
            self.log.note(want.message.recipient, "says ack", key)

    def _replay(self, count: int) -> None:
        """Publish recorded tasks again."""
        tasks = [publish for publish in self.broker.recorded if publish.topic.endswith("/pending")]
        for publish in tasks if count >= len(tasks) else self.rng.sample(tasks, count):
            self.faults += 1
            self.broker.publish(publish.topic, publish.payload)

    def _lie(self) -> None:
        """Publish other content under an id that its receiver knows."""
        known = [message for promised in self.log.promised.values() for message in promised.values()]
        if known:
            self.faults += 1
            message = self.rng.choice(known)
            content = fd.content_of("forged", fd.Form.BASE64)
            until = self.nodes[message.recipient].clock.now() + 60 * SECOND
            task = fd.FdPending(
                message.scope, message.recipient, message.id, message.kind, exp=until, payload=content
            )
            self.log.note("liar", "sends other content under a known id", message.key)
            self.broker.publish(fd.topic_of(fd.PREFIX, message.recipient, FdKind.PENDING), fd.encode(task))


def owned_task(loop: asyncio.AbstractEventLoop, program: Any, **more: Any) -> asyncio.Task[Any]:
    """Make a task that belongs to the process that started it."""
    task: asyncio.Task[Any] = asyncio.Task(program, loop=loop, **more)
    mine = own_tasks.get()
    if mine is not None:
        mine[task] = None
        task.add_done_callback(lambda over: mine.pop(over, None))
    return task
