"""`duly profile channel`: the people who are told of alerts, and a test of an address.

The law: an address is never shown again, since it may hold a password; its label is shown instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from duly.cli.alerts import do
from duly.cli.common import (
    CommandFailed,
    Exit,
    JsonObject,
    count,
    note,
    print_json,
    say,
    say_changed,
    settings_of,
    table,
)
from duly.cli.options import DataFolder, Json, LedgerOptions, duration, grouped, length
from duly.core import units

profile = typer.Typer(help="Set who is told of alerts.", no_args_is_help=True)
channel = typer.Typer(help="Test an address.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME")]


@dataclass(frozen=True)
class ProfileOptions:
    """The options of a profile: who is told of its alerts, when, and how often."""

    send: Annotated[
        list[str] | None,
        typer.Option(
            "--send",
            metavar="URL",
            help="Tell this address at once: https://…, mailto://…, ntfy://…, file:NAME [none]",
        ),
    ] = None
    escalate: Annotated[
        list[str] | None,
        typer.Option(
            "--escalate",
            metavar="10m=URL",
            help="Tell this address after that time, unless the alert is acknowledged. [none]",
        ),
    ] = None
    quiet: Annotated[
        str,
        typer.Option(
            "--quiet",
            metavar="22:00-07:00",
            help="Quiet hours: only critical alerts go out, the others later. [none]",
            show_default=False,
        ),
    ] = ""
    zone: Annotated[str, typer.Option("--zone", metavar="ZONE", help="The time zone of --quiet.")] = "UTC"
    lasts: Annotated[
        float | None,
        length("--for", "How long a delivery is tried. [24h]", metavar="24h"),
    ] = None
    tries: Annotated[
        int, typer.Option("--tries", min=0, help="The most attempts of a delivery; 0 means no limit.")
    ] = 0
    most: Annotated[
        int,
        typer.Option(
            "--most",
            min=0,
            help="The most messages a minute to one recipient, critical ones not counted; 0 means no limit.",
        ),
    ] = 10
    together: Annotated[
        float | None,
        length(
            "--together", "How long later alerts of an episode wait, to be sent together. [1m]", metavar="1m"
        ),
    ] = None
    secret: Annotated[
        str,
        typer.Option(
            "--secret",
            metavar="whsec_…",
            help="The secret that signs webhooks. [a new one]",
            show_default=False,
        ),
    ] = ""
    heartbeat: Annotated[
        float | None,
        length("--heartbeat", "How often its sentinels must report. [as each promises]", metavar="60s"),
    ] = None
    grace: Annotated[
        float | None,
        length("--grace", "How late a heartbeat may come. [1m]", metavar="1m"),
    ] = None
    silent: Annotated[
        str, typer.Option("--silent", help="The severity of a silent sentinel: info, warning or critical.")
    ] = "critical"
    nobody: Annotated[
        bool, typer.Option("--nobody", help="The profile has no recipients: its alerts are only listed.")
    ] = False

    def draft(self) -> str:
        """Return the profile in the JSON form that the hub accepts."""
        import msgspec

        draft: JsonObject = {field.name: getattr(self, field.name) for field in fields(self)}
        draft |= {"send": self.send or [], "escalate": [_step(one) for one in self.escalate or []]}
        given = {name: value for name, value in draft.items() if value is not None}
        return msgspec.json.encode(given).decode()


def _step(text: str) -> tuple[float, str]:
    after, found, address = text.partition("=")
    if not found:
        raise CommandFailed(
            Exit.USAGE, f"--escalate is a time and an address, like 10m=https://…, not {text[:20]!r}"
        )
    return duration(after), address


@profile.command("set")
@grouped
def set_profile(name: Name, *, options: ProfileOptions, at: LedgerOptions, json: Json = False) -> None:
    """Set who is told of the alerts of a profile. The profile 'default' is used for names that have none.

    A webhook's secret is printed once, when it is made.
    """
    wanted = {"name": name, "draft": options.draft()}
    made = do("profile.set", wanted, at)
    if json:
        print_json(made)
        return
    _show_profile(made)
    for label, whsec in made["secrets"].items():
        note(f"the secret that signs for {label}, which cannot be shown again:")
        say(whsec)


@profile.command("list")
@grouped
def list_profiles(*, at: LedgerOptions, json: Json = False) -> None:
    """Show the profiles."""
    found = do("profile.list", {}, at)["profiles"]
    if json:
        print_json(found)
    elif not found:
        say("no profiles yet; begin with: duly profile set default --send console:")
    else:
        rows = [[one["name"], count(len(one["steps"]), "step"), one["quiet"], _first(one)] for one in found]
        table(["name", "steps", "quiet", "tells first"], rows)


def _first(one: JsonObject) -> str:
    return ", ".join(one["steps"][0]["to"]) if one["steps"] else "no recipient"


@profile.command("show")
@grouped
def show_profile(
    name: Name,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show one profile: labels, never addresses."""
    found = do("profile.show", {"name": name}, at)
    if json:
        print_json(found)
    else:
        _show_profile(found)


