"""Results as JSON: of each step in `proof/out`, and what is published of them in `proof/results.json`.

A step that was run at this commit is not run again: so a proof that was stopped goes on where it was.

The laws of what is published. Runs of several commits are added up, each with its commit: hours of proof are
run in pieces. A step draws its cases from seeds of its own, so a step is published once; what is run anew
takes the place of what was run before. A run names a commit that a reader can check out, or says that
it cannot be found any more.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from proof.parts import Part, Step, parts

ROOT: Final = Path(__file__).resolve().parent.parent
OUT: Final = ROOT / "proof" / "out"
RECORD: Final = ROOT / "proof" / "results.json"


class StepResult(Struct, frozen=True):
    """What one command came to."""

    commit: str
    date: str
    seconds: float
    counts: dict[str, int]


class PublishedRun(Struct, frozen=True, omit_defaults=True):
    """What steps of a part came to at one commit: one step, or several that were counted together."""

    part: str
    steps: list[str]
    commit: str
    date: str
    machine: str
    seconds: int
    counts: dict[str, int]
    command: str
    """what repeats it"""
    short: bool = False
    """it was a step of the short proof"""
    unreachable: bool = False
    """the commit is no longer in the history of the repository"""


class PartResult(Struct, frozen=True):
    """What the published runs of a part came to, added up."""

    part: str
    runs: list[PublishedRun]
    of: int
    """the steps that the part has: it may have been stopped"""

    @property
    def counts(self) -> dict[str, int]:
        """What was counted in all runs."""
        found: Counter[str] = Counter()
        for run in self.runs:
            found.update(run.counts)
        return dict(found)

    @property
    def command(self) -> str:
        """The command that runs the part."""
        short = "SHORT=1 " if all(run.short for run in self.runs) else ""
        return f"make proof {short}PROOF='--only {self.part}'"

    @property
    def seconds(self) -> int:
        """How long all runs took."""
        return sum(run.seconds for run in self.runs)

    @property
    def steps(self) -> int:
        """How many steps were run."""
        return sum(len(run.steps) for run in self.runs)


def commit() -> str:
    """Return the commit of the working tree; with a plus if the tree has other changes."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "tests", "proof/*.py")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def is_reachable(commit: str) -> bool:
    """Return whether a commit is in the history of the working tree."""
    asked = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).returncode == 0


def now() -> str:
    """Return the date and time, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")


def machine() -> str:
    """Return what this machine is."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {system}"


def path_of(size: str, part: str, step: str) -> Path:
    """Return where the result of a step is kept."""
    return OUT / size / f"{part}-{''.join(c if c.isalnum() else '-' for c in step)}.json"


def kept(path: Path, at: str | None) -> StepResult | None:
    """Return the result of a step, if it was run at this commit, and the tree was that commit; None: at any
    commit."""
    if not path.exists():
        return None
    found = msgspec.json.decode(path.read_bytes(), type=StepResult)
    clean = found.commit and not found.commit.endswith("+")
    return found if clean and at in (None, found.commit) else None


def keep(path: Path, result: StepResult) -> None:
    """Keep the result of a step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(result))


def run_of(part: Part, step: Step, result: StepResult, size: str) -> PublishedRun:
    """Return what is published of a step."""
    counts = {what: result.counts[what] for what in part.counts if what in result.counts}
    seconds, short = round(result.seconds), size == "short"
    return PublishedRun(
        part.name, [step.name], result.commit, result.date, machine(), seconds, counts, step.line, short
    )


def published() -> list[PublishedRun]:
    """Return the published runs."""
    return msgspec.json.decode(RECORD.read_bytes(), type=list[PublishedRun]) if RECORD.exists() else []


def merged(part: Part, before: Iterable[PublishedRun], new: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Return the runs of a part after new ones: a run that shares a step with a new one is dropped whole, and
    where a part does not add up every run is."""
    before, new = list(before), list(new)
    again = {step for run in new for step in run.steps}
    kept = [run for run in before if not new or (part.adds and again.isdisjoint(run.steps))]
    return [*kept, *new]


def summed(part: Part, runs: Iterable[PublishedRun]) -> PartResult:
    """Add the runs of a part up."""
    runs = list(runs)
    names = {step.name for step in part.steps} | {step for run in runs for step in run.steps}
    return PartResult(part.name, runs, len(names) if part.adds else 1)


def results(runs: Iterable[PublishedRun] | None = None) -> dict[str, PartResult]:
    """Return what the published runs of each part came to."""
    runs = published() if runs is None else list(runs)
    found = {
        part.name: [run for run in runs if run.part == part.name and set(part.counts) & run.counts.keys()]
        for part in parts(short=False)
    }
    return {part.name: summed(part, found[part.name]) for part in parts(short=False) if found[part.name]}


def publish(every: Iterable[Part], runs: Iterable[PublishedRun]) -> None:
    """Publish these runs, and keep the others."""
    runs, before = list(runs), published()
    together = [
        run
        for part in every
        for run in merged(
            part,
            (run for run in before if run.part == part.name),
            (run for run in runs if run.part == part.name),
        )
    ]
    gone = {at for at in {run.commit for run in together} if not is_reachable(at)}
    lines = [msgspec.json.encode(replace(run, unreachable=run.commit in gone)) for run in together]
    RECORD.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")
