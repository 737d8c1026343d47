"""`duly alert deliveries`: alerts, and the messages about them.

The law: the verbs work with and without a running hub. The hub that holds the ledger is asked; where none
runs, the ledger itself is read and changed, and the next hub continues from there. Addresses are never shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from duly.cli.alert_outcome import URGENT_SECONDS, AlertOutcome, wait_until_told, waited
from duly.cli.common import (
    CommandFailed,
    Exit,
    JsonObject,
    box_of,
    clock,
    note,
    print_json,
    say,
    say_changed,
    table,
    tint,
)
from duly.cli.options import HubOptions, Json, LedgerOptions, Limit, MessageId, grouped, length

alert = typer.Typer(help="Report, show and close alerts.", no_args_is_help=True)
deliveries = typer.Typer(help="Show the messages about alerts, and send them again.", no_args_is_help=True)

LOCAL: Final = "local"
"""The account of a reader of the data folder, as the hub names it."""

EventId = Annotated[str, typer.Argument(metavar="EVENT", help="The event's id, or the beginning of it.")]
SentinelOption = Annotated[
    str | None, typer.Option("--sentinel", metavar="NAME", help="The sentinel that reported it. [any]")
]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="NAME",
        help="The person who decides; the account is recorded anyway. [your login name]",
    ),
]
NoteOption = Annotated[str | None, typer.Option("--note", metavar="TEXT", help="A note for others. [none]")]


def do(verb: str, wanted: Mapping[str, str | None], at: LedgerOptions) -> JsonObject:
    """Ask the running hub; if none runs, work on the ledger."""
    said = {name: value for name, value in wanted.items() if value is not None}
    return at.ask(verb, said, lambda: _do_in_ledger(verb, said, at), reads=verb in _READING)


_READING = frozenset(
    {
        "alert.list", "alert.show", "alert.silences", "deliveries.list", "deliveries.show", "profile.list",
        "profile.show",
    }
)  # fmt: skip


async def _do_in_ledger(verb: str, wanted: dict[str, str], at: LedgerOptions) -> JsonObject:
    import msgspec

    from duly.apps.alerts.operations import AlertOperations
    from duly.apps.alerts.profiles import Profiles
    from duly.apps.alerts.verbs import administer
    from duly.wire import any_json

    reads = verb in _READING
    async with await at.open(reads=reads) as book:
        box = await box_of(book, at.settings, reading=reads)
        profiles = Profiles(book, box=box)
        await profiles.refresh()
        result = await administer(AlertOperations(book, profiles), profiles, verb, wanted, LOCAL)
        return any_json.read_object(msgspec.json.encode(result))


def _me(by: str | None) -> str:
    import getpass

    try:
        return by or getpass.getuser()
    except (OSError, KeyError):  # this user has no name
        return ""


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AlertOptions:
    """The options that describe an alert."""

    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="The profile that says who is told.")
    ] = "default"
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="ADDRESS", help="The device it is about. [none]", show_default=False
        ),
    ] = ""
    session: Annotated[
        str,
        typer.Option(
            "--session",
            metavar="ID",
            help="Alerts of one session are one episode. [none]",
            show_default=False,
        ),
    ] = ""
    severity: Annotated[str, typer.Option("--severity", help="info, warning or critical.")] = "warning"
    location: Annotated[
        str | None, typer.Option("--location", metavar="JSON", help="Where it happened. [none]")
    ] = None
    meta: Annotated[
        str | None, typer.Option("--meta", metavar="JSON", help="More about the device. [none]")
    ] = None

    def event(self, reason: str) -> JsonObject:
        """Return the alert in the form that the hub accepts."""
        from duly.core.monitor.signals import Severity

        if self.severity not in [one.value for one in Severity]:
            raise CommandFailed(Exit.USAGE, f"--severity is info, warning or critical, not {self.severity!r}")
        event: JsonObject = {
            "profile_id": self.profile,
            "trigger_reason": reason,
            "device_address": self.device,
            "session_id": self.session,
            "severity": self.severity,
        }
        for name, text in (("location", self.location), ("device_meta", self.meta)):
            if text is not None:
                event[name] = _json_or_text(name, text)
        return event


@alert.command("trigger")
@grouped
def trigger(
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Why: disconnect, smoke, panic, …")],
    id_: MessageId = None,
    as_: Annotated[
        str | None,
        typer.Option("--as", metavar="SENTINEL", help="Report as this sentinel. [as the hub's owner]"),
    ] = None,
    wait: Annotated[
        float | None,
        length("--wait", "How long to wait until everyone is told. [do not wait]", metavar="10s"),
    ] = None,
    *,
    about: AlertOptions,
    at: HubOptions,
    json: Json = False,
) -> None:
    """Report an alert by hand. Needs a running hub.

    Exits with 0 if it was accepted, 6 if it was refused. With --wait: 0 if every recipient was told, 1 if
    none could be told, 5 if that is not known yet, as while an escalation waits. For a critical alert it
    always waits (10 s) until a person is told: 0 if so, 1 if not, 5 if that is not known yet. With --json,
    `told` says the same: true, false or null.
    """
    import secrets

    data, hub = about.event(reason), at.need()
    if as_ is not None:
        hub.token = hub.temporary_token(as_)
    # The time is beside the alert, not in it: the same id with the same words is a repeat, also later.
    id_, now = id_ or secrets.token_hex(16), time.time_ns() // 1_000_000
    frame = {"type": "alert_event", "seq_id": id_, "time": now, "data": data}
    answer = hub.post(f"/v1/messages?wait={wait}" if wait else "/v1/messages", frame)
    code, ack = answer.get("code"), answer.get("ack")
    if code not in (0, 5):
        raise CommandFailed(
            Exit.NOT_ALLOWED if code == 3 else Exit.REFUSED, answer.get("detail") or "it was refused"
        )
    if not json:
        word = "accepted" if code == 0 else f"known already, {answer.get('state', '')}"
        say(f"{word}: {id_}")
        if ack is not None:
            say(f"{tint(ack['state'])}{': ' + ack['detail'] if ack.get('detail') else ''}")
    found: AlertOutcome | None = None
    if about.severity == "critical":
        found = wait_until_told(hub, id_, 0 if wait else URGENT_SECONDS)
    elif wait:
        found = waited(id_, ack)
    if json:
        print_json(answer if found is None else answer | found.as_json)
    elif found is not None and found.problem:
        note(f"duly: {found.problem}")
    raise typer.Exit(Exit.OK if found is None else found.exit)


def _json_or_text(name: str, text: str) -> object:
    """Return the JSON value of a text, or the text itself if it does not look like JSON."""
    import msgspec

    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError as problem:
        if text.lstrip()[:1] in ("{", "[", '"'):
            raise CommandFailed(Exit.USAGE, f"{name} looks like JSON, but is not: {problem}") from None
        return text
    return value


@alert.command("list")
@grouped
def list_alerts(
    status: Annotated[
        str | None, typer.Option("--status", help="open, acknowledged, resolved or cancelled. [any]")
    ] = None,
    sentinel: SentinelOption = None,
    limit: Limit = 50,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show the newest alerts."""
    wanted = {"status": status, "sentinel": sentinel, "limit": str(limit)}
    found = do("alert.list", wanted, at)["alerts"]
    if json:
        print_json(found)
    elif not found:
        say("no alerts")
    else:
        table(
            ["time", "sentinel", "event", "severity", "status", "told", "reason"],
            [
                [_came(one), one["sentinel"], one["event"][:12], one["severity"],
                 one["status"], _told(one), f"{one['reason']} {one['device']}".strip()]
                for one in found
            ],
        )  # fmt: skip


