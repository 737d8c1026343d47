"""Answers as JSON: the last to each question in `bench/out`, the published ones in `bench/results.json`.

An answer says when, from which commit and on which machine it comes. What was not measured has no figure, and
a question that could not be answered has an error instead of figures.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.measure import OUT, ROOT, Figure, Options, Report
from bench.targets import TARGETS, Target, target_of

RECORD = ROOT / "bench" / "results.json"


class Answer(Struct, omit_defaults=True):
    """What a question came to."""

    question: str
    date: str
    commit: str
    machine: str
    options: Options
    report: Report
    error: str = ""

    @property
    def judged(self) -> list[tuple[Figure, Target, bool]]:
        """The figures that have a target, and whether each reaches it."""
        found = []
        for each in self.report.figures:
            target = target_of(self.question, each.name, each.to)
            holds = target.holds(each.value, each.ratio) if target else None
            if target is not None and holds is not None:
                found.append((each, target, holds))
        return found

    @property
    def missing(self) -> list[Target]:
        """The targets of the question for which there is no figure."""
        met = {target for _, target, _ in self.judged}
        return [each for each in TARGETS if each.question == self.question and each not in met]


def commit() -> str:
    """The commit of the working tree; with a plus if the tree has other changes."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "bench")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def machine() -> str:
    """What the figures were measured on, in a few words."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {model}, {platform.system()}, Python {platform.python_version()}"


def answer(question: str, options: Options, report: Report, error: str = "") -> Answer:
    """The answer to a question, here and now."""
    date = datetime.now(UTC).isoformat(timespec="minutes")
    return Answer(question, date, commit(), machine(), options, report, error)


def keep(answered: Answer, out: Path = OUT) -> None:
    """Keeps the last answer to a question, so that a run that was stopped can be resumed."""
    out.mkdir(exist_ok=True)
    partial = out / f"{answered.question}.json.partial"
    partial.write_bytes(_encode(answered))
    partial.replace(out / f"{answered.question}.json")


def kept(question: str, out: Path = OUT) -> Answer | None:
    """The last answer to a question; None if there is none, or one of another version of this file."""
    try:
        return msgspec.json.decode((out / f"{question}.json").read_bytes(), type=Answer)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def published(path: Path = RECORD) -> dict[str, Answer]:
    """The answers that the documents show."""
    if not path.exists():
        return {}
    return {each.question: each for each in msgspec.json.decode(path.read_bytes(), type=list[Answer])}


def publish(answered: Answer, path: Path = RECORD) -> None:
    """Puts an answer into the record; an error or a report without figures leaves the record as it is."""
    if answered.error or not answered.report.figures:
        return
    record = published(path) | {answered.question: answered}
    path.write_bytes(_encode([record[name] for name in sorted(record)]))


def _encode(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
