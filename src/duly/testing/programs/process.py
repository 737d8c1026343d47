"""The process in which a test's program runs: its transport, its memory, and the production clients.

The laws. A process dies with all of its tasks, and is started again from its memory: its program is called
again. Actions of a dead process have no effect. A program that returns has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from copy import deepcopy
from inspect import isawaitable
from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Final, Never, TypeAlias, TypeVar

from duly.clients.app import App
from duly.clients.device import Device
from duly.clients.node.node import Node
from duly.clients.sentinel import Sentinel
from duly.core.units import SECOND
from duly.errors import ProgramError
from duly.identity.accounts import Role
from duly.storage.ledger import Ledger
from duly.testing.programs import clients
from duly.testing.programs.history import ObservedEvent
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.peers import own_tasks

if TYPE_CHECKING:
    from duly.testing.programs.world import ProgramWorld

C = TypeVar("C", bound=App | Device | Sentinel | Node)
Handler: TypeAlias = Callable[[Any], object]
"""Answers the calls of other processes: an async function, or a plain one."""
Program: TypeAlias = Callable[["Process"], Awaitable[object]]
"""A program that a test runs in a process: an async function that gets the process."""


HERE: Final = Path(__file__).parents[2]


def with_place(problem: BaseException) -> str:
    """Return what an exception says, and where in a program of the test it was raised.

    >>> with_place(ValueError("no paper"))
    "ValueError('no paper')"
    """
    own = [frame for frame in extract_tb(problem.__traceback__) if HERE not in Path(frame.filename).parents]
    if not own:
        return repr(problem)
    return f"{problem!r} in line {own[-1].lineno} of {Path(own[-1].filename).name}"


class CallFailed(Exception):
    """Raised when the handler of a called process raised."""


class Process:
    """One life of a process, as its program sees it."""

    def __init__(self, host: ProgramProcess) -> None:
        self._host = host
        self.name = host.name
        self.life = host.incarnation
        """how often the process has been started"""
        self.random = Random(f"{host.name} {host.incarnation} {host.world.plan.seed}")
        """random numbers that are the same when the run is replayed"""
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._inbox: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self._handler: Handler | None = None
        self._unserved: list[tuple[str, int, object]] = []

    # ── what the observer is told ────────────────────────────────────────────────────────────────

    def effect(self, name: str, key: str = "", *, lane: str = "", n: int | None = None) -> None:
        """Report that something has happened in the world outside: a card was charged, a door opened."""
        self._report("effect", name, key, lane, n)

    def wants(self, key: str) -> None:
        """Report that this process wants something to happen, so that it must get an outcome."""
        self._report("wants", "", key)

    def told(self, key: str, outcome: object = "done") -> None:
        """Report that this process has learned the outcome of `key`."""
        self._report("told", "", key, value=outcome)

    def note(self, sentence: str) -> None:
        """Add a line to the trace."""
        if self._alive:
            self._host.world.log.note(self.name, sentence)

    def _report(
        self, what: str, name: str, key: str, lane: str = "", n: int | None = None, value: object = None
    ) -> None:
        if not self._alive:
            raise asyncio.CancelledError
        world = self._host.world
        world.history.events.append(
            ObservedEvent(world.loop.time(), self.name, self.life, what, name, key, lane, n, value)
        )
        words = [what.upper() if what == "effect" else what, name, key, lane, "" if n is None else f"#{n}"]
        said = [repr(value)] if what == "told" else []
        world.log.note(self.name, " ".join([*filter(None, words), *said]))

    @property
    def _alive(self) -> bool:
        return self._host.alive and self._host.incarnation == self.life

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """Return the time by this process's own clock, in seconds since 1970; clocks may differ."""
        return self._host.clock.now() / SECOND

    # ── a transport for code that does not use duly ──────────────────────────────────────────────

    def send(self, to: str, payload: object) -> None:
        """Send a message to another process: it may be lost, repeated, late, or come after a later one."""
        self._transmit(to, ("message", 0, payload))

    async def receive(self) -> tuple[str, object]:
        """Wait for the next message; returns who sent it, and what."""
        return await self._inbox.get()

    async def call(self, to: str, payload: object, timeout: float = 1.0) -> Any:
        """Call another process, and return its answer. Raises `TimeoutError` if no answer arrives in time:
        the call or the answer was lost or is late. Raises `CallFailed` if its handler raised."""
        number = self._host.number()
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._transmit(to, ("question", number, payload))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        finally:
            del self._calls[number]

    async def serve(self, handler: Handler) -> Never:
        """Answer calls of other processes with what `handler` returns, for ever; many at the same time."""
        self._handler = handler
        for question in self._unserved:
            self._host.spawn(self._answer(*question))
        self._unserved.clear()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it waits for ever")

    def _transmit(self, to: str, packet: tuple[str, int, object]) -> None:
        if not self._alive:
            raise asyncio.CancelledError
        self._host.world.carry(self.name, to, packet)

    def take_in(self, source: str, packet: tuple[str, int, object]) -> None:
        """Receive a packet of the network."""
        kind, number, payload = packet
        if kind == "message":
            self._inbox.put_nowait((source, deepcopy(payload)))
        elif kind == "question" and self._handler is None:
            self._unserved.append((source, number, payload))
        elif kind == "question":
            self._host.spawn(self._answer(source, number, payload))
        elif (waiting := self._calls.get(number)) is not None and not waiting.done():
            if kind == "answer":
                waiting.set_result(deepcopy(payload))
            else:
                waiting.set_exception(CallFailed(str(payload)))

    async def _answer(self, source: str, number: int, payload: object) -> None:
        assert self._handler is not None
        try:
            answer = self._handler(deepcopy(payload))
            if isawaitable(answer):
                answer = await answer
        except Exception as problem:
            self._transmit(source, ("failure", number, with_place(problem)))
        else:
            self._transmit(source, ("answer", number, answer))

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    async def save(self, key: str, value: object) -> None:
        """Store a value that survives a crash. The process may die just before it is stored, or just
        after."""
        await self._host.moment("before")
        self._host.saved[key] = deepcopy(value)
        await self._host.moment("after")

    def load(self, key: str, default: object = None) -> Any:
        """Return a value that was saved, by this life of the process or an earlier one."""
        return deepcopy(self._host.saved.get(key, default))

    async def point(self) -> None:
        """Mark a point at which the process may crash."""
        await self._host.moment("at a point,")

    @property
    def ledger(self) -> Ledger:
        """The ledger of this process, for `duly.once` and `duly.Consumer`. It survives crashes, and the
        process may die just before or just after every commit."""
        return self._host.ledger

    # ── clients ──────────────────────────────────────────────────────────────────────────────────

    def app(self) -> App:
        """Return a `duly.App` with the name of this process, connected to the simulated hub."""
        return self._host.adopt(clients.ProgramApp(self._host), Role.APP)

    def device(self) -> Device:
        """Return a `duly.Device` with the name of this process, connected to the simulated hub."""
        return self._host.adopt(clients.ProgramDevice(self._host), Role.DEVICE)

    def sentinel(self, profile: str = "default") -> Sentinel:
        """Return a `duly.Sentinel` with the name of this process, connected to the simulated hub."""
        return self._host.adopt(clients.ProgramSentinel(self._host, profile), Role.SENTINEL)

    def node(self, *, ordered: bool = False) -> Node:
        """Return a `duly.Node` with the name of this process, connected to a simulated MQTT broker."""
        return self._host.adopt(clients.ProgramNode(self._host, ordered=ordered), None)


