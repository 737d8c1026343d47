"""The command line: one file per verb group. Verbs import what they need when they run, so that
`duly --help` answers at once.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 unknown or timeout, 6 refused.
"""

from __future__ import annotations

from typing import Annotated

import typer

from duly.cli import (
    accounts,
    acl,
    alerts,
    chat,
    demo,
    device,
    doctor,
    keys,
    look,
    node,
    profiles,
    prune,
    send,
    sentinel,
    sim,
    task,
    up,
)
from duly.cli.common import guarded

app = typer.Typer(
    name="duly",
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

        typer.echo(f"duly {version('duly')}")
        raise typer.Exit


@app.callback()
def _duly(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("add")(accounts.add)
app.command("remove")(accounts.remove)
app.command("grant")(accounts.grant)
app.command("revoke")(accounts.revoke)
app.command("list")(accounts.list_)
app.command("send")(send.send)
app.command("device")(device.device)
app.command("chat")(chat.chat)
app.command("node")(node.node)
app.command("call")(node.call)
app.add_typer(task.app, name="task")
app.command("status")(node.status)
app.command("outcome")(look.outcome)
app.command("trace")(look.trace)
app.command("why")(look.why)
app.command("watch")(look.watch)
app.add_typer(alerts.alert, name="alert")
app.add_typer(alerts.deliveries, name="deliveries")
app.add_typer(sentinel.sentinel, name="sentinel")
app.add_typer(profiles.profile, name="profile")
app.add_typer(profiles.channel, name="channel")
app.command("prune")(prune.prune)
app.command("doctor")(doctor.doctor)
app.command("sim")(sim.sim)
app.add_typer(acl.app, name="acl")
app.add_typer(keys.app, name="keys")


def main() -> None:
    guarded(app)
