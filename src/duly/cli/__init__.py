"""The command line: one file per group of verbs. A verb imports what it needs when it runs, so that
`duly --help` is fast.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 unknown or timeout, 6 refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from duly.cli import (
    accounts,
    acl,
    alerts,
    chat,
    demo,
    device,
    doctor,
    floor,
    inspect,
    keys,
    node,
    profiles,
    prune,
    send,
    sentinel,
    sim,
    task,
    up,
)
from duly.cli.common import guarded, say

SENTENCE: Final = 150
"""The most characters of a verb's first sentence in the list of verbs."""


class Panel(StrEnum):
    """The headings of the list of verbs, in order."""

    RUN = "Run"
    ACCOUNTS = "Accounts"
    COMMANDS = "Commands"
    NODES = "Nodes"
    PEOPLE = "People"
    ALERTS = "Alerts"
    INSPECT = "Inspect"


class VerbGroup(TyperGroup):
    """The verbs under their headings, as plain text: loading Rich would take too long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        for panel in Panel:
            rows = [
                (name, command.get_short_help_str(SENTENCE))
                for name, command in self.commands.items()
                if getattr(command, "rich_help_panel", "") == panel
            ]
            with formatter.section(panel.value):
                formatter.write_dl(rows)


app = typer.Typer(
    name="duly",
    cls=VerbGroup,
    help="Messages that take effect once, in the right order, and tell their sender how it ended.",
    epilog="Begin with 'duly demo', or with 'duly up' and what it says. "
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 unknown or timeout, 6 refused.",
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


app.command("up", rich_help_panel=Panel.RUN)(up.up)
app.command("demo", rich_help_panel=Panel.RUN)(demo.demo)
app.command("sim", rich_help_panel=Panel.RUN)(sim.sim)
app.command("prune", rich_help_panel=Panel.RUN)(prune.prune)
app.command("floor", rich_help_panel=Panel.RUN)(floor.floor)
app.command("add", rich_help_panel=Panel.ACCOUNTS)(accounts.add)
app.command("remove", rich_help_panel=Panel.ACCOUNTS)(accounts.remove)
app.command("grant", rich_help_panel=Panel.ACCOUNTS)(accounts.grant)
app.command("revoke", rich_help_panel=Panel.ACCOUNTS)(accounts.revoke)
app.command("list", rich_help_panel=Panel.ACCOUNTS)(accounts.list_)
app.command("send", rich_help_panel=Panel.COMMANDS)(send.send)
app.command("device", rich_help_panel=Panel.COMMANDS)(device.device)
app.command("node", rich_help_panel=Panel.NODES)(node.node)
app.command("call", rich_help_panel=Panel.NODES)(node.call)
app.add_typer(task.app, name="task", rich_help_panel=Panel.NODES)
app.command("status", rich_help_panel=Panel.NODES)(node.status)
app.add_typer(acl.app, name="acl", rich_help_panel=Panel.NODES)
app.add_typer(keys.app, name="keys", rich_help_panel=Panel.NODES)
app.command("chat", rich_help_panel=Panel.PEOPLE)(chat.chat)
app.add_typer(sentinel.sentinel, name="sentinel", rich_help_panel=Panel.ALERTS)
app.add_typer(alerts.alert, name="alert", rich_help_panel=Panel.ALERTS)
app.add_typer(alerts.deliveries, name="deliveries", rich_help_panel=Panel.ALERTS)
app.add_typer(profiles.profile, name="profile", rich_help_panel=Panel.ALERTS)
app.add_typer(profiles.channel, name="channel", rich_help_panel=Panel.ALERTS)
app.command("outcome", rich_help_panel=Panel.INSPECT)(inspect.outcome)
app.command("trace", rich_help_panel=Panel.INSPECT)(inspect.trace)
app.command("why", rich_help_panel=Panel.INSPECT)(inspect.why)
app.command("watch", rich_help_panel=Panel.INSPECT)(inspect.watch)
app.command("doctor", rich_help_panel=Panel.INSPECT)(doctor.doctor)


def main() -> None:
    """Run the command line."""
    guarded(app)
