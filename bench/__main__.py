"""Asks every question in one run, prints what holds and what falls short, and draws it.

python -m bench [--quick] [--only QUESTION …], of those below
"""

from __future__ import annotations

import argparse
import asyncio
import json

from rich.console import Console
from rich.table import Table

from bench import (
    admission,
    alerts,
    chat,
    connections,
    duplicates,
    gateway,
    growth,
    many,
    nodes,
    once,
    plots,
    postgres,
    remembered,
)
from bench.measure import OUT, Figure, Median, Report

QUESTIONS = {
    "admission": admission.run,
    "growth": growth.run,
    "duplicates": duplicates.run,
    "once": once.run,
    "postgres": postgres.run,
    "gateway": gateway.run,
    "many": many.run,
    "connections": connections.run,
    "remembered": remembered.run,
    "alerts": alerts.run,
    "chat": chat.run,
    "nodes": nodes.run,
}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def rounds_of(figure: Figure) -> list[float]:
    return figure.value.rounds if isinstance(figure.value, Median) else []


def row(figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} × {figure.to}"
    word = {None: "", True: "[green]holds[/]", False: "[red]falls short[/]"}[figure.holds]
    span = f"{number(min(found))} – {number(max(found))}" if (found := rounds_of(figure)) else ""
    return figure.name, number(figure.value), span, figure.unit, ratio, figure.target, word


def show(console: Console, report: Report) -> None:
    table = Table("", "median", "rounds", "", "ratio", "target", "", title=report.title, title_justify="left")
    for column in (1, 2, 4):
        table.columns[column].justify = "right"
    for figure in report.figures:
        table.add_row(*row(figure))
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}")
    console.print()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure duly against its floors and rivals."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="less of everything; growth stops at 100,000 ids, connections at 1,000",
    )
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS), metavar="QUESTION")
    options = parser.parse_args()
    console = Console(width=140)
    OUT.mkdir(exist_ok=True)
    reports: dict[str, Report] = {}
    for name in options.only:
        with console.status(f"measuring: {name}"):
            reports[name] = asyncio.run(QUESTIONS[name](options.quick))
        show(console, reports[name])
    results = {
        name: {
            "title": report.title,
            "figures": [
                vars(figure) | {"target": figure.target, "holds": figure.holds, "rounds": rounds_of(figure)}
                for figure in report.figures
            ],
            "series": report.series,
            "notes": report.notes,
        }
        for name, report in reports.items()
    }
    (OUT / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    for path in plots.draw(reports, OUT):
        console.print(f"drawn: {path.relative_to(OUT.parent.parent)}")


if __name__ == "__main__":
    main()
