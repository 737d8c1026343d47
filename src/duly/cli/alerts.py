"""`duly alert deliveries`: alerts, and how their messages fared.

The law: the same verbs with and without a running hub. The hub that holds the ledger is asked; where none
runs, the ledger itself is read and changed, and the hub goes on from there. Addresses are typed, never shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from duly.cli.common import (
    CommandFailed,
    Data,
    Exit,
    HubClient,
    HubUnreachable,
    Json,
    LedgerUrl,
    Token,
    Url,
    box_of,
    clock,
    duration,
    find_hub,
    need_hub,
    note,
    open_to_read,
    print_json,
    say,
    settings_of,
    table,
    tint,
)
from duly.runtime.files import private_folder

alert = typer.Typer(help="Report alerts, see them, take care of them.", no_args_is_help=True)
deliveries = typer.Typer(
    help="See how the messages about alerts fared; send them again.", no_args_is_help=True
)

URGENT_SECONDS: Final = 10.0
"""How long it is waited for that somebody is told of a critical alert."""
NEWEST_LOOKED_AT: Final = 200
LOCAL: Final = "local"
"""The account of those who may read the data folder, as the hub names it."""

EventId = Annotated[str, typer.Argument(metavar="EVENT", help="Its id, or how that begins.")]
Sentinel = Annotated[str | None, typer.Option("--sentinel", metavar="NAME", help="Whose alert it is.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The newest so many.")]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="NAME",
        help="Who says so, for those who look later; your account is noted anyway. [you]",
    ),
]
Note = Annotated[str | None, typer.Option("--note", metavar="TEXT", help="For those who look later.")]


def do(
    verb: str,
    wanted: Mapping[str, str | None],
    data: str | None,
    ledger: str | None,
    url: str | None,
    token: str | None,
) -> dict[str, Any]:
    """Ask the hub, or where none runs the ledger."""
    said = {name: value for name, value in wanted.items() if value is not None}
    hub = None if ledger is not None else find_hub(data, url, token)
    if hub is not None:
        try:
            answer: dict[str, Any] = hub.ask(f"/v1/admin/{verb}", said)
            return answer
        except HubUnreachable:
            if not hub.local:
                raise  # its note may be of one that was killed: the ledger knows
    settings = settings_of(data, ledger)
    if verb not in _READING and not settings.ledger:
        private_folder(Path(settings.data))
    return asyncio.run(_do_in_ledger(verb, said, data, ledger))


_READING = frozenset(
    {
        "alert.list", "alert.show", "alert.silences", "deliveries.list", "deliveries.show", "profile.list",
        "profile.show",
    }
)  # fmt: skip


async def _do_in_ledger(
    verb: str, wanted: dict[str, str], data: str | None, ledger: str | None
) -> dict[str, Any]:
    import msgspec

    from duly.apps.alerts.operations import AlertOperations
    from duly.apps.alerts.profiles import Profiles
    from duly.apps.alerts.verbs import administer
    from duly.storage import open_ledger

    if verb in _READING:
        opening = open_to_read(data, ledger)
    else:
        opening = open_ledger(settings_of(data, ledger).ledger_url)
    async with await opening as book:
        box = await box_of(book, settings_of(data, ledger), reading=verb in _READING)
        profiles = Profiles(book, box=box)
        await profiles.refresh()
        result = await administer(AlertOperations(book, profiles), profiles, verb, wanted, LOCAL)
        return msgspec.json.decode(msgspec.json.encode(result), type=dict[str, Any])


def _me(by: str | None) -> str:
    import getpass

    try:
        return by or getpass.getuser()
    except (OSError, KeyError):  # nobody has given this user a name
        return ""


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────


@alert.command("trigger")
def trigger(
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Why: disconnect, smoke, panic, …")],
    profile_: Annotated[str, typer.Option("--profile", metavar="NAME", help="Who is told.")] = "default",
    device: Annotated[str, typer.Option("--device", metavar="ADDRESS")] = "",
    session: Annotated[
        str, typer.Option("--session", metavar="ID", help="Alerts of one are an episode.")
    ] = "",
    severity: Annotated[str, typer.Option("--severity", help="info, warning or critical")] = "warning",
    location: Annotated[str | None, typer.Option("--location", metavar="JSON")] = None,
    meta: Annotated[str | None, typer.Option("--meta", metavar="JSON", help="About the device.")] = None,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Use this id; the same id again is a repeat.")
    ] = None,
    as_: Annotated[str | None, typer.Option("--as", metavar="SENTINEL", help="Report as this one.")] = None,
    wait: Annotated[
        float | None,
        typer.Option("--wait", parser=duration, metavar="10s", help="Until nobody is left to be told."),
    ] = None,
    data: Data = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Report an alert by hand. Needs a running hub.

    Exits with 0 if it was accepted, 6 if it was refused. With --wait: 0 if it went as it should, 1 if nobody
    could be told, 5 if that is still open, as it is while an escalation waits. Of a critical one it is always
    waited for (10 s) whether somebody is told: 0 if so, 1 if nobody is, 5 if that is not known yet.
    """
    import secrets

    from duly.core.monitor.signals import Severity

    if severity not in [one.value for one in Severity]:
        raise CommandFailed(Exit.USAGE, f"--severity is info, warning or critical, not {severity!r}")
    hub = need_hub(data, url, token)
    if as_ is not None:
        hub.token = hub.borrow(as_)
    event: dict[str, Any] = {
        "profile_id": profile_,
        "trigger_reason": reason,
        "device_address": device,
        "session_id": session,
        "severity": severity,
    }
    for name, text in (("location", location), ("device_meta", meta)):
        if text is not None:
            event[name] = _json_or_text(name, text)
    # The time is beside the alert, not in it: the same id with the same words is a repeat, also later.
    now = time.time_ns() // 1_000_000
    frame = {"type": "alert_event", "seq_id": id_ or secrets.token_hex(16), "time": now, "data": event}
    answer = hub.post(f"/v1/messages?wait={wait}" if wait else "/v1/messages", frame)
    code, ack = answer.get("code"), answer.get("ack")
    if code not in (0, 5):
        raise CommandFailed(
            Exit.NOT_ALLOWED if code == 3 else Exit.REFUSED, answer.get("detail") or "it was refused"
        )
    if json:
        print_json(answer)
    else:
        word = "accepted" if code == 0 else f"known already, {answer.get('state', '')}"
        say(f"{word}: {frame['seq_id']}")
        if ack is not None:
            say(f"{tint(ack['state'])}{': ' + ack['detail'] if ack.get('detail') else ''}")
        elif wait:
            note(f"duly: not everybody was told yet; 'duly alert show {frame['seq_id']}' says who was")
    if severity == Severity.CRITICAL.value:
        _insist(hub, str(frame["seq_id"]), 0 if wait else URGENT_SECONDS)
    elif wait and (ack is None or ack["state"] != "done"):
        raise typer.Exit(Exit.UNKNOWN if ack is None or ack["state"] == "unknown" else Exit.FAILED)


