"""`duly sim`: run simulated worlds and say whether the promises held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from duly.testing.sim import Report


def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds to run.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Run just this one.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; all cores by default.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run whole worlds in virtual time, and check that the promises hold.

    Senders, a hub and receivers; crashes, cuts, wrong clocks, failing disks. The same seed gives the same
    run. Prints `0 violations`, or a failing seed with its shortest trace, and then exits with 1.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from duly.testing.sim import run_seeds

    chosen = range(seed, seed + 1) if seed is not None else range(first, first + seeds)
    began = time.perf_counter()
    reports: list[Report] = []
    progress = Progress(
        TextColumn("worlds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("worlds", total=len(chosen))
        for report in run_seeds(chosen, jobs if len(chosen) > 1 else 1):
            reports.append(report)
            progress.advance(task)
    elapsed = time.perf_counter() - began
    broken = [report for report in reports if report.violations]
    if json:
        _print_json(reports, broken, elapsed)
    else:
        _print(reports, broken, elapsed)
    raise typer.Exit(1 if broken else 0)


def _print(reports: list[Report], broken: list[Report], elapsed: float) -> None:
    for report in broken[:1]:
        violation = report.violations[0]
        where = f" [{violation.key[6:].decode(errors='replace')}]".replace("\0", "/") if violation.key else ""
        typer.echo(f"seed {report.seed} breaks '{violation.checker}': {violation.sentence}{where}\n")
        typer.echo("\n".join(violation.trace))
        typer.echo(f"\nAgain: duly sim --seed {report.seed}")
    total = sum(len(report.violations) for report in reports)
    typer.echo(
        f"{len(reports)} seeds, {sum(r.messages for r in reports)} messages, "
        f"{sum(r.faults for r in reports)} faults, {sum(r.effects for r in reports)} effects "
        f"in {elapsed:.1f} s: {total} violations"
    )
    if broken:
        typer.echo("failing seeds: " + ", ".join(str(report.seed) for report in broken))
    if len(reports) == 1:
        typer.echo(f"digest {reports[0].digest}")


def _print_json(reports: list[Report], broken: list[Report], elapsed: float) -> None:
    import msgspec

    summary = {
        "seeds": len(reports),
        "messages": sum(r.messages for r in reports),
        "faults": sum(r.faults for r in reports),
        "effects": sum(r.effects for r in reports),
        "seconds": round(elapsed, 3),
        "violations": sum(len(r.violations) for r in reports),
        "digests": {r.seed: r.digest for r in reports},
        "failing": [
            {
                "seed": report.seed,
                "checker": violation.checker,
                "sentence": violation.sentence,
                "key": violation.key[6:].decode(errors="replace").replace("\0", "/"),
                "trace": violation.trace,
            }
            for report in broken
            for violation in report.violations
        ],
    }
    typer.echo(msgspec.json.encode(summary))
