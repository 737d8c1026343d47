"""One run of a test's programs: faults for a while, then calm in which everything must settle.

The hub, the broker, the disks and the loop are those of duly's own simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextvars import Context
from typing import Final

import msgspec

from duly.apps.alerts.profiles import PROFILES, Profile
from duly.apps.alerts.service import AlertService
from duly.apps.gateway.policy import GatewayPolicy
from duly.core.units import SECOND
from duly.errors import ProgramError
from duly.identity.accounts import Principal, Role
from duly.runtime.activity_log import ActivityLog
from duly.server.router import Router
from duly.testing.loops import NO_SOCKETS, VirtualLoop
from duly.testing.programs.faults import Faults
from duly.testing.programs.history import History
from duly.testing.programs.process import Program, ProgramProcess
from duly.testing.sim.broker import SimBroker, WiredLoop
from duly.testing.sim.gateway import GatewayHub, OpenAccounts, SeenGateway
from duly.testing.sim.nodes import SimProcess
from duly.testing.sim.peers import owned_task
from duly.testing.sim.world import World

BUSY: Final = 30.0
"""Seconds of virtual time in which faults happen."""
END: Final = 120.0
PROMPT: Final = 0.02
"""The most seconds that a packet takes without a fault."""
ROUNDS: Final = 50
"""How often the remaining programs are cancelled at the end."""
SHOWN: Final = 100
"""The most characters of a packet in a trace."""


class ProgramAccounts(OpenAccounts):
    """Every process of the run may command every other one."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = roles

    def _of(self, role: Role) -> frozenset[str]:
        return frozenset(name for name, its in self._roles.items() if its is role)

    def granted(self, app: str) -> frozenset[str]:
        """Return all devices: every app may command every device."""
        return self._of(Role.DEVICE)

    def apps_of(self, device: str) -> frozenset[str]:
        """Return all apps: every app may command every device."""
        return self._of(Role.APP)

    def stored_role(self, name: str) -> Role | None:
        """Return the role that the program gave the account."""
        return self._roles.get(name)


class ProgramHub(GatewayHub):
    """A hub with the production gateway and alerts."""

    world: ProgramWorld

    async def begin(self) -> None:
        """Start the hub on its disk."""
        self.wires = []
        self.greeting = {}
        self.recorded = []
        activity = ActivityLog(self.ledger)
        self.disk.buckets.setdefault(PROFILES, {}).setdefault("default", msgspec.json.encode(Profile()))
        self.accounts = ProgramAccounts(self.world.roles)
        self.gateway = SeenGateway(self.ledger, self.accounts, activity, GatewayPolicy())
        self.gateway.node = self
        self.alerts = AlertService(self.ledger, activity)
        self.router = Router(activity, [self.gateway, self.alerts])
        self.engine = self.gateway.engine
        await self.gateway.start()
        await self.alerts.start()

    def die(self) -> None:
        """End both applications."""
        if hasattr(self, "alerts"):
            self.alerts.engine.kill()
            self.alerts.tasks.kill()
        super().die()

    def spawn(self, program: Coroutine[object, None, None]) -> None:
        """Run a task of the hub; it does not die with the process whose frame began it."""
        Context().run(super().spawn, program)

    def principal(self, name: str) -> Principal:
        """Return the client with the role that its program gave it."""
        return Principal(name, self.world.roles.get(name, Role.APP))


