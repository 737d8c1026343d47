"""`duly profile channel`: who is told of alerts, and whether an address works.

The law: addresses are typed, and never shown again: they may hold passwords. What is shown is their label.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Annotated, Any

import typer

from duly.cli.alerts import do
from duly.cli.common import (
    CommandFailed,
    Data,
    Exit,
    Json,
    LedgerUrl,
    Token,
    Url,
    count,
    duration,
    note,
    print_json,
    say,
    table,
)
from duly.core import units

profile = typer.Typer(help="Say who is told of alerts.", no_args_is_help=True)
channel = typer.Typer(help="Try an address.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME")]


@profile.command("set")
def set_profile(
    name: Name,
    send: Annotated[
        list[str] | None,
        typer.Option(
            "--send",
            metavar="URL",
            help="Tell this address at once: https://…, mailto://…, ntfy://…, file:/…",
        ),
    ] = None,
    escalate: Annotated[
        list[str] | None,
        typer.Option(
            "--escalate", metavar="10m=URL", help="Tell this one after that time, unless somebody took care."
        ),
    ] = None,
    quiet: Annotated[
        str, typer.Option("--quiet", metavar="22:00-07:00", help="Only critical ones then; the rest after.")
    ] = "",
    zone: Annotated[str, typer.Option("--zone", metavar="ZONE", help="For quiet hours.")] = "UTC",
    lasts: Annotated[
        float | None,
        typer.Option("--for", parser=duration, metavar="24h", help="How long a delivery is tried."),
    ] = None,
    tries: Annotated[int, typer.Option("--tries", min=0, help="How often at most; 0: as often as fits.")] = 0,
    most: Annotated[
        int,
        typer.Option(
            "--most", min=0, help="Messages a minute to one recipient, what is critical apart; 0: no limit."
        ),
    ] = 10,
    together: Annotated[
        float | None,
        typer.Option(
            "--together", parser=duration, metavar="1m", help="Later alerts of an episode go together."
        ),
    ] = None,
    secret: Annotated[
        str,
        typer.Option("--secret", metavar="whsec_…", help="To sign webhooks with; made if you do not say."),
    ] = "",
    heartbeat: Annotated[
        float | None,
        typer.Option(
            "--heartbeat",
            parser=duration,
            metavar="60s",
            help="Its sentinels have to show so often that they are there. [as each promises]",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace", parser=duration, metavar="1m", help="So much later a heartbeat may come. [1m]"
        ),
    ] = None,
    silent: Annotated[
        str, typer.Option("--silent", help="How bad a silent sentinel is: info, warning or critical.")
    ] = "critical",
    nobody: Annotated[
        bool, typer.Option("--nobody", help="Tell nobody: its alerts are only listed.")
    ] = False,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Say who is told of the alerts of a profile. The name 'default' stands in for any other.

    A webhook's secret is printed once, when it is made.
    """
    import msgspec

    steps: list[tuple[float, str]] = []
    for one in escalate or []:
        after, found, address = one.partition("=")
        if not found:
            raise CommandFailed(
                Exit.USAGE, f"--escalate is a time and an address, like 10m=https://…, not {one[:20]!r}"
            )
        steps.append((duration(after), address))
    draft: dict[str, Any] = {
        "send": send or [], "escalate": steps, "secret": secret, "quiet": quiet, "zone": zone, "tries": tries,
        "most": most, "silent": silent, "nobody": nobody,
    }  # fmt: skip
    draft |= {} if lasts is None else {"lasts": lasts}
    draft |= {} if together is None else {"together": together}
    draft |= {} if heartbeat is None else {"heartbeat": heartbeat}
    draft |= {} if grace is None else {"grace": grace}
    wanted = {"name": name, "draft": msgspec.json.encode(draft).decode()}
    made = do("profile.set", wanted, data, ledger, url, token)
    if json:
        print_json(made)
        return
    _show_profile(made)
    for label, whsec in made["secrets"].items():
        note(f"the secret that signs for {label}, which cannot be shown again:")
        say(whsec)


@profile.command("list")
def list_profiles(
    data: Data = None, ledger: LedgerUrl = None, url: Url = None, token: Token = None, json: Json = False
) -> None:
    """Show the profiles."""
    found = do("profile.list", {}, data, ledger, url, token)["profiles"]
    if json:
        print_json(found)
    elif not found:
        say("no profiles yet; begin with: duly profile set default --send console:")
    else:
        rows = [[one["name"], count(len(one["steps"]), "step"), one["quiet"], _first(one)] for one in found]
        table(["name", "steps", "quiet", "tells first"], rows)


def _first(one: dict[str, Any]) -> str:
    return ", ".join(one["steps"][0]["to"]) if one["steps"] else "nobody"


@profile.command("show")
def show_profile(
    name: Name,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show one profile: labels, never addresses."""
    found = do("profile.show", {"name": name}, data, ledger, url, token)
    if json:
        print_json(found)
    else:
        _show_profile(found)


@profile.command("remove")
def remove_profile(
    name: Name,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Forget a profile. Deliveries under way go on."""
    done = do("profile.remove", {"name": name}, data, ledger, url, token)
    if not done["changed"]:
        raise CommandFailed(
            Exit.REFUSED, f"there is no profile {name}; 'duly profile list' shows which there are"
        )
    if json:
        print_json(done)
    else:
        say(f"profile {name} has been removed")


def _show_profile(one: dict[str, Any]) -> None:
    say(f"profile {one['name']}")
    if not one["steps"]:
        say("  tells nobody; alerts are only listed, but what is critical goes to 'default'")
    for step in one["steps"]:
        when = "at once" if not step["after"] else f"after {_span(step['after'])}, unless acknowledged"
        for label in step["to"]:
            say(f"  {label}  {when}")
    if one["quiet"]:
        say(f"  quiet {one['quiet']} {one['zone']}, except what is critical")
    if one["heartbeat"]:
        say(f"  its sentinels show every {_span(one['heartbeat'])} that they are there")
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
    secret: Annotated[str, typer.Option("--secret", metavar="whsec_…", help="To sign a webhook with.")] = "",
    allow_private: Annotated[
        bool, typer.Option("--allow-private-webhooks", help="Inside this network, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Send a test notice to an address, now, and say how it went.

    Exits with 0 if it arrived, 1 if it surely did not, 5 if nobody can tell.
    """
    from duly.apps.alerts.channels import check_url, label_of
    from duly.errors import ChannelError, InDoubt

    check_url(address, private=allow_private)
    began = time.monotonic()
    problem: ChannelError | None = None
    try:
        # What a console: says must not get between a program and the JSON it reads.
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            asyncio.run(_test(address, secret, allow_private))
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


async def _test(address: str, secret: str, private: bool) -> None:
    import secrets

    from duly.apps.alerts.channels import open_channel
    from duly.apps.alerts.channels.channel import Notification

    way = open_channel(address, secret, private=private)
    id_ = f"test_{secrets.token_hex(12)}"
    body = {"type": "alert.test", "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "data": {}}
    try:
        await way.send(Notification(id_, "Test from duly", "This is a test. Nothing has happened.", body))
    finally:
        await way.close()