def _insist(hub: HubClient, event: str, patience: float) -> None:
    """Exit with an error unless somebody is told of a critical alert within `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        newest = hub.ask(f"/v1/alerts?limit={NEWEST_LOOKED_AT}")["alerts"]
        alert = next((one for one in newest if one["event"] == event), None)
        states = [] if alert is None else [one["state"] for one in alert["deliveries"]]
        if "done" in states:
            return
        open_ = any(state in ("accepted", "sent") for state in states) or "unknown" in states
        if alert is not None and not open_ and alert["state"] not in ("accepted", "sent", "delivered"):
            why = alert.get("detail") or "its profile names nobody"
            note(f"duly: NOBODY WAS TOLD of this critical alert: {why}")
            raise typer.Exit(Exit.FAILED)
        if time.monotonic() > until:
            note(f"duly: nobody has surely been told yet; 'duly alert show {event}' says how it goes on")
            raise typer.Exit(Exit.UNKNOWN)
        time.sleep(0.1)


def _json_or_text(name: str, text: str) -> object:
    """What was written; JSON, if it was meant to be."""
    import msgspec

    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError as problem:
        if text.lstrip()[:1] in ("{", "[", '"'):
            raise CommandFailed(Exit.USAGE, f"{name} is not JSON, but begins like it: {problem}") from None
        return text
    return value


@alert.command("list")
def list_alerts(
    status: Annotated[
        str | None, typer.Option("--status", help="open, acknowledged, resolved or cancelled")
    ] = None,
    sentinel: Sentinel = None,
    limit: Limit = 50,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show the newest alerts."""
    wanted = {"status": status, "sentinel": sentinel, "limit": str(limit)}
    found = do("alert.list", wanted, data, ledger, url, token)["alerts"]
    if json:
        print_json(found)
    elif not found:
        say("no alerts")
    else:
        table(
            ["time", "sentinel", "event", "severity", "status", "told", "reason"],
            [
                [clock(one["accepted_at"]), one["sentinel"], one["event"][:12], one["severity"],
                 one["status"], _told(one), f"{one['reason']} {one['device']}".strip()]
                for one in found
            ],
        )  # fmt: skip