@profile.command("remove")
@grouped
def remove_profile(
    name: Name,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Remove a profile. Deliveries under way continue."""
    done = do("profile.remove", {"name": name}, at)
    missing = f"there is no profile {name}; 'duly profile list' shows which there are"
    say_changed(done, f"profile {name} has been removed", missing, json=json)


def _show_profile(one: JsonObject) -> None:
    say(f"profile {one['name']}")
    if not one["steps"]:
        say("  tells no recipient; alerts are only listed, but critical ones go to 'default'")
    for step in one["steps"]:
        when = "at once" if not step["after"] else f"after {_span(step['after'])}, unless acknowledged"
        for label in step["to"]:
            say(f"  {label}  {when}")
    if one["quiet"]:
        say(f"  quiet {one['quiet']} {one['zone']}, except what is critical")
    if one["heartbeat"]:
        say(f"  its sentinels show every {_span(one['heartbeat'])} that they are alive")
    say(f"  a sentinel that is silent {_span(one['grace'])} longer than promised is {one['silent']}")
    if one["steps"]:
        most = f"{count(one['most'], 'message')} a minute" if one["most"] else "any number of messages"
        often = f", {count(one['tries'], 'time')} at most" if one["tries"] else ""
        say(f"  tried for {_span(one['lasts'])}{often}; at most {most} to each")


def _span(length: float) -> str:
    return units.show(units.seconds(length))


# ── channels ─────────────────────────────────────────────────────────────────────────────────────


@channel.command("test")
def try_channel(
    address: Annotated[str, typer.Argument(metavar="URL", help="https://…, mailto://…, ntfy://…, console:")],
    secret: Annotated[
        str,
        typer.Option(
            "--secret", metavar="whsec_…", help="Sign a webhook with this secret. [none]", show_default=False
        ),
    ] = "",
    allow_private: Annotated[
        bool, typer.Option("--allow-private-webhooks", help="Allow addresses inside this network, too.")
    ] = False,
    folder: DataFolder = None,
    json: Json = False,
) -> None:
    """Send a test message to an address now, and say how it went.

    Exits with 0 if it arrived, 1 if it surely did not, 5 if that is not known.
    """
    from duly.apps.alerts.channels import check_url, label_of
    from duly.errors import ChannelError, InDoubt

    check_url(address, private=allow_private)
    began = time.monotonic()
    problem: ChannelError | None = None
    try:
        # With --json, what a console: channel prints must not mix with the JSON.
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            asyncio.run(_test(address, secret, settings_of(folder).data, allow_private))
    except ChannelError as trouble:
        problem = trouble
    label, ms = label_of(address), round((time.monotonic() - began) * 1000)
    word = "arrived" if problem is None else problem.word
    if json:
        print_json({"recipient": label, "fate": word, "detail": str(problem or ""), "ms": ms})
    elif problem is None:
        say(f"{label}: arrived after {ms} ms")
    else:
        note(f"duly: {label}: {problem}")
    if problem is not None:
        raise typer.Exit(Exit.UNKNOWN if isinstance(problem, InDoubt) else Exit.FAILED)


async def _test(address: str, secret: str, folder: str, private: bool) -> None:
    import secrets
    from pathlib import Path

    from duly.apps.alerts.channels import open_channel
    from duly.apps.alerts.channels.channel import Notification

    way = open_channel(address, secret, folder=Path(folder), private=private)
    id_ = f"test_{secrets.token_hex(12)}"
    body = {"type": "alert.test", "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "data": {}}
    try:
        await way.send(Notification(id_, "Test from duly", "This is a test. Nothing has happened.", body))
    finally:
        await way.close()
