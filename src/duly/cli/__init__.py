"""The command line: one file per group of verbs. A verb's file is imported when the verb is used, and the
verb imports what it needs when it runs, so that `duly --help` is fast.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 unknown or timeout, 6 refused.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperGroup

from duly.cli.common import guarded, say


class Panel(StrEnum):
    """The headings of the list of verbs, in order."""

    RUN = "Run"
    ACCOUNTS = "Accounts"
    COMMANDS = "Commands"
    NODES = "Nodes"
    PEOPLE = "People"
    ALERTS = "Alerts"
    INSPECT = "Inspect"


class Verb(NamedTuple):
    """A verb in the list of `duly --help`, and where it is defined."""

    panel: Panel
    where: str
    """its file in this folder, and the name in it: a function, or a Typer with verbs of its own"""
    sentence: str
    """the first sentence of its own help; a test compares the two"""


VERBS: Final = {
    "up": Verb(Panel.RUN, "up.up", "Run a hub: apps and devices connect to it."),
    "demo": Verb(Panel.RUN, "demo.demo", "Command a lock over a bad network, and count effects."),
    "sim": Verb(Panel.RUN, "sim.sim", "Run simulated worlds, and check that the promises hold."),
    "prune": Verb(
        Panel.RUN,
        "prune.prune",
        "Forget messages that have ended and can no longer be repeated; alerts go to the archive first.",
    ),
    "floor": Verb(
        Panel.RUN,
        "floor.floor",
        "Show the floor: ids from before it may be forgotten, so older messages are stale.",
    ),
    "dashboard": Verb(
        Panel.RUN, "dashboard.dashboard", "The web page of the hub: links, passwords and sessions."
    ),
    "add": Verb(
        Panel.ACCOUNTS,
        "accounts.add",
        "Create an account, and print its token once: only a hash of it is kept.",
    ),
    "remove": Verb(Panel.ACCOUNTS, "accounts.remove", "Remove an account with all its grants."),
    "grant": Verb(
        Panel.ACCOUNTS, "accounts.grant", "Let an app command a device, and receive what it pushes."
    ),
    "revoke": Verb(Panel.ACCOUNTS, "accounts.revoke", "Take a grant back."),
    "list": Verb(
        Panel.ACCOUNTS,
        "accounts.list_",
        "Show all accounts: what each may command, and whether it is online.",
    ),
    "send": Verb(Panel.COMMANDS, "send.send", "Send a command to a device, and show both acknowledgements."),
    "device": Verb(Panel.COMMANDS, "device.device", "Simulate a lock or a lamp."),
    "node": Verb(Panel.NODES, "node.node", "Run a node that runs a shell command for each task."),
    "call": Verb(Panel.NODES, "node.call", "Send a task to a node, wait for its end, and print the result."),
    "status": Verb(Panel.NODES, "node.status", "Show the status that nodes report."),
    "task": Verb(Panel.NODES, "task.app", "Tasks that a node sent or received."),
    "acl": Verb(Panel.NODES, "acl.app", "Rules for brokers, and a test of them."),
    "keys": Verb(Panel.NODES, "keys.app", "Keys that nodes sign with, and keys that they trust."),
    "chat": Verb(Panel.PEOPLE, "chat.chat", "Chat with people and groups."),
    "sentinel": Verb(
        Panel.ALERTS,
        "sentinel.sentinel",
        "Watch devices, and report each event once, also over a bad network.",
    ),
    "alert": Verb(Panel.ALERTS, "alerts.alert", "Report, show and close alerts."),
    "deliveries": Verb(
        Panel.ALERTS, "alerts.deliveries", "Show the messages about alerts, and send them again."
    ),
    "profile": Verb(Panel.ALERTS, "profiles.profile", "Set who is told of alerts."),
    "channel": Verb(Panel.ALERTS, "profiles.channel", "Test an address."),
    "outcome": Verb(Panel.INSPECT, "inspect.outcome", "Show how a message ended."),
    "trace": Verb(Panel.INSPECT, "inspect.trace", "Show every hop of a message: times, attempts, reasons."),
    "why": Verb(
        Panel.INSPECT, "inspect.why", "Show why nothing happened: what was refused, and the reasons."
    ),
    "watch": Verb(Panel.INSPECT, "inspect.watch", "Show what goes through the hub, as it happens."),
    "audit": Verb(Panel.INSPECT, "dashboard.audit", "Who has done what: the audit chain."),
    "top": Verb(Panel.INSPECT, "top.top", "Show the figures of a hub as they change."),
    "doctor": Verb(
        Panel.INSPECT,
        "doctor.doctor",
        "Check versions, hub, clock, disk, ledger, notifier, broker and margins.",
    ),
}


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
    """Makes Typer treat a single verb as one of several."""


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


def main() -> None:
    """Run the command line."""
    guarded(app)