def _told(one: dict[str, Any]) -> str:
    made = one["deliveries"]
    if not made:
        return "nobody" if one.get("detail") else "-"
    asked = [d for d in made if d["state"] != "superseded"]
    return f"{sum(d['state'] == 'done' for d in asked)} of {len(asked)}"


@alert.command("show")
def show_alert(
    event: EventId,
    sentinel: Sentinel = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show one alert with everything that happened to it."""
    _show(do("alert.show", {"event": event, "sentinel": sentinel}, data, ledger, url, token), json)


def _show(one: dict[str, Any], json: bool) -> None:
    import msgspec

    if json:
        print_json(one)
        return
    say(f"{one['severity']}: {one['reason']} {one['device']}".rstrip())
    for name in ("event", "sentinel", "profile"):
        say(f"  {name:<10} {one[name]}")
    say(f"  reported   {clock(one['time'])} by its own account, stored {clock(one['accepted_at'])}")
    by = f" by {_by(one)} at {clock(one['at'])}" if one.get("by") else ""
    say(f"  status     {one['status']}{by}{': ' + one['note'] if one.get('note') else ''}")
    say(f"  messages   {tint(one['state'])}{': ' + one['detail'] if one.get('detail') else ''}")
    for name in ("location", "device_meta", "summary"):
        if name in one:
            say(f"  {name:<10} {msgspec.json.encode(one[name]).decode()}")
    _show_deliveries(one["deliveries"])


@alert.command("ack")
def ack(
    event: EventId,
    by: By = None,
    note: Note = None,
    sentinel: Sentinel = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Say that you take care of it: nobody else is woken up."""
    wanted = {"event": event, "sentinel": sentinel, "by": _me(by), "note": note}
    _say(do("alert.ack", wanted, data, ledger, url, token), json)


@alert.command("resolve")
def resolve(
    event: EventId,
    by: By = None,
    note: Note = None,
    sentinel: Sentinel = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Say that it is over: what has not gone out does not."""
    wanted = {"event": event, "sentinel": sentinel, "by": _me(by), "note": note}
    _say(do("alert.resolve", wanted, data, ledger, url, token), json)


def _say(one: dict[str, Any], json: bool) -> None:
    if json:
        print_json(one)
    else:
        say(f"{one['event']} is {one['status']} by {_by(one) or '?'}")


def _by(one: dict[str, Any]) -> str:
    """The account that said so and, if its client says so, for whom."""
    claimed = f" (for {one['claimed']})" if one.get("claimed") else ""
    return f"{one.get('by', '')}{claimed}"


@alert.command("silence")
def silence(
    lasts: Annotated[
        float | None, typer.Option("--for", parser=duration, metavar="2h", help="How long. [1h]")
    ] = None,
    sentinel: Annotated[str | None, typer.Option("--sentinel", metavar="PATTERN")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="PATTERN")] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="PATTERN")] = None,
    profile_: Annotated[str | None, typer.Option("--profile", metavar="PATTERN")] = None,
    critical: Annotated[
        bool, typer.Option("--critical", help="What is critical, too; otherwise that is told all the same.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the silences.")] = False,
    end: Annotated[str | None, typer.Option("--end", metavar="N", help="End this one.")] = None,
    by: By = None,
    note: Note = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Tell nobody of some alerts for a while; they are stored and listed all the same.

    Patterns are as in a shell: 'lock-*'. What several of them name must all fit.
    """
    if list_:
        found = do("alert.silences", {}, data, ledger, url, token)["silences"]
        if json:
            print_json(found)
        else:
            _show_silences(found)
        return
    if end is not None:
        gone = do("alert.unsilence", {"silence": end}, data, ledger, url, token)
        if not gone["changed"]:
            raise CommandFailed(
                Exit.REFUSED, f"there is no silence {end}; 'duly alert silence --list' shows them"
            )
        if json:
            print_json(gone)
        else:
            say(f"silence {end} has ended")
        return
    wanted = {
        "lasts": str(3_600.0 if lasts is None else lasts),
        "sentinel": sentinel,
        "device": device,
        "reason": reason,
        "profile": profile_,
        "by": _me(by),
        "note": note,
        "critical": "yes" if critical else None,
    }
    made = do("alert.silence", wanted, data, ledger, url, token)
    if json:
        print_json(made)
    else:
        say(f"silence {made['silence']}, until {clock(made['until'])}")


def _show_silences(found: list[dict[str, Any]]) -> None:
    if not found:
        say("nothing is silenced")
        return
    rows = [
        [one["silence"], clock(one["until"]), _by(one),
         " ".join(f"{n}={one[n]}" for n in ("sentinel", "device", "reason", "profile") if n in one)
         + (" (critical, too)" if one.get("critical") else "")]
        for one in found
    ]  # fmt: skip
    table(["silence", "until", "by", "what"], rows)


# ── deliveries ───────────────────────────────────────────────────────────────────────────────────


@deliveries.command("list")
def list_deliveries(
    state: Annotated[
        str | None, typer.Option("--state", help="open, dead, or a state: done, failed, unknown, expired, …")
    ] = None,
    limit: Limit = 50,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show the newest deliveries. 'dead' are those that ended without anybody being told for sure."""
    wanted = {"state": state, "limit": str(limit)}
    found = do("deliveries.list", wanted, data, ledger, url, token)["deliveries"]
    if json:
        print_json(found)
    elif not found:
        say("no deliveries")
    else:
        rows = [[one["event"][:12], *_delivery(one)] for one in found]
        table(["event", "recipient", "round", "state", "attempts", "why"], rows)


@deliveries.command("show")
def show_deliveries(
    event: EventId,
    sentinel: Sentinel = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show the deliveries of one alert."""
    found = do("deliveries.show", {"event": event, "sentinel": sentinel}, data, ledger, url, token)
    if json:
        print_json(found["deliveries"])
    else:
        _show_deliveries(found["deliveries"])


def _show_deliveries(found: list[dict[str, Any]]) -> None:
    if found:
        table(
            ["  recipient", "round", "state", "attempts", "why"],
            [[f"  {one['recipient']}", *_delivery(one)[1:]] for one in found],
        )


def _delivery(one: dict[str, Any]) -> list[str]:
    why = one["error"]
    if "due" in one:
        why = f"next at {clock(one['due'])}{'; ' + why if why else ''}"
    return [one["recipient"], _kind(one["kind"], one["round"]), one["state"], str(one["attempts"]), why]


def _kind(kind: str, round_: int) -> str:
    from duly.core.fanout.plan import FIRST_ROUND
    from duly.core.operations import DeliveryKind

    match kind:
        case "by_hand":
            return f"by hand {round_ - FIRST_ROUND[DeliveryKind.BY_HAND] + 1}"
        case "step":
            return f"escalation {round_}" if round_ else "first"
        case _:
            return kind


@deliveries.command("retry")
def retry(
    event: EventId,
    to: Annotated[str | None, typer.Option("--to", metavar="RECIPIENT", help="This one only.")] = None,
    sentinel: Sentinel = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Try again now what has been tried in vain, or ended badly.

    With --to also what arrived, what was called off, and what waits for its time, like an escalation.
    """
    wanted = {"event": event, "recipient": to, "sentinel": sentinel}
    _tried(do("deliveries.retry", wanted, data, ledger, url, token)["deliveries"], json)


@deliveries.command("edit")
def edit(
    event: EventId,
    recipient: Annotated[str, typer.Argument(metavar="RECIPIENT", help="As 'deliveries show' names it.")],
    send: Annotated[str, typer.Option("--send", metavar="URL", help="Where it goes instead.")],
    sentinel: Sentinel = None,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Send one alert to another address instead."""
    wanted = {"event": event, "recipient": recipient, "url": send, "sentinel": sentinel}
    _tried(do("deliveries.edit", wanted, data, ledger, url, token)["deliveries"], json)


def _tried(found: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(found)
    else:
        _show_deliveries(found)
