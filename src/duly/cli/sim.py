"""`duly sim`: run simulated worlds and say whether the promises held.

The law: what is printed about a failing seed is enough to see it fail again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from duly.cli.common import Exit, count, print_json, say
from duly.cli.options import Json

if TYPE_CHECKING:
    from duly.testing.sim import SimReport


def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds to run.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Run only this seed. [none]")] = None,
    world: Annotated[
        str,
        typer.Option(
            help="Which worlds: kernel, journal, gateway, hubs, chat, tower, sentinels, nodes, mqtt, all."
        ),
    ] = "all",
    jobs: Annotated[int | None, typer.Option(min=1, help="How many processes. [one per core]")] = None,
    json: Json = False,
) -> None:
    """Run simulated worlds, and check that the promises hold.

    Senders, a hub and receivers; crashes, cuts, wrong clocks, failing disks. The same seed gives the same
    run. Prints `0 violations`, or a failing seed with its shortest trace, and then exits with 1.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from duly.testing.sim import WORLDS, hush, run_seeds

    if world not in (*WORLDS, "all"):
        known = ", ".join(WORLDS)
        raise typer.BadParameter(f"there is no world {world!r}; choose {known} or all", param_hint="--world")
    worlds = tuple(WORLDS) if world == "all" else (world,)
    chosen = range(seed, seed + 1) if seed is not None else range(first, first + seeds)
    hush()
    began = time.perf_counter()
    reports: list[SimReport] = []
    progress = Progress(
        TextColumn("worlds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("worlds", total=len(chosen) * len(worlds))
        for report in run_seeds(chosen, jobs if len(chosen) > 1 else 1, worlds):
            reports.append(report)
            progress.advance(task)
    elapsed = time.perf_counter() - began
    broken = [report for report in reports if report.violations]
    if json:
        _print_json(reports, broken, elapsed)
    else:
        _print(reports, broken, elapsed)
    raise typer.Exit(Exit.FAILED if broken else Exit.OK)


def _print(reports: list[SimReport], broken: list[SimReport], elapsed: float) -> None:
    for report in broken[:1]:
        violation = report.violations[0]
        where = f" [{violation.key[6:].decode(errors='replace')}]".replace("\0", "/") if violation.key else ""
        say(
            f"seed {report.seed} ({report.world}) breaks '{violation.checker}': {violation.sentence}{where}",
            "",
            *violation.trace,
            "",
        )
        say(f"Run it again with: duly sim --world {report.world} --seed {report.seed}")
    total = sum(len(report.violations) for report in reports)
    say(
        f"{count(len({r.seed for r in reports}), 'seed')} in "
        f"{count(len({r.world for r in reports}), 'world')}, "
        f"{sum(r.messages for r in reports)} messages, "
        f"{sum(r.faults for r in reports)} faults, {sum(r.effects for r in reports)} effects "
        f"in {elapsed:.1f} s: {total} violations"
    )
    if broken:
        say("failing seeds: " + ", ".join(f"{report.seed} ({report.world})" for report in broken))
    if len({report.seed for report in reports}) == 1:
        for report in reports:
            say(f"digest {report.world} {report.digest}")


def _print_json(reports: list[SimReport], broken: list[SimReport], elapsed: float) -> None:
    summary = {
        "seeds": len({r.seed for r in reports}),
        "worlds": sorted({r.world for r in reports}),
        "messages": sum(r.messages for r in reports),
        "faults": sum(r.faults for r in reports),
        "effects": sum(r.effects for r in reports),
        "seconds": round(elapsed, 3),
        "violations": sum(len(r.violations) for r in reports),
        "digests": {f"{r.world} {r.seed}": r.digest for r in reports},
        "failing": [
            {
                "seed": report.seed,
                "world": report.world,
                "checker": violation.checker,
                "sentence": violation.sentence,
                "key": violation.key[6:].decode(errors="replace").replace("\0", "/"),
                "trace": violation.trace,
            }
            for report in broken
            for violation in report.violations
        ],
    }
    print_json(summary)
