"""`duly add remove grant revoke list`: accounts, and what each may do.

The law: the verbs work with and without a running hub. The hub that holds the ledger is asked, so that its
memory and the ledger never differ; where none runs, the ledger itself is changed.
"""

from __future__ import annotations

from typing import Annotated

import typer

from duly.cli.common import (
    JsonObject,
    box_of,
    clock,
    note,
    print_json,
    say,
    say_changed,
    table,
)
from duly.cli.options import Json, LedgerOptions, grouped
from duly.identity.model import Role

AppArgument = Annotated[str, typer.Argument(metavar="APP")]
DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE")]


@grouped
def add(
    kind: Annotated[
        Role,
        typer.Argument(metavar="KIND", help="app, device, node, user, sentinel, admin or monitor."),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Give an existing account a new token; the old one ends.")
    ] = False,
    key: Annotated[
        str,
        typer.Option(
            "--key",
            metavar="KEY",
            help="The public key (ed25519:…) with which a device signs over MQTT; 'shared' makes a secret "
            "of the device and the hub (HMAC), for small devices. [none]",
            show_default=False,
        ),
    ] = "",
    no_resend: Annotated[
        bool,
        typer.Option(
            "--no-resend",
            help="Send each command to the device only once: for firmware that would run a repeat.",
        ),
    ] = False,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Create an account, and print its token once: only a hash of it is kept.

    A device is commanded by the hub alone. A node talks to other nodes over MQTT, without the hub. A monitor
    reads metrics, as Prometheus does. With --key the hub refuses every MQTT message of the device that is not
    signed with that key. --key shared prints the key after the token, once.
    """
    wanted = {"role": kind.value, "name": name} | ({"replace": "yes"} if replace else {})
    wanted |= {"key": key} if key else {}
    wanted |= {"no_resend": "yes"} if no_resend else {}
    made = _do("add", wanted, at)
    if json:
        print_json(made)
        return
    note(f"{kind.value} {name} has been added. Its token, which cannot be shown again:")
    say(made["token"])
    if "key" in made:
        note("The key that it signs with, shared with the hub, which cannot be shown again either:")
        say(made["key"])


@grouped
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Remove an account with all its grants."""
    done = _do("remove", {"name": name}, at)
    missing = f"there is no account {name}; 'duly list' shows all accounts"
    say_changed(done, f"{name} has been removed", missing, json=json)


@grouped
def grant(
    app: AppArgument,
    device: DeviceArgument,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Let an app command a device, and receive what it pushes."""
    done = _do("grant", {"app": app, "device": device}, at)
    _say(json, done, f"{app} may {'' if done['changed'] else 'already '}command {device}")


@grouped
def revoke(
    app: AppArgument,
    device: DeviceArgument,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Take a grant back."""
    done = _do("revoke", {"app": app, "device": device}, at)
    missing = f"{app} had no grant for {device}; 'duly list' shows all grants"
    say_changed(done, f"{app} may no longer command {device}", missing, json=json)


@grouped
def list_(*, at: LedgerOptions, json: Json = False) -> None:
    """Show all accounts: what each may command, and whether it is online."""
    known = _do("list", {}, at)
    accounts, grants, online, heard = (known[what] for what in ("accounts", "grants", "online", "heard"))
    silent = known.get("silent", [])
    if json:
        print_json(
            {"accounts": accounts, "grants": grants, "online": online, "heard": heard, "silent": silent}
        )
        return
    if not accounts:
        say("no accounts yet; begin with: duly add app phone")
        return
    rows = []
    for one in accounts:
        name, role = one["name"], one["role"]
        watched = role in ("device", "sentinel")
        here = "" if not watched else "?" if online is None else "yes" if name in online else "no"
        here = "SILENT" if name in silent else here
        last = "" if not watched else clock(heard[name]) if name in heard else "never"
        rows.append([name, role, here, last, _relations(name, role, grants)])
    table(["name", "kind", "online", "last heard of", "grants"], rows)
    if online is None:
        hub = "" if at.ledger else f"no hub runs in {at.settings.data}: "
        note(f"({hub}read from the ledger, which does not know who is online)")


def _relations(name: str, role: str, grants: dict[str, list[str]]) -> str:
    if role == "app":
        devices = grants.get(name)
        return f"commands {', '.join(devices)}" if devices else "may command nothing yet"
    if role == "device":
        apps = [app for app, devices in grants.items() if name in devices]
        return f"commanded by {', '.join(apps)}" if apps else "no app may command it yet"
    return "may command everything" if role == "admin" else ""


def _say(json: bool, done: JsonObject, sentence: str) -> None:
    if json:
        print_json(done)
    else:
        say(sentence)


def _do(verb: str, wanted: dict[str, str], at: LedgerOptions) -> JsonObject:
    return at.ask(verb, wanted, lambda: _do_in_ledger(verb, wanted, at), reads=verb == "list")


async def _do_in_ledger(verb: str, wanted: dict[str, str], at: LedgerOptions) -> JsonObject:
    import msgspec

    from duly.apps.chat.account_removal import remove_from_chat
    from duly.identity.accounts import Accounts, administer

    async with await at.open(reads=verb == "list") as book:
        box = None if verb != "add" else await box_of(book, at.settings, reading=False)
        accounts = Accounts(book, box)
        await accounts.refresh()
        if verb == "add":
            await remove_from_chat(book, wanted["name"])
        result: JsonObject = msgspec.to_builtins(await administer(accounts, verb, wanted))
        if verb == "remove":
            await remove_from_chat(book, wanted["name"])
        if verb == "list":
            from duly.apps.alerts.heartbeats import presence
            from duly.apps.gateway.device_list import DeviceList

            devices = [one["name"] for one in result["accounts"] if one["role"] == "device"]
            sentinels = {one["name"] for one in result["accounts"] if one["role"] == "sentinel"}
            seen = await presence(book, sentinels)
            heard = await DeviceList(book, accounts, lambda _: False).last_heard(devices) | seen["heard"]
            result |= {"online": None, "heard": heard, "silent": seen["silent"]}
        return result
