"""`duly acl mosquitto emqx rabbitmq nats test`: rules for brokers, and a test whether a broker enforces them.

The law: the rules, and nothing else, go to stdout, ready to be used. `test` exits with 1 if the broker allows
anything that it should block, or blocks anything that it should allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from duly.cli.common import CommandFailed, Exit, count, print_json, say, table
from duly.cli.options import Json, Prefix, duration

if TYPE_CHECKING:
    from duly.broker.verify import AclFinding

app = typer.Typer(help="Rules for brokers, and a test of them.", no_args_is_help=True)

UsersOption = Annotated[
    str,
    typer.Option(
        "--users", metavar="A,B", help="The nodes; needed for RabbitMQ and NATS. [none]", show_default=False
    ),
]
Admins = Annotated[
    str,
    typer.Option(
        "--admins", metavar="X,Y", help="Accounts that may do everything. [none]", show_default=False
    ),
]
HubOption = Annotated[
    str,
    typer.Option(
        "--hub",
        metavar="NAME",
        help="The account of a hub: then users are its devices, unless named as nodes. [no hub]",
        show_default=False,
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        "--devices",
        metavar="C,D",
        help="The hub's devices; needed for RabbitMQ and NATS. [none]",
        show_default=False,
    ),
]
Passwords = Annotated[
    typer.FileText | None,
    typer.Option("--passwords", metavar="FILE", help="Lines NAME:PASSWORD; - for stdin. [none]"),
]
NODES = "nodes"


@app.command("mosquitto")
def mosquitto(
    users: UsersOption = "",
    prefix: Prefix = NODES,
    hub: HubOption = "",
    admins: Admins = "",
    json: Json = False,
) -> None:
    """Print an acl_file for Mosquitto. It holds for all users, also later ones: nodes, or with --hub
    devices."""
    _print("mosquitto", prefix, users, admins, None, json, hub=hub)


@app.command("emqx")
def emqx(
    users: UsersOption = "",
    prefix: Prefix = NODES,
    hub: HubOption = "",
    admins: Admins = "",
    json: Json = False,
) -> None:
    """Print an acl.conf for EMQX 5. It holds for all users, also later ones: nodes, or with --hub devices."""
    _print("emqx", prefix, users, admins, None, json, hub=hub)


@app.command("rabbitmq")
def rabbitmq(
    users: UsersOption = "",
    devices: Devices = "",
    prefix: Prefix = NODES,
    hub: HubOption = "",
    admins: Admins = "",
    json: Json = False,
) -> None:
    """Print a script of rabbitmqctl calls, for users that exist."""
    _print("rabbitmq", prefix, users, admins, None, json, hub=hub, devices=devices)


@app.command("nats")
def nats(
    users: UsersOption = "",
    devices: Devices = "",
    prefix: Prefix = NODES,
    hub: HubOption = "",
    admins: Admins = "",
    passwords: Passwords = None,
    json: Json = False,
) -> None:
    """Print an accounts block for a nats-server, with these users only. Passwords are written as bcrypt
    hashes; a user without one in the file cannot log in until you add one."""
    _print("nats", prefix, users, admins, passwords, json, hub=hub, devices=devices)


@app.command("test")
def try_(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            envvar="DULY_MQTT",
            help="mqtt://OBSERVER:PASSWORD@HOST; the observer must be allowed everything.",
        ),
    ],
    user: Annotated[
        list[str] | None,
        typer.Option(
            "--user", metavar="NAME:PASSWORD", help="A node to test with; at least two in all. [none]"
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="NAME:PASSWORD", help="A device of a hub to test with. [none]"),
    ] = None,
    passwords: Passwords = None,
    prefix: Prefix = NODES,
    patience: Annotated[
        str,
        typer.Option("--patience", metavar="TIME", help="How long an allowed message may take to arrive."),
    ] = "5s",
    everything: Annotated[bool, typer.Option("--all", help="Also show rules that hold.")] = False,
    json: Json = False,
) -> None:
    """Try every allowed and forbidden operation on a live broker, and show which rules do not hold.

    Nodes on that broker get a few messages that they refuse as malformed; nothing else is left behind.
    """
    from duly.broker.verify import BrokerLogin, check
    from duly.core.acl import AccountClass
    from duly.errors import ConnectionLost, ConnectionRefused
    from duly.transports.mqtt.address import BrokerAddress

    logins = [BrokerLogin(*_login(each), AccountClass.DEVICE) for each in device or ()]
    logins += [BrokerLogin(*_login(each)) for each in (*(user or ()), *_lines(passwords))]
    address = BrokerAddress.parse(url)
    users = [login for login in logins if login.name != address.username]
    try:
        found = asyncio.run(check(address, users, prefix, patience=duration(patience)))
    except ConnectionLost as problem:
        raise CommandFailed(Exit.UNREACHABLE, str(problem)) from None
    except ConnectionRefused as problem:
        raise CommandFailed(Exit.NOT_ALLOWED, str(problem)) from None
    shown = [one for one in found if everything or not one.ok]
    wrong = sum(not one.ok for one in found)
    if json:
        print_json({"ok": not wrong, "tried": len(found), "findings": [_row(one) for one in shown]})
    else:
        _show(shown)
        who = " and ".join(login.name for login in users)
        outcome = f"{wrong} not as the rules say" if wrong else "all as the rules say"
        say(f"{count(len(found), 'operation')} tried as {who}: {outcome}")
    raise typer.Exit(Exit.FAILED if wrong else Exit.OK)


def _show(found: Sequence[AclFinding]) -> None:
    if found:
        head = ("", "USER", "DOES", "TOPIC", "")
        table(head, ((f.verdict, f.user or "(anonymous)", f.act, f.topic, f.detail) for f in found))


def _row(finding: AclFinding) -> dict[str, object]:
    import msgspec

    return {"verdict": finding.verdict} | msgspec.structs.asdict(finding)


def _print(
    broker: str,
    prefix: str,
    users: str,
    admins: str,
    passwords: typer.FileText | None,
    json: bool,
    *,
    hub: str = "",
    devices: str = "",
) -> None:
    from duly.broker.acl_dialects import LANGUAGES, RulesRequest

    given = dict(_login(each) for each in _lines(passwords))
    others = [*_names(admins), *_names(devices), hub]
    wanted = RulesRequest(
        prefix=prefix,
        users=list(dict.fromkeys([*_names(users), *(name for name in given if name not in others)])),
        admins=_names(admins),
        passwords={name: _hashed(password) for name, password in given.items()},
        devices=_names(devices),
        hub=hub,
    )
    rules = LANGUAGES[broker](wanted)
    if json:
        print_json({"broker": broker, "rules": rules})
    else:
        say(*rules.rstrip("\n").split("\n"))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _login(text: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not colon or not name or not password:
        raise CommandFailed(Exit.USAGE, "write a login as NAME:PASSWORD")
    return name, password


def _lines(file: typer.FileText | None) -> list[str]:
    return [] if file is None else [line.rstrip("\n") for line in file if line.strip()]


def _hashed(password: str) -> str:
    import bcrypt

    return bcrypt.hashpw(password.encode(), bcrypt.gensalt()).decode()
