"""Runs the proof, part by part, and prints what was counted.

python -m proof [--short] [--only PART …] [--fresh] [--add] [--record] [--minutes N] [--jobs N]

A run that was stopped goes on at the step where it was, as long as the commit is the same; `--fresh` begins
anew. `--record` publishes the counts, of parts that were stopped as far as they came, and writes them into
docs/reliability.md; what other commits have counted stays, but for the steps that were run now. `--add` runs
only steps that no commit has counted yet, so that every seed is a new one.
`--minutes` stops before the next step when the time is up. Steps are run beside each other, `--jobs` at once,
but for those that take all cores by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from proof import document, record
from proof.counts import total
from proof.parts import PYTHON, Part, Step, environment, parts
from proof.record import ROOT, PartResult, StepResult


class StepFailed(Exception):
    """A step ended with an error; its output says why, and how to replay it."""


def _report(step: Step, said: str) -> dict[str, Any]:
    """Return the report of a simulation; nothing if the step is none, or has not come to one."""
    if "sim" not in step.command or '{"seeds"' not in said:
        return {}
    found: dict[str, Any] = json.JSONDecoder().raw_decode(said, said.index('{"seeds"'))[0]
    return found


def run(step: Step, at: str) -> StepResult:
    """Run one step. Simulated runs that broke a promise are counted, and the others go on; all else that goes
    wrong ends the proof."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        done = subprocess.run(
            step.command, cwd=ROOT, env=environment(step, str(counts)), text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        report = _report(step, done.stdout)
        if done.returncode and not report:
            # A library may have written one warning hundreds of times.
            said = "\n".join(line for line, _ in groupby(done.stdout.splitlines()))
            raise StepFailed(f"{said[-20_000:]}\nreplay: {step.line}")
        found = total(counts)
    if report:
        found = {"runs": report["seeds"] * len(report["worlds"]), "violations": report["violations"]}
        for one in report["failing"]:
            again = f"{PYTHON} -m duly sim --world {one['world']} --seed {one['seed']}"
            sys.stderr.write(f"{one['checker']}: {one['sentence']}; replay: {again}\n")
    return StepResult(at, record.now(), round(time.monotonic() - began, 1), found)


class Proving:
    """One run: steps beside each other, but for those that take all cores, and the bar that shows it."""

    def __init__(
        self, size: str, *, fresh: bool, minutes: float, jobs: int, bar: Progress, steps: int,
        counted: Container[tuple[str, str]] | None,
    ) -> None:  # fmt: skip
        self._size, self._fresh, self._jobs, self._counted = size, fresh, jobs, counted
        self._at, self._until = record.commit(), time.monotonic() + minutes * 60
        self._bar, self._task = bar, bar.add_task("", total=steps)
        self._broken = False

    def part(self, part: Part) -> PartResult | None:
        """Run what was not run yet of a part; return what it has come to."""
        with ThreadPoolExecutor(self._jobs) as pool:
            beside = {step.name: pool.submit(self._step, part, step) for step in part.steps if not step.alone}
            wait(beside.values())
        alone = {step.name: self._step(part, step) for step in part.steps if step.alone}
        every = {name: future.result() for name, future in beside.items()} | alone
        found = [
            record.run_of(part, step, result, self._size)
            for step in part.steps
            if (result := every[step.name]) is not None
        ]
        return record.summed(part, found) if found else None

    def _step(self, part: Part, step: Step) -> StepResult | None:
        if self._counted is not None and (part.name, step.name) in self._counted:
            self._bar.advance(self._task)
            return None
        path = record.path_of(self._size, part.name, step.name)
        at = self._at if self._counted is None else None
        result = None if self._fresh else record.kept(path, at)
        if result is None and time.monotonic() < self._until and not self._broken:
            self._bar.update(self._task, description=f"{part.name}: {step.name}")
            try:
                result = run(step, self._at)
            except StepFailed:
                self._broken = True  # what runs beside it ends, and nothing else begins
                raise
            record.keep(path, result)
        self._bar.advance(self._task)
        return result


def prove(
    chosen: list[Part], size: str, *, fresh: bool, minutes: float, jobs: int = 1,
    counted: Container[tuple[str, str]] | None = None,
) -> dict[str, PartResult]:  # fmt: skip
    """Run what was not run yet at this commit; return what each part has come to. `counted`: run only what
    was not run at any commit, and is not of these parts and steps."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        steps = sum(len(part.steps) for part in chosen)
        proving = Proving(
            size, fresh=fresh, minutes=minutes, jobs=jobs, bar=bar, steps=steps, counted=counted
        )
        return {part.name: result for part in chosen if (result := proving.part(part)) is not None}


def show(counted: dict[str, PartResult]) -> None:
    """Print what was counted."""
    table = Table("part", "counted", "seconds")
    for part in counted.values():
        said = ", ".join(f"{many:,} {what}" for what, many in part.counts.items())
        table.add_row(part.part, said, str(part.seconds))
    Console().print(table)


def main() -> None:
    """Run the proof."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few minutes of each part")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="these parts only")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--add", action="store_true", help="only steps that no commit has counted yet")
    parser.add_argument("--record", action="store_true", help="publish the counts and write the documents")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="steps beside each other [one per core]")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop when so much time has passed")
    asked = parser.parse_args()
    every = parts(short=asked.short)
    unknown = set(asked.only) - {part.name for part in every}
    if unknown:
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in every)}"
        )
    if asked.record and record.commit().rstrip("+") != record.commit():
        parser.error("what is recorded names its commit: commit what was changed, or leave --record out")
    chosen = [part for part in every if not asked.only or part.name in asked.only]
    before = {(run.part, step) for run in record.published() for step in run.steps} if asked.add else None
    try:
        size = "short" if asked.short else "long"
        counted = prove(
            chosen, size, fresh=asked.fresh, minutes=asked.minutes, jobs=asked.jobs, counted=before
        )
    except StepFailed as problem:
        sys.exit(str(problem))
    show(counted)
    if asked.record:
        record.publish(every, [run for part in counted.values() for run in part.runs if run.counts])
        document.write()
    if any(part.counts.get("violations") for part in counted.values()):
        sys.exit("a promise was broken; see 'duly sim --seed'")


if __name__ == "__main__":
    main()