class ProgramWorld(World):
    """A world of a test's own programs."""

    def __init__(self, faults: Faults, programs: Mapping[str, Program]) -> None:
        self.chosen = faults
        self._faulty = True
        super().__init__(faults.plan())
        self._programs = programs
        self.history = History()
        self.roles: dict[str, Role] = {}
        self.moments = 0
        """how many moments around commits there were"""

    @property
    def faulty(self) -> bool:
        """Whether faults may happen now."""
        most = self.chosen.most
        return self._faulty and (most is None or self.faults < most)

    @faulty.setter
    def faulty(self, on: bool) -> None:
        """Start or end the faults."""
        self._faulty = on

    def _open_loop(self) -> VirtualLoop:
        self.broker = SimBroker(self, lambda topic, payload: None)
        loop = WiredLoop(self._accept)
        loop.set_task_factory(owned_task)
        return loop

    def _accept(self, protocol: asyncio.Protocol, host: str) -> asyncio.Transport:
        """Connect a node of one of the programs to the broker; no other host can be reached."""
        if host not in self._programs:
            raise ProgramError(NO_SOCKETS)
        return self.broker.accept(protocol, host)

    async def _run(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        for name, program in self._programs.items():
            skew = round((self.rng.random() * 2 - 1) * self.plan.skew * SECOND)
            self._add(ProgramProcess(self, name, skew, program))
        for _ in range(self.plan.cuts):
            name, begin = self.rng.choice(list(self._programs)), self.rng.random() * BUSY
            self.loop.call_later(begin, self._cut_off, name, self.rng.random() * 10)
        await asyncio.sleep(BUSY)
        self._calm()
        await asyncio.sleep(END - BUSY)
        await self._end()

    async def _end(self) -> None:
        """End every process, and everything that its program has started."""
        # What happens while they end is neither a bug nor part of the trace.
        seen, lines, faults = list(self.bugs), list(self.log.lines), self.faults
        self.gone |= set(self.nodes)
        for node in self.nodes.values():
            node.crash()
        for _ in range(ROUNDS):
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.sleep(0.01)
        self.bugs, self.log.lines, self.faults = seen, lines, faults

    def _add(self, process: SimProcess) -> None:
        self.nodes[process.name] = process
        self.epochs[process.name] = 0
        self._spawn(self._start(process))

    def connect(self, name: str, role: Role) -> None:
        """Note the role of a process at the hub; the first one starts the hub."""
        self.roles[name] = role
        if "hub" not in self.nodes:
            Context().run(self._add, ProgramHub(self, "hub", 0))

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def fault(self, node: SimProcess, moment: str) -> str:
        """Draw whether a commit fails or crashes its process."""
        self.moments += 1
        if self.moments == self.chosen.crash_at:
            self.log.note(node.name, f"crash {moment} commit {self.moments}")
            return "crash"
        return super().fault(node, moment)

    def _cut_off(self, name: str, lasts: float) -> None:
        """Cut a process off from all others."""
        if not self.faulty:
            return
        self.faults += 1
        self.log.note(name, f"is cut off for {lasts:.1f} s")
        others = ["hub", *self._programs]
        for other in others:
            self.network.sever(other, name)
            self.loop.call_later(lasts, self.network.mend, other, name)

    def carry(self, source: str, target: str, packet: tuple[str, int, object]) -> None:
        """Carry a packet from one process to another; it may be lost, repeated or delayed."""
        if target not in self._programs:
            known = ", ".join(self._programs)
            raise ProgramError(f"there is no process {target!r}; the processes of this run are {known}")
        kind, _, payload = packet
        text = f"→ {target}: {kind} {payload!r}"[:SHOWN]
        if (source, target) in self.network.cut:
            self.log.note(source, f"{text} (cut off)")
            return
        rng, plan = self.rng, self.plan
        if self.faulty and rng.random() < plan.drop:
            self.faults += 1
            self.log.note(source, f"{text} (LOST)")
            return
        fate = self._deliver_later(source, target, packet)
        if self.faulty and rng.random() < plan.repeat:
            self.faults += 1
            fate += ", REPEATED" + self._deliver_later(source, target, packet)
        self.log.note(source, text + fate)

    def _deliver_later(self, source: str, target: str, packet: tuple[str, int, object]) -> str:
        """Deliver a packet after a while; return what the trace says about it."""
        wait = 0.001 + self.rng.random() * (self.plan.slow if self.faulty else PROMPT)
        late = wait > PROMPT + 0.001
        self.faults += late
        self.loop.call_later(wait, self._hand_over, source, target, packet)
        return f" ({wait:.1f} s LATE)" if late else ""

    def _hand_over(self, source: str, target: str, packet: tuple[str, int, object]) -> None:
        process = self.nodes[target]
        if isinstance(process, ProgramProcess) and process.alive and process.ready:
            process.process.take_in(source, packet)
