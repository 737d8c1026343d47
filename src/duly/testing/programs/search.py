"""Searches for a run in which a test's programs break a promise, and shrinks it.

The law: first a run without faults, then one crash at each moment around a commit, then runs with everything
drawn at random. A failure is shown with the fewest faults that still bring it about, and can be replayed by
its name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from duly.errors import Malformed, ProgramError
from duly.testing.loops import Livelock
from duly.testing.programs.faults import KINDS, Faults
from duly.testing.programs.history import CHECKERS, Checker
from duly.testing.programs.process import Program, with_place
from duly.testing.programs.world import ProgramWorld

RUNS: Final = 100
CRASHES: Final = 100
"""The most single crashes that are tried."""
LINES: Final = 60
"""The most lines of a trace that are shown."""
FEWEST: Final = 40
"""Up to this many faults are tried one by one, to find the fewest that fail."""


class PromiseBroken(AssertionError):
    """A run in which the programs broke a promise. `name` replays it."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class RunReport(Struct, frozen=True):
    """The result of one run."""

    faults: Faults
    happened: int
    """how many faults there were"""
    moments: int
    findings: tuple[str, ...]
    """each the name of its checker, and a sentence"""
    trace: tuple[str, ...]


def simulate(
    *,
    check: Checker | Sequence[Checker] = CHECKERS,
    runs: int = RUNS,
    without: Iterable[str] = (),
    replay: str = "",
    command: str = "",
    **programs: Program,
) -> int:
    """Run these programs, each in a process of its name, with all kinds of faults. Returns the number of
    runs; raises `PromiseBroken` if a checker finds something or a program raises.

    `without` leaves out kinds of faults: `drop`, `repeat`, `delay`, `cuts`, `crash`, `skew`. `replay` is the
    name of one run, as a failure prints it; `command` is what it prints to replay it.
    """
    __tracebackhide__ = True
    left_out = frozenset([without] if isinstance(without, str) else without)
    _check(programs, left_out, runs)
    check = _checkers(check)
    if replay:
        report = run_once(Faults.parse(replay), programs, check)
        if report.findings:
            raise _broken(report, 1, command)
        return 1
    calm = run_once(Faults(), programs, check)
    if calm.findings:
        raise _broken(calm, 1, command)
    crashes = 0 if "crash" in left_out else min(calm.moments, CRASHES)
    single = [Faults(crash_at=at) for at in range(1, crashes + 1)]
    drawn = [Faults(draw, left_out) for draw in range(1, runs + 1)]
    for done, faults in enumerate([*single, *drawn], 2):
        report = run_once(faults, programs, check)
        if report.findings:
            raise _broken(_shrink(report, programs, check), done, command)
    return 1 + len(single) + len(drawn)


def run_once(faults: Faults, programs: Mapping[str, Program], check: Sequence[Checker]) -> RunReport:
    """Run the programs once, and judge what was seen."""
    with _repeatable(faults.draw):
        world = ProgramWorld(faults, programs)
        try:
            world.run()
        except Livelock as stuck:
            world.bugs.append(stuck)
    findings = [f"a program ended by {with_place(bug)}" for bug in world.bugs]
    for checker in check:
        findings += [f"{checker.__name__}: {sentence}" for sentence in checker(world.history)]
    trace = tuple(f"{at:9.3f}  {who:<8}  {what}" for at, who, what, _ in world.log.lines)
    return RunReport(faults, world.faults, world.moments, tuple(findings), trace)


@contextmanager
def _repeatable(draw: int) -> Iterator[None]:
    """Seed `random`, so that programs get the same numbers in every replay."""
    before = random.getstate()
    random.seed(f"programs {draw}")
    try:
        yield
    finally:
        random.setstate(before)


def _shrink(report: RunReport, programs: Mapping[str, Program], check: Sequence[Checker]) -> RunReport:
    """Leave out what the failure does not need: kinds of faults first, then the later faults."""
    kind = _kind(report)

    def fails(faults: Faults) -> RunReport | None:
        found = run_once(faults, programs, check)
        return found if found.findings and _kind(found) == kind else None

    shrinking = True
    while shrinking:
        shrinking = False
        for milder in report.faults.milder():
            if (found := fails(milder)) is not None:
                report, shrinking = found, True
                break
    if report.faults.draw:
        for most in range(min(report.happened, FEWEST)):
            if (found := fails(replace(report.faults, most=most))) is not None:
                return found
    return report


def _kind(report: RunReport) -> str:
    return report.findings[0].partition(":")[0]


def _broken(report: RunReport, done: int, command: str) -> PromiseBroken:
    lines = list(report.trace)
    if len(lines) > LINES:
        lines = [*lines[: LINES // 2], f"   … {len(lines) - LINES} lines …", *lines[-LINES // 2 :]]
    many = "1 fault" if report.happened == 1 else f"{report.happened} faults"
    name = report.faults.name
    text = [
        "; ".join(report.findings),
        f"found in run {done}, which is shown with {many}:",
        "",
        *lines,
        "",
        f"replay it: {command.replace('NAME', name) or f'simulate(replay={name!r}, …)'}",
    ]
    return PromiseBroken("\n".join(text), name)


def _checkers(check: Checker | Sequence[Checker]) -> Sequence[Checker]:
    given = [check] if callable(check) else check
    if not all(callable(checker) for checker in given):
        raise ProgramError(f"check={check!r} is not a checker; pass functions: check=[testing.at_most_once]")
    return given


def _check(programs: Mapping[str, Program], without: frozenset[str], runs: int) -> None:
    if not programs:
        raise ProgramError("simulate() needs programs: simulate(shop=shop, till=till)")
    for name, program in programs.items():
        if not asyncio.iscoroutinefunction(program):
            raise ProgramError(
                f"{name}= is neither an option of simulate() (those are check, runs, without) nor a program, "
                "which is an async function of its process"
            )
    if "hub" in programs:
        raise ProgramError("a process cannot be called 'hub': that is the hub's name")
    if unknown := without - set(KINDS):
        raise Malformed(f"without={', '.join(sorted(unknown))} is not known; use {', '.join(KINDS)}")
    if runs < 0:
        raise Malformed("runs is the number of random runs, 0 or more")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ProgramError("simulate() has a loop of its own: call it from a plain test, not from an async one")
