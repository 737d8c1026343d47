"""Runs the proof, part by part, and prints what was counted.

python -m proof [--short] [--only PART …] [--fresh] [--record] [--minutes N]

A run that was stopped goes on at the step where it was, as long as the commit is the same; `--fresh` begins
anew. `--record` publishes the counts, of parts that were stopped as far as they came, and writes them into
docs/reliability.md.
`--minutes` stops before the next step when the time is up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from proof import document, record
from proof.counts import total
from proof.parts import Part, Step, environment, parts
from proof.record import ROOT, PartResult, StepResult


class StepFailed(Exception):
    """A step ended with an error; its output says why, and how to replay it."""


def run(step: Step, at: str) -> StepResult:
    """Run one step."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        done = subprocess.run(
            step.command, cwd=ROOT, env=environment(step, str(counts)), text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise StepFailed(f"{done.stdout[-20_000:]}\nreplay: {step.line}")
        found = total(counts)
    if "sim" in step.command:
        report = json.loads(done.stdout[done.stdout.index("{") :])
        found = {"runs": report["seeds"] * len(report["worlds"]), "violations": report["violations"]}
    return StepResult(at, record.now(), round(time.monotonic() - began, 1), found)


def prove(chosen: list[Part], size: str, *, fresh: bool, minutes: float) -> dict[str, PartResult]:
    """Run what was not run yet; return what each part has come to."""
    at, until = record.commit(), time.monotonic() + minutes * 60
    counted: dict[str, PartResult] = {}
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=sum(len(part.steps) for part in chosen))
        for part in chosen:
            found: list[StepResult] = []
            for step in part.steps:
                path = record.path_of(size, part.name, step.name)
                result = None if fresh else record.kept(path, at)
                if result is None and time.monotonic() < until:
                    bar.update(task, description=f"{part.name}: {step.name}")
                    result = run(step, at)
                    record.keep(path, result)
                if result is not None:
                    found.append(result)
                bar.advance(task)
            if found:
                counted[part.name] = record.summed(part, found)
    return counted


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
    parser.add_argument("--record", action="store_true", help="publish the counts and write the documents")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop when so much time has passed")
    asked = parser.parse_args()
    every = parts(short=asked.short)
    unknown = set(asked.only) - {part.name for part in every}
    if unknown:
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in every)}"
        )
    chosen = [part for part in every if not asked.only or part.name in asked.only]
    try:
        counted = prove(chosen, "short" if asked.short else "long", fresh=asked.fresh, minutes=asked.minutes)
    except StepFailed as problem:
        sys.exit(str(problem))
    show(counted)
    if asked.record:
        record.publish({name: part for name, part in counted.items() if part.counts})
        document.write()
    if any(part.counts.get("violations") for part in counted.values()):
        sys.exit("a promise was broken; see 'duly sim --seed'")


if __name__ == "__main__":
    main()
