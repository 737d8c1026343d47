"""`duly dashboard` and `duly audit`: who may use the page, and what was done there.

The law: a link and a password are shown or asked for once, and only their hashes are kept.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from duly.cli.common import (
    CommandFailed,
    Exit,
    JsonObject,
    box_of,
    clock,
    count,
    note,
    print_json,
    say,
    say_changed,
    table,
)
from duly.cli.options import Json, LedgerOptions, grouped

dashboard = typer.Typer(
    help="The web page of the hub: links, passwords and sessions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
audit = typer.Typer(help="Who has done what: the audit chain.", no_args_is_help=True, rich_markup_mode=None)


class PageRole(StrEnum):
    """The roles on the page."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


RoleOption = Annotated[
    PageRole, typer.Option("--role", metavar="ROLE", help="viewer sees, operator acts, admin also manages.")
]
Name = Annotated[str, typer.Argument(metavar="NAME")]


@dashboard.command("link")
@grouped
def link(
    role: RoleOption = PageRole.ADMIN,
    name: Annotated[
        str,
        typer.Option("--name", metavar="NAME", help="The person who uses it. [local]", show_default=False),
    ] = "",
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Print a link that opens the page once.

    It is valid for 15 minutes. Everything that is done in its session is recorded under its name.
    """
    made = _do("dashboard.link", {"role": role.value} | ({"name": name} if name else {}), at)
    if json:
        print_json(made)
        return
    say(made["url"])
    note(f"it works once, within {made['seconds'] // 60} minutes, for {made['name']} as {made['role']}")


@dashboard.command("password")
@grouped
def password(
    name: Name, role: RoleOption = PageRole.OPERATOR, *, at: LedgerOptions, json: Json = False
) -> None:
    """Set the password with which a person logs in to the page.

    The password is asked for, or read from standard input if that is not a terminal. Sessions of that name
    end.
    """
    from duly.identity.account_names import check_name
    from duly.identity.passwords import check_password

    check_name(name)
    if sys.stdin.isatty():
        secret = typer.prompt("password", hide_input=True, confirmation_prompt=True)
    else:
        secret = sys.stdin.readline().rstrip("\n")
    check_password(secret)  # before anything is made: a refusal leaves no data folder
    done = _do("dashboard.password", {"name": name, "role": role.value, "password": secret}, at)
    if json:
        print_json(done)
    else:
        say(f"{name} may log in to the page as {role.value}")


@dashboard.command("users")
@grouped
def users(*, at: LedgerOptions, json: Json = False) -> None:
    """Show who has a password for the page."""
    found = _do("dashboard.users", {}, at)
    if json:
        print_json(found)
    elif not found["users"]:
        say("no one has a password yet; 'duly dashboard link' opens the page without one")
    else:
        table(["name", "role"], [[name, role] for name, role in found["users"].items()])


@dashboard.command("remove")
@grouped
def remove(name: Name, *, at: LedgerOptions, json: Json = False) -> None:
    """Remove a person's password, and end the sessions of that name."""
    done = _do("dashboard.remove", {"name": name}, at)
    say_changed(done, f"{name} may no longer log in to the page", f"{name} has no password", json=json)


@dashboard.command("logout")
@grouped
def logout(
    name: Annotated[str, typer.Argument(metavar="[NAME]", show_default=False)] = "",
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """End all sessions of the page, or those of one name."""
    done = _do("dashboard.logout", {"name": name} if name else {}, at)
    if json:
        print_json(done)
    else:
        say(f"{count(done['ended'], 'session')} ended")


@audit.command("list")
@grouped
def list_(
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="How many entries.")] = 50,
    before: Annotated[
        int,
        typer.Option("--before", metavar="N", help="Only entries before this one. [all]", show_default=False),
    ] = 0,
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Show who has done what, newest first."""
    found = _do("audit.list", {"limit": str(limit), "before": str(before)}, at)
    if json:
        print_json(found)
        return
    if not found["entries"]:
        say("nothing is recorded yet")
        return
    rows = [
        [
            str(one["n"]),
            clock(one["at"]),
            f"{one['actor']} ({one['role']})",
            one["action"],
            one["target"],
            one["result"],
            one["detail"],
        ]
        for one in found["entries"]
    ]
    table(["n", "time", "who", "what", "to what", "result", "note"], rows)


@audit.command("verify")
@grouped
def verify(
    head: Annotated[
        str,
        typer.Option(
            "--head",
            metavar="HASH",
            help="A hash that an earlier verification printed; the chain must contain it. [none]",
            show_default=False,
        ),
    ] = "",
    *,
    at: LedgerOptions,
    json: Json = False,
) -> None:
    """Check that no entry of the audit chain was changed, removed or inserted.

    Store the printed hash elsewhere, and pass it as --head the next time: a chain that was cut off or
    rewritten is then noticed as well. Exits with 1 if something is wrong.
    """
    from duly.server.audit_chain import NOT_A_HASH, is_hash

    head = head.strip().lower()
    if head and not is_hash(head):
        raise typer.BadParameter(NOT_A_HASH, param_hint="--head")
    found = _do("audit.verify", {"head": head} if head else {}, at)
    if json:
        print_json(found)
    elif found["problem"] is None:
        say(
            f"{count(found['entries'], 'entry', 'entries')}, unbroken; "
            f"the hash of the last one is {found['head']}"
        )
    if found["problem"] is not None:
        raise CommandFailed(Exit.FAILED, f"the audit chain is broken: {found['problem']}")


def _do(verb: str, wanted: dict[str, str], at: LedgerOptions) -> JsonObject:
    reads = verb in ("audit.list", "audit.verify", "dashboard.users")
    return at.ask(verb, wanted, lambda: _in_ledger(verb, wanted, at, reads), reads=reads)


async def _in_ledger(verb: str, wanted: dict[str, str], at: LedgerOptions, reads: bool) -> JsonObject:
    from duly.server.audit_chain import AuditChain
    from duly.server.dashboard.access import DashboardAccess
    from duly.server.dashboard.verbs import administer

    settings = at.settings
    host = f"[{settings.listen}]" if ":" in settings.listen else settings.listen
    scheme = "https" if settings.tls_cert else "http"
    base = settings.public_url or f"{scheme}://{host}:{settings.port}"
    async with await at.open(reads=reads) as book:
        box = await box_of(book, settings, reading=reads) if verb == "dashboard.password" else None
        access = DashboardAccess(book, box)
        try:
            return await administer(access, AuditChain(book), base, verb, wanted)
        finally:
            access.close()
