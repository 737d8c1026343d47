"""Results as JSON: of each step in `proof/out`, and what is published of each part in `proof/results.json`.

A step that was run at this commit is not run again: so a proof that was stopped goes on where it was.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from proof.parts import Part

ROOT: Final = Path(__file__).resolve().parent.parent
OUT: Final = ROOT / "proof" / "out"
RECORD: Final = ROOT / "proof" / "results.json"


class StepResult(Struct, frozen=True):
    """What one command came to."""

    commit: str
    date: str
    seconds: float
    counts: dict[str, int]


class PartResult(Struct, frozen=True):
    """What a part came to."""

    part: str
    date: str
    commit: str
    machine: str
    seconds: int
    counts: dict[str, int]
    commands: list[str]
    """the whole part, and the last of its steps"""
    steps: int = 1
    of: int = 1
    """steps that were run, and that the part has: it may have been stopped"""


def commit() -> str:
    """Return the commit of the working tree; with a plus if the tree has other changes."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "tests", "proof/*.py")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


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


def kept(path: Path, at: str) -> StepResult | None:
    """Return the result of a step, if it was run at this commit, and the tree is that commit."""
    if not path.exists():
        return None
    found = msgspec.json.decode(path.read_bytes(), type=StepResult)
    return found if at and found.commit == at and not at.endswith("+") else None


def keep(path: Path, result: StepResult) -> None:
    """Keep the result of a step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(result))


def summed(part: Part, found: list[StepResult], size: str) -> PartResult:
    """Add the steps of a part up; all were run at one commit."""
    counts = {what: sum(each.counts.get(what, 0) for each in found) for what in part.counts}
    last = max(found, key=lambda each: each.date)
    assert {each.commit for each in found} == {last.commit}
    seconds = round(sum(each.seconds for each in found))
    short = "SHORT=1 " if size == "short" else ""
    commands = [f"make proof {short}PROOF='--only {part.name}'", part.steps[len(found) - 1].line]
    return PartResult(
        part.name, last.date, last.commit, machine(), seconds, counts, commands, len(found), len(part.steps)
    )


def published() -> dict[str, PartResult]:
    """Return the published results."""
    found = msgspec.json.decode(RECORD.read_bytes(), type=list[PartResult]) if RECORD.exists() else []
    return {each.part: each for each in found}


def publish(results: dict[str, PartResult]) -> None:
    """Publish these results, and keep those of other parts."""
    every = published() | results
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(list(every.values())), indent=2) + b"\n")
