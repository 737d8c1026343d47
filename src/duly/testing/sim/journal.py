"""Worlds whose processes keep their ledgers in SQLite files. The machines of the kernel run on the production
journal, row cache, tables and recovery, and on disks that lose what was not flushed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import TracebackType
from typing import Final

import apsw

from duly.errors import LedgerDamaged, LedgerError
from duly.testing.sim.checkers import CHECKERS, Finding
from duly.testing.sim.journal_ledger import (
    JournalLedger,
    UnsettledFlushes,
    accepts_torn_row,
    contents,
    left_in_journal,
)
from duly.testing.sim.nodes import SimHub, SimProcess, SimReceiver, SimSender
from duly.testing.sim.plan import SimPlan
from duly.testing.sim.sector_disk import SectorDisk
from duly.testing.sim.world import World

WRITES_A_FLUSH: Final = 6
"""The usual number of writes in a flush: each of them may be the last one before a crash."""
MEMORY: Final = Path("/dev/shm")
TORN: Final = 0.2
"""How often a start with a journal is first tried with a torn row."""


class JournalProcess(SimProcess):
    """A process whose ledger is a SQLite file."""

    world: JournalWorld

    def __init__(self, world: JournalWorld, name: str, skew: int) -> None:
        super().__init__(world, name, skew)
        self.files = SectorDisk(
            world.root / name, f"{world.plan.seed} {name}", lambda what: world.fault(self, what),
            self._die_soon,
        )  # fmt: skip
        self.doubt = UnsettledFlushes(partial(world.committed, self))
        self._loop = asyncio.get_running_loop()

    def _die_soon(self) -> None:
        self._loop.call_soon(self.crash)

    def open_ledger(self) -> JournalLedger:
        """Return a real SQLite ledger on simulated sectors that may fail at any write."""
        world = self.world
        return JournalLedger(
            self.clock, self.files, f"{self.name}#{self.incarnation}",
            fault=lambda moment: world.fault(self, moment), crash=self.crash,
            doubt=self.doubt,
        )  # fmt: skip

    async def begin(self) -> None:
        """Check what the crash left on the disk, open the ledger, and start the machine."""
        ledger = self.ledger
        assert isinstance(ledger, JournalLedger)
        if self.world.faulty and self.world.rng.random() < TORN:
            self.world.torn += accepts_torn_row(self.files, self.world.rng)
        found = self.doubt.find(self.files)
        self._note_what_is_missing()
        ledger.begin()
        # Only now it is flushed: a process that dies while it opens its ledger leaves the doubt to the next.
        if found is not None:
            self.doubt.found(found)
        await super().begin()

    def _note_what_is_missing(self) -> None:
        """Note the messages that this process has acknowledged as stored, and does not find."""
        found = contents(self.files).messages
        promised = self.world.log.promised.get(self.name, {})
        self.world.lost += [(self.name, key) for key in promised if key not in found]

    async def _prune(self) -> None:
        while True:
            with suppress(LedgerError):
                await super()._prune()

    def examine(self) -> None:
        """Read what the files hold, journal included, for the checkers."""
        self.left = 0
        try:
            self.disk = contents(self.files)
            self.left = left_in_journal(self.files)
        except apsw.Error as problem:  # the journal does not match the tables
            self.world.bugs.append(problem)

    def erase(self) -> None:
        """Delete the files as well."""
        super().erase()
        self.files.erase()


class JournalSender(JournalProcess, SimSender):
    """An app with a SQLite file."""


class JournalHub(JournalProcess, SimHub):
    """A hub with a SQLite file."""


class JournalReceiver(JournalProcess, SimReceiver):
    """A device with a SQLite file."""


class JournalWorld(World):
    """A world of the kernel, on disks that lose what was not flushed."""

    sender = JournalSender
    receiver = JournalReceiver
    hub = JournalHub

    def __init__(self, plan: SimPlan) -> None:
        super().__init__(plan)
        self.damaged: list[str] = []
        """processes that found their ledger damaged, though the disk had only lost power"""
        self.lost: list[tuple[str, bytes]] = []
        """messages that a process has acknowledged as stored, and did not find when it started again"""
        self.torn: int = 0
        """how often a torn row of the journal was taken for a sound one"""

    def run(self) -> None:
        """Run the world in a folder of its own, which is deleted at the end."""
        self.root = Path(mkdtemp(prefix="duly-sim-", dir=MEMORY if MEMORY.is_dir() else None))
        try:
            with _quiet_about_disks():
                super().run()
        finally:
            for node in self.nodes.values():
                node.ledger.dead = True
            rmtree(self.root)

    def fault(self, node: SimProcess, moment: str) -> str:
        """Draw whether the disk fails, or its process crashes, at this moment."""
        if not self.faulty:
            return ""
        draw, many = self.rng.random(), 1 if moment == "after" else WRITES_A_FLUSH
        if draw < self.plan.crash / many:
            return "crash"
        if moment != "after" and draw > 1 - self.plan.faulty_disk / many:
            self.faults += 1
            self.log.note(node.name, f"disk fails at a {moment}")
            return "fail"
        return ""

    async def _start(self, node: SimProcess) -> None:
        try:
            await node.start()
        except LedgerDamaged as problem:
            self.damaged.append(f"{node.name}: {problem}")
            node.crash()
        except LedgerError:
            node.crash()


@contextmanager
def _quiet_about_disks() -> Iterator[None]:
    """Hide disk errors that SQLite recovers from: apsw reports them as exceptions that cannot be raised."""
    shown, unraisable = sys.excepthook, sys.unraisablehook

    def show(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(problem, apsw.Error):
            shown(kind, problem, trace)

    def show_unraisable(found: sys.UnraisableHookArgs) -> None:
        if not isinstance(found.exc_value, apsw.Error):
            unraisable(found)

    sys.excepthook, sys.unraisablehook = show, show_unraisable
    try:
        yield
    finally:
        sys.excepthook, sys.unraisablehook = shown, unraisable


def stored_at_restart(world: JournalWorld) -> Iterator[Finding]:
    """[P1] What a process has acknowledged as stored is on its disk whenever it starts again."""
    for name, key in world.lost:
        if key in world.log.wanted:
            yield f"{name} said it was stored, and did not find it at its next start", key


def sound_disk(world: JournalWorld) -> Iterator[Finding]:
    """[P1] A disk that loses power is never taken for damaged: what was flushed is enough to go on."""
    for what in world.damaged:
        yield f"could not go on with what was flushed: {what}", b""


def torn_refused(world: JournalWorld) -> Iterator[Finding]:
    """A row of the journal that was changed on the disk is refused, and never applied."""
    if world.torn:
        yield f"{world.torn} torn rows of the journal were taken for sound", b""


def caught_up(world: World) -> Iterator[Finding]:
    """After the calm the tables hold everything that the journal held, and it is empty."""
    for name, node in world.nodes.items():
        assert isinstance(node, JournalProcess)
        if node.left:
            yield f"{node.left} rows of the journal of {name} are not in its tables", b""


JOURNAL_CHECKERS: Final = (*CHECKERS, stored_at_restart, sound_disk, torn_refused, caught_up)
