"""Asks every question in one run, prints what holds and what falls short, draws it and writes it down.

python -m bench [--quick | --long] [--only QUESTION …] [--resume] [--before REV] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import document, plots, record
from bench.measure import OUT, Figure, Options
from bench.processes import end_as_interrupted
from bench.record import Answer
from bench.run import Line, Run
from bench.targets import target_of

QUESTIONS = {
    name: f"bench.{name}"
    for name in (
        "admission",
        "growth",
        "duplicates",
        "once",
        "middleware",
        "postgres",
        "gateway",
        "before",
        "many",
        "connections",
        "remembered",
        "restart",
        "alerts",
        "chat",
        "nodes",
    )
}


def number(value: float) -> str:
    """A figure as people read it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2f}"


def row(question: str, figure: Figure) -> tuple[str, ...]:
    """One line of the table."""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} × {figure.to}"
    target = target_of(question, figure.name, figure.to)
    holds = target.holds(figure.value, figure.ratio) if target else None
    word = {None: "", True: "[green]holds[/]", False: "[red]falls short[/]"}[holds]
    span = f"{number(min(figure.rounds))} – {number(max(figure.rounds))}" if figure.rounds else ""
    return figure.name, number(figure.value), span, figure.unit, ratio, str(target or ""), word


def show(console: Console, answer: Answer) -> None:
    """Prints an answer."""
    if answer.error:
        console.print(
            f"[red]{answer.question}: no answer: {answer.error}[/] (bench/out/{answer.question}.log)\n"
        )
        return
    table = Table("", "median", "rounds", "", "ratio", "target", "", title=answer.report.title)
    for column in (1, 2, 4):
        table.columns[column].justify = "right"
    for figure in answer.report.figures:
        table.add_row(*row(answer.question, figure))
    console.print(table)
    notes = [
        *answer.report.notes,
        *(f"not measured: {each.figure}: {each} {each.of}".rstrip() for each in answer.missing),
    ]
    for note in notes:
        console.print(f"  {note}", highlight=False)
    console.print()


def summary(console: Console, answers: list[Answer]) -> None:
    """Prints how many targets hold, and names those that do not."""
    judged = [(answer, *each) for answer in answers for each in answer.judged]
    short = [(answer, figure, target) for answer, figure, target, holds in judged if not holds]
    console.print(f"{len(judged) - len(short)} of {len(judged)} targets hold.")
    for answer, figure, target in short:
        found = (
            f"{number(figure.value)} {figure.unit}"
            if figure.ratio is None
            else f"{figure.ratio:.2f} × {figure.to}"
        )
        console.print(
            f"  falls short: {answer.question}: {figure.name}: {found}, target {target}", highlight=False
        )
    for answer in answers:
        if answer.error:
            console.print(f"  no answer: {answer.question}: {answer.error}", highlight=False)


async def ask_all(run: Run, console: Console, *, resume: bool, publish: bool) -> list[Answer]:
    """Asks the questions in their order; each answer is kept and shown as soon as it is there."""
    answers: list[Answer] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        whole = bar.add_task("questions", total=len(run.questions))
        for name in run.questions:
            step = bar.add_task(name, total=None)

            def told(line: Line, name: str = name, step: TaskID = step) -> None:
                bar.update(
                    step, completed=line.done, total=line.of or None, description=f"{name}: {line.label}"
                )

            kept = run.kept(name) if resume else None
            if kept is not None:
                console.print(f"{name}: kept from {kept.date}")
            answer = kept or await run.ask(name, told)
            bar.remove_task(step)
            bar.advance(whole)
            show(console, answer)
            answers.append(answer)
            if publish:
                record.publish(answer)
                document.write()
    return answers


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure duly against its floors and rivals."
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything; not recorded, unless --record"
    )
    parser.add_argument(
        "--long", action="store_true", help="also what takes an hour: growth to 10,000,000 ids"
    )
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS), metavar="QUESTION")
    parser.add_argument("--resume", action="store_true", help="keep the answers of a run that was stopped")
    parser.add_argument(
        "--before", default="", metavar="REV", help="the revision to compare the program with"
    )
    parser.add_argument("--record", action="store_true", help="write bench/results.json and the documents")
    return parser.parse_args()


def main() -> None:
    end_as_interrupted()
    asked = arguments()
    run = Run(
        {name: QUESTIONS[name] for name in asked.only}, Options(asked.quick, asked.long, asked.before), OUT
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    publish = asked.record or not asked.quick
    try:
        answers = asyncio.run(ask_all(run, console, resume=asked.resume, publish=publish))
    except KeyboardInterrupt:
        sys.exit("stopped; --resume goes on with the question that was being asked")
    summary(console, answers)
    for path in plots.draw(answers, OUT):
        console.print(f"drawn: {path.relative_to(OUT.parent.parent)}")
    if any(answer.error for answer in answers):
        sys.exit(1)


if __name__ == "__main__":
    main()
