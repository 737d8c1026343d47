"""`duly conform`: prove that a client follows the rules, by playing a hostile hub or broker against it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from duly.cli.common import Exit, count, note, print_json, say, style
from duly.cli.options import Json

if TYPE_CHECKING:
    from duly.testing.conform import ConformReport, RuleResult

_MARKS = {"holds": ("green", "holds"), "broken": ("red", "BROKEN"), "not checked": ("yellow", "not checked")}


def conform(
    noun: Annotated[str, typer.Argument(help="What the client is: device, app, node or sentinel.")],
    url: Annotated[
        str,
        typer.Argument(
            help="Where to listen: ws://HOST:PORT; for devices and nodes mqtt://HOST:PORT, for sentinels "
            "also http://HOST:PORT."
        ),
    ],
    command: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Start this program, kill it and start it again; {url} {host} {port} {name} {token} {store} "
            "are filled in. [you start it]",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Prove only this rule; may be repeated. [all]")
    ] = None,
    memory: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Send a device or a node more commands than N, so that it forgets."
        ),
    ] = 100,
    json: Json = False,
) -> None:
    """Play a hostile hub against a client that you wrote, and say which rules it breaks.

    Duplicates, cuts, restarts, late and strange answers, replays from long ago. A device or a node has one
    command, `count`: it adds one to a number that it keeps, and answers {"count": N}. What an app and a
    sentinel have to do, and every rule, is in docs/write-your-own.md. Exits with 1 if a rule is broken, and
    shows the frames.
    """
    from duly.testing.conform import RULES, ConformRun, Noun

    try:
        chosen = Noun(noun)
    except ValueError:
        known = ", ".join(RULES)
        raise typer.BadParameter(f"there is no {noun!r}; choose {known}", param_hint="NOUN") from None
    played = ConformRun(chosen, url, command, only=only or (), memory=memory)
    report = asyncio.run(played.run(_progress, lambda found: _ready(found, played.name, command)))
    if json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(Exit.FAILED if report.broken else Exit.OK)


def _ready(url: str, name: str, command: str | None) -> None:
    if command is None:
        note(f"listening on {url}; start your client now (its name is {name}, its token conform)")


def _progress(rule: str, done: int, total: int) -> None:
    note(style(f"{done + 1}/{total} {rule}", "dim"))


def _print(report: ConformReport) -> None:
    for result in report.results:
        colour, word = _MARKS[result.result]
        say(f"{style(word, colour)} {result.rule}: {result.sentence}")
        if result.why:
            say(f"    {result.why}")
        for line in result.frames:
            say(style(f"    {line}", "dim"))
    broken, unchecked = report.broken, _unchecked(report)
    if broken and report.output:
        say("what the program printed last:", *(f"    {line}" for line in report.output.splitlines()[-10:]))
    held = len(report.results) - len(broken) - len(unchecked)
    say(f"{count(held, 'rule')} held, {len(broken)} broken, {len(unchecked)} not checked")


def _unchecked(report: ConformReport) -> list[RuleResult]:
    return [result for result in report.results if result.result == "not checked"]