def _came(one: JsonObject) -> str:
    """Return when an alert came, and whether it is known when it happened."""
    return f"{clock(one['accepted_at'])}{' undated' if one.get('undated') else ''}"


def _reported(one: JsonObject) -> str:
    """Return when an alert happened, as far as its sentinel's clock can be believed, and when it came."""
    if not one.get("undated"):
        return f"{clock(one['time'])} by its own account, stored {clock(one['accepted_at'])}"
    said = one.get("said_time")
    why = "it gave no time" if said is None else f"its clock said {said} ms since 1970, which is not believed"
    return f"{clock(one['accepted_at'])}, when it came: {why}"


def _told(one: JsonObject) -> str:
    made = one["deliveries"]
    if not made:
        return "none" if one.get("detail") else "-"
    asked = [d for d in made if d["state"] != "superseded"]
    return f"{sum(d['state'] == 'done' for d in asked)} of {len(asked)}"


@alert.command("show")
@grouped
def show_alert(
    event: EventId,
    sentinel: SentinelOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show one alert with everything that happened to it."""
    _show(do("alert.show", {"event": event, "sentinel": sentinel}, at), json)


def _show(one: JsonObject, json: bool) -> None:
    import msgspec

    if json:
        print_json(one)
        return
    say(f"{one['severity']}: {one['reason']} {one['device']}".rstrip())
    for name in ("event", "sentinel", "profile"):
        say(f"  {name:<10} {one[name]}")
    say(f"  reported   {_reported(one)}")
    by = f" by {_by(one)} at {clock(one['at'])}" if one.get("by") else ""
    say(f"  status     {one['status']}{by}{': ' + one['note'] if one.get('note') else ''}")
    say(f"  messages   {tint(one['state'])}{': ' + one['detail'] if one.get('detail') else ''}")
    for name in ("location", "device_meta", "summary"):
        if name in one:
            say(f"  {name:<10} {msgspec.json.encode(one[name]).decode()}")
    _show_deliveries(one["deliveries"])


@dataclass(frozen=True)
class DecisionOptions:
    """The options of a decision about an alert: the person who decides, and the reason."""

    by: By = None
    note: NoteOption = None
    sentinel: SentinelOption = None


@alert.command("ack")
@grouped
def ack(event: EventId, *, said: DecisionOptions, at: LedgerOptions, json: Json = False) -> None:
    """Acknowledge an alert: no further recipient is notified."""
    _decide("alert.ack", event, said, at, json)


@alert.command("resolve")
@grouped
def resolve(event: EventId, *, said: DecisionOptions, at: LedgerOptions, json: Json = False) -> None:
    """Close an alert: messages about it that have not gone out are not sent."""
    _decide("alert.resolve", event, said, at, json)


def _decide(verb: str, event: str, said: DecisionOptions, at: LedgerOptions, json: bool) -> None:
    wanted = {"event": event, "sentinel": said.sentinel, "by": _me(said.by), "note": said.note}
    _say(do(verb, wanted, at), json)


def _say(one: JsonObject, json: bool) -> None:
    if json:
        print_json(one)
    else:
        say(f"{one['event']} is {one['status']} by {_by(one) or '?'}")


def _by(one: JsonObject) -> str:
    """Return the account that decided and, if its client names one, the person."""
    claimed = f" (for {one['claimed']})" if one.get("claimed") else ""
    return f"{one.get('by', '')}{claimed}"


@alert.command("silence")
@grouped
def silence(
    lasts: Annotated[float | None, length("--for", "How long. [1h]", metavar="2h")] = None,
    sentinel: Annotated[
        str | None, typer.Option("--sentinel", metavar="PATTERN", help="Of these sentinels. [all]")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="PATTERN", help="Of these devices. [all]")
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="PATTERN", help="With these reasons. [all]")
    ] = None,
    profile_: Annotated[
        str | None, typer.Option("--profile", metavar="PATTERN", help="With these profiles. [all]")
    ] = None,
    critical: Annotated[bool, typer.Option("--critical", help="Silence critical alerts, too.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the silences instead.")] = False,
    end: Annotated[
        str | None, typer.Option("--end", metavar="N", help="End this silence instead. [none]")
    ] = None,
    by: By = None,
    note: NoteOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Send no messages about some alerts for a while; they are stored and listed all the same.

    Patterns are as in a shell: 'lock-*'. An alert must match all patterns that are given.
    """
    if list_:
        found = do("alert.silences", {}, at)["silences"]
        if json:
            print_json(found)
        else:
            _show_silences(found)
        return
    if end is not None:
        _end_silence(end, at, json=json)
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
    made = do("alert.silence", wanted, at)
    if json:
        print_json(made)
    else:
        say(f"silence {made['silence']}, until {clock(made['until'])}")


def _end_silence(end: str, at: LedgerOptions, *, json: bool) -> None:
    gone = do("alert.unsilence", {"silence": end}, at)
    missing = f"there is no silence {end}; 'duly alert silence --list' shows them"
    say_changed(gone, f"silence {end} has ended", missing, json=json)


def _show_silences(found: list[JsonObject]) -> None:
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
@grouped
def list_deliveries(
    state: Annotated[
        str | None,
        typer.Option("--state", help="open, dead, or a state: done, failed, unknown, expired, … [any]"),
    ] = None,
    limit: Limit = 50,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show the newest deliveries. 'dead' are those that ended without having surely arrived."""
    wanted = {"state": state, "limit": str(limit)}
    found = do("deliveries.list", wanted, at)["deliveries"]
    if json:
        print_json(found)
    elif not found:
        say("no deliveries")
    else:
        rows = [[one["event"][:12], *_delivery(one)] for one in found]
        table(["event", "recipient", "round", "state", "attempts", "why"], rows)


@deliveries.command("show")
@grouped
def show_deliveries(
    event: EventId,
    sentinel: SentinelOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show the deliveries of one alert."""
    found = do("deliveries.show", {"event": event, "sentinel": sentinel}, at)
    if json:
        print_json(found["deliveries"])
    else:
        _show_deliveries(found["deliveries"])


def _show_deliveries(found: list[JsonObject]) -> None:
    if found:
        table(
            ["  recipient", "round", "state", "attempts", "why"],
            [[f"  {one['recipient']}", *_delivery(one)[1:]] for one in found],
        )


def _delivery(one: JsonObject) -> list[str]:
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
@grouped
def retry(
    event: EventId,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="RECIPIENT", help="Only to this recipient. [all that failed]"),
    ] = None,
    sentinel: SentinelOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Retry deliveries that are failing or have failed.

    With --to, also one that arrived, was cancelled, or is not due yet, such as an escalation.
    """
    wanted = {"event": event, "recipient": to, "sentinel": sentinel}
    _tried(do("deliveries.retry", wanted, at)["deliveries"], json)


@deliveries.command("edit")
@grouped
def edit(
    event: EventId,
    recipient: Annotated[
        str, typer.Argument(metavar="RECIPIENT", help="The recipient, as 'deliveries show' names it.")
    ],
    send: Annotated[str, typer.Option("--send", metavar="URL", help="The address to use instead.")],
    sentinel: SentinelOption = None,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Send one alert to another address instead."""
    wanted = {"event": event, "recipient": recipient, "url": send, "sentinel": sentinel}
    _tried(do("deliveries.edit", wanted, at)["deliveries"], json)


def _tried(found: list[JsonObject], json: bool) -> None:
    if json:
        print_json(found)
    else:
        _show_deliveries(found)
