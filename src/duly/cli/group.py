"""The group of all verbs, as Typer runs it; a verb's file is imported when the verb is used."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from duly.cli import EPILOG, SENTENCE, VERBS, Panel, Verb
from duly.cli.common import say


class LoadedVerbs(MutableMapping[str, Any]):
    """The commands that Typer makes of the verbs, each when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _load(name, VERBS[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _load(name: str, verb: Verb) -> Any:
    """Import a verb and let Typer make its command, as a group that has only this verb would."""
    file, _, attribute = verb.where.partition(".")
    defined = getattr(import_module(f"duly.cli.{file}"), attribute)
    only = typer.Typer(rich_markup_mode=None)
    only.callback()(_nothing)
    if isinstance(defined, typer.Typer):
        only.add_typer(defined, name=name, rich_help_panel=verb.panel)
    else:
        only.command(name, rich_help_panel=verb.panel)(defined)
    group: Any = typer.main.get_group(only)
    return group.commands[name]


def _nothing() -> None:
    """Make Typer treat a single verb as one of several."""


class VerbGroup(TyperGroup):
    """The verbs under their headings, as plain text: loading Rich would take too long."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = LoadedVerbs()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        for panel in Panel:
            with formatter.section(panel.value):
                formatter.write_dl(
                    [(name, verb.sentence) for name, verb in VERBS.items() if verb.panel == panel]
                )


app = typer.Typer(
    name="duly",
    cls=VerbGroup,
    help=SENTENCE,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"duly {version('duly')}")
        raise typer.Exit


@app.callback()
def _duly(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
