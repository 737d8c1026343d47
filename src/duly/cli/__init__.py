"""The command line: one file per group of verbs. A verb's file is imported when the verb is used, and the
verb imports what it needs when it runs, so that `duly --help` is fast.

This file is light: it needs no other package, so that a slim installation can list the verbs and say which
extra each of them needs. `duly.cli.group` is the command line itself.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 unknown or timeout, 6 refused.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from duly.cli.group import app as app


class Panel(StrEnum):
    """The headings of the list of verbs, in order."""

    RUN = "Run"
    KEEP = "Keep"
    ACCOUNTS = "Accounts"
    COMMANDS = "Commands"
    NODES = "Nodes"
    PEOPLE = "People"
    ALERTS = "Alerts"
    ONCE = "Once"
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
    "conform": Verb(
        Panel.RUN,
        "conform.conform",
        "Play a hostile hub against a client that you wrote, and say which rules it breaks.",
    ),
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
    "check": Verb(Panel.KEEP, "check.check", "Check every invariant of a ledger, also while a hub runs."),
    "backup": Verb(Panel.KEEP, "backup.backup", "Write a backup of the ledger, also while a hub runs."),
    "restore": Verb(Panel.KEEP, "backup.restore", "Make a ledger from a backup; no id runs a second time."),
    "export": Verb(Panel.KEEP, "transfer.export", "Write the ledger as JSON lines."),
    "import": Verb(Panel.KEEP, "transfer.import_", "Make a ledger from exported JSON lines."),
    "copy": Verb(
        Panel.KEEP, "transfer.copy", "Copy a ledger to another database, such as SQLite to PostgreSQL."
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
    "ha": Verb(
        Panel.COMMANDS,
        "home_assistant.ha",
        "Show devices in Home Assistant, by MQTT discovery, and pass its commands on to them.",
    ),
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
    "once": Verb(
        Panel.ONCE, "once.app", "Keys of functions and requests that run once: list, settle and forget them."
    ),
    "outcome": Verb(Panel.INSPECT, "inspect.outcome", "Show how a message ended."),
    "trace": Verb(Panel.INSPECT, "inspect.trace", "Show every hop of a message: times, attempts, reasons."),
    "why": Verb(
        Panel.INSPECT, "inspect.why", "Show why nothing happened: what was refused, and the reasons."
    ),
    "watch": Verb(Panel.INSPECT, "inspect.watch", "Show what goes through the hub, as it happens."),
    "audit": Verb(Panel.INSPECT, "dashboard.audit", "Who has done what: the audit chain."),
    "top": Verb(Panel.INSPECT, "top.top", "Show the metrics of a hub as they change."),
    "doctor": Verb(
        Panel.INSPECT,
        "doctor.doctor",
        "Check versions, hub, clock, disk, ledger, notifier, broker and margins.",
    ),
}

WITHOUT_HUB: Final = frozenset(
    {
        *("send", "device", "ha", "node", "call", "status", "task", "chat", "sentinel", "once"),
        *("alert", "deliveries", "profile", "channel", "outcome", "trace", "why", "watch"),
    }
)
"""Verbs that run with the packages of the command line alone; the others need those of a hub."""

SENTENCE: Final = "Messages that take effect once, in the right order, and tell their sender how it ended."
EPILOG: Final = (
    "Start with 'duly demo', or with 'duly up' and the commands that it prints. "
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 not allowed, 5 unknown or timeout, 6 refused."
)


def __getattr__(name: str) -> object:
    """Load the command line itself when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module 'duly.cli' has no attribute {name!r}")
    from duly.cli.group import app

    return app


def main() -> None:
    """Run the command line."""
    try:
        from duly.cli.common import guarded
        from duly.cli.group import app
    except ModuleNotFoundError as problem:
        from duly import extras

        if extras.of(problem) is None:
            raise
        from duly.cli.slim import answer

        raise SystemExit(answer(sys.argv[1:])) from None
    guarded(app)