class ProgramProcess(SimProcess):
    """The host of a test's program: it dies and restarts."""

    world: ProgramWorld

    def __init__(self, world: ProgramWorld, name: str, skew: int, program: Program) -> None:
        super().__init__(world, name, skew)
        self._program = program
        self.saved: dict[str, object] = {}
        self.finished = False
        self._numbers = 0
        self.own: dict[asyncio.Task[object], None] = {}
        self._client: App | Device | Sentinel | Node | None = None
        self._context = copy_context()

    async def begin(self) -> None:
        """Call the program anew."""
        self.own = {}
        own_tasks.set(self.own)
        self._context = copy_context()
        self._client = None
        self.process = Process(self)
        if not self.finished:
            self.spawn(self._run(self.process))

    def spawn(self, program: Coroutine[object, None, None]) -> None:
        """Run a task that ends with this process, also where a packet of another one began it."""
        self._context.run(super().spawn, program)

    async def _run(self, process: Process) -> None:
        await self._program(process)
        if process.life == self.incarnation and self.alive:
            self.finished = True
            self.world.log.note(self.name, "has finished")

    def die(self) -> None:
        """End everything that the program has begun."""
        if self._client is not None:
            clients.kill(self._client)
            self.world.broker.hang_up(self.name)
        for task in list(self.own):
            task.cancel()

    def adopt(self, client: C, role: Role | None) -> C:
        """Make this the client of the process, and start the hub if this is its first client."""
        if self._client is not None:
            raise ProgramError(f"the process {self.name} has a client already; a process is one client")
        self._client = client
        if role is not None:
            self.world.connect(self.name, role)
        return client

    def number(self) -> int:
        """Return a number for a call; it is not used again."""
        self._numbers += 1
        return self._numbers

    async def moment(self, what: str) -> None:
        """Die here, if the run has a crash here."""
        life = self.incarnation
        await asyncio.sleep(0.0005)
        if self.alive and self.incarnation == life and self.world.fault(self, what) == "crash":
            self.crash()
        if not self.alive or self.incarnation != life:
            raise asyncio.CancelledError
