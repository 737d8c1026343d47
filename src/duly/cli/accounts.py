"""`duly add remove grant revoke list`: who there is, and who may do what.

The law: the same verbs with and without a running hub. The hub that holds the ledger is asked, so that what
it knows and what is stored never differ; where none runs, the ledger itself is changed.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from duly.cli.common import (
    CommandFailed,
    Data,
    Exit,
    HubUnreachable,
    Json,
    LedgerUrl,
    Token,
    Url,
    box_of,
    clock,
    find_hub,
    note,
    open_to_read,
    print_json,
    say,
    settings_of,
    table,
)
from duly.runtime.files import private_folder

App = Annotated[str, typer.Argument(metavar="APP")]
Device = Annotated[str, typer.Argument(metavar="DEVICE")]


class AccountKind(StrEnum):
    APP = "app"
    DEVICE = "device"
    NODE = "node"
    USER = "user"
    SENTINEL = "sentinel"
    ADMIN = "admin"


def add(
    kind: Annotated[
        AccountKind, typer.Argument(metavar="KIND", help="app, device, node, user, sentinel or admin")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Give an existing one a new token; its old one is void.")
    ] = False,
    key: Annotated[
        str,
        typer.Option(
            "--key", metavar="KEY", help="The public key (ed25519:…) with which a device signs over MQTT."
        ),
    ] = "",
    no_resend: Annotated[
        bool,
        typer.Option(
            "--no-resend",
            help="A device that would do a repeat again: send it each command once, and never anew.",
        ),
    ] = False,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Make an account. Its token is printed once: only a hash of it is kept.

    A device is commanded by the hub alone. A node talks to other nodes over MQTT, without the hub. With --key
    the hub refuses whatever a device says over MQTT without its signature.
    """
    wanted = {"role": kind.value, "name": name} | ({"replace": "yes"} if replace else {})
    wanted |= {"key": key} if key else {}
    wanted |= {"no_resend": "yes"} if no_resend else {}
    made = _do("add", wanted, data, ledger, url, token)
    if json:
        print_json(made)
        return
    note(f"{kind.value} {name} has been added. Its token, which cannot be shown again:")
    say(made["token"])


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Remove an account with all its grants."""
    done = _do("remove", {"name": name}, data, ledger, url, token)
    if not done["changed"]:
        raise CommandFailed(Exit.REFUSED, f"there is nobody named {name}; 'duly list' shows who there is")
    _say(json, done, f"{name} has been removed")


def grant(
    app: App,
    device: Device,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Let an app command a device, and hear what it reports."""
    done = _do("grant", {"app": app, "device": device}, data, ledger, url, token)
    _say(json, done, f"{app} may {'' if done['changed'] else 'already '}command {device}")


def revoke(
    app: App,
    device: Device,
    data: Data = None,
    ledger: LedgerUrl = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Take a grant back."""
    done = _do("revoke", {"app": app, "device": device}, data, ledger, url, token)
    if not done["changed"]:
        raise CommandFailed(Exit.REFUSED, f"{app} had no grant for {device}; 'duly list' shows who may what")
    _say(json, done, f"{app} may no longer command {device}")


def list_(
    data: Data = None, ledger: LedgerUrl = None, url: Url = None, token: Token = None, json: Json = False
) -> None:
    """Show who there is, who may command whom, and who is online."""
    known = _do("list", {}, data, ledger, url, token)
    accounts, grants, online, heard = (known[what] for what in ("accounts", "grants", "online", "heard"))
    silent = known.get("silent", [])
    if json:
        print_json(
            {"accounts": accounts, "grants": grants, "online": online, "heard": heard, "silent": silent}
        )
        return
    if not accounts:
        say("nobody yet; begin with: duly add app phone")
        return
    rows = []
    for one in accounts:
        name, role = one["name"], one["role"]
        watched = role in ("device", "sentinel")
        here = "" if not watched else "?" if online is None else "yes" if name in online else "no"
        here = "SILENT" if name in silent else here
        last = "" if not watched else clock(heard[name]) if name in heard else "never"
        here = "disabled" if one["disabled"] else here
        rows.append([name, role, here, last, _relations(name, role, grants)])
    table(["name", "kind", "online", "last heard of", "grants"], rows)
    if online is None:
        note(f"(no hub runs in {settings_of(data).data}: read from the ledger)")


def _relations(name: str, role: str, grants: dict[str, list[str]]) -> str:
    if role == "app":
        devices = grants.get(name)
        return f"commands {', '.join(devices)}" if devices else "may command nothing yet"
    if role == "device":
        apps = [app for app, devices in grants.items() if name in devices]
        return f"commanded by {', '.join(apps)}" if apps else "commanded by nobody yet"
    return "may command everything" if role == "admin" else ""


def _say(json: bool, done: dict[str, Any], sentence: str) -> None:
    if json:
        print_json(done)
    else:
        say(sentence)


def _do(
    verb: str,
    wanted: dict[str, str],
    data: str | None,
    ledger: str | None,
    url: str | None,
    token: str | None,
) -> dict[str, Any]:
    hub = None if ledger is not None else find_hub(data, url, token)
    if hub is not None:
        try:
            answer: dict[str, Any] = hub.ask(f"/v1/admin/{verb}", wanted)
            return answer
        except HubUnreachable:
            if not hub.local:
                raise  # its note may be of one that was killed: the ledger knows
    settings = settings_of(data, ledger)
    if verb != "list" and not settings.ledger:
        private_folder(Path(settings.data))
    return asyncio.run(_do_in_ledger(verb, wanted, data, ledger))


async def _do_in_ledger(
    verb: str, wanted: dict[str, str], data: str | None, ledger: str | None
) -> dict[str, Any]:
    import msgspec

    from duly.apps.chat.account_removal import remove_from_chat
    from duly.identity.accounts import Accounts, administer
    from duly.storage import open_ledger

    if verb == "list":
        opening = open_to_read(data, ledger)
    else:
        opening = open_ledger(settings_of(data, ledger).ledger_url)
    async with await opening as book:
        settings = settings_of(data, ledger)
        accounts = Accounts(book, None if verb != "add" else await box_of(book, settings, reading=False))
        await accounts.refresh()
        if verb == "add":
            await remove_from_chat(book, wanted["name"])
        result: dict[str, Any] = msgspec.to_builtins(await administer(accounts, verb, wanted))
        if verb == "remove":
            await remove_from_chat(book, wanted["name"])
        if verb == "list":
            from duly.apps.alerts.heartbeats import presence
            from duly.apps.gateway.pushes import last_heard

            devices = [one["name"] for one in result["accounts"] if one["role"] == "device"]
            sentinels = {one["name"] for one in result["accounts"] if one["role"] == "sentinel"}
            seen = await presence(book, sentinels)
            heard = await last_heard(book, devices) | seen["heard"]
            result |= {"online": None, "heard": heard, "silent": seen["silent"]}
        return result
