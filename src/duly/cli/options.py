"""The options of the command line, each declared once.

The laws. An option has one name, one meaning and one help text wherever it appears; its help ends with its
default in brackets. Options that always go together are a group: a dataclass whose fields are the options. A
verb takes a group as one parameter, and `grouped` turns it into the options that Typer sees.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, get_type_hints

import typer
from typer.models import OptionInfo

from duly.cli.common import (
    HubClient,
    HubUnreachable,
    JsonObject,
    find_hub,
    need_hub,
    need_ledger,
    open_to_read,
    settings_of,
)

if TYPE_CHECKING:
    from duly.settings import Settings
    from duly.storage.ledger import Ledger

_FOUNDING: Final = frozenset({"add", "profile.set", "alert.silence", "dashboard.password"})
"""The verbs that may set up a hub before its first run, and so may create its ledger. For any other verb a
missing ledger is a mistake, such as a mistyped folder."""
_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}


def duration(text: str) -> float:
    """Return the number of seconds in a length of time.

    >>> duration("500ms"), duration("30s"), duration("2m"), duration("1.5")
    (0.5, 30.0, 120.0, 1.5)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a length of time; write 500ms, 30s, 2m or 1h")
    return float(found[1]) * _UNITS[found[2]]


# ── a hub, or its ledger ─────────────────────────────────────────────────────────────────────────

DataFolder = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="The hub's data folder, or a node's file. [duly-data]"),
]
LedgerUrl = Annotated[str | None, typer.Option("--ledger", metavar="URL", help="The ledger. [DIR/ledger.db]")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="DULY_URL",
        help="A hub on another machine; needs a token. [the hub of --data]",
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", envvar="DULY_TOKEN", help="A token from 'duly add'. [none]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


SecretKey = Annotated[
    str | None,
    typer.Option("--secret-key", metavar="FILE", help="The key of the ledger's secrets. [DIR/secret.key]"),
]


@dataclass(frozen=True)
class StoreOptions:
    """The options that select a ledger and the key of its secrets."""

    folder: DataFolder = None
    ledger: LedgerUrl = None
    secret_key: SecretKey = None

    @property
    def settings(self) -> Settings:
        """The settings of this data folder, ledger and key."""
        from msgspec.structs import replace

        found = settings_of(self.folder, self.ledger)
        return found if self.secret_key is None else replace(found, secret_key=self.secret_key)


@dataclass(frozen=True)
class HubOptions:
    """The options that select a hub: the one of the data folder, or the one at a URL, with a token."""

    url: Url = None
    token: Token = None
    folder: DataFolder = None

    def need(self) -> HubClient:
        """Return the hub, or fail with a sentence that says how to start or name one."""
        return need_hub(self.folder, self.url, self.token)


@dataclass(frozen=True)
class LedgerOptions:
    """The options that select the hub to ask, and the ledger to open if no hub runs."""

    folder: DataFolder = None
    ledger: LedgerUrl = None
    url: Url = None
    token: Token = None

    @property
    def settings(self) -> Settings:
        """The settings of this data folder and ledger."""
        return settings_of(self.folder, self.ledger)

    def find_hub(self) -> HubClient | None:
        """Return the hub to ask; None if a ledger was named, or no hub runs."""
        return None if self.ledger is not None else find_hub(self.folder, self.url, self.token)

    def ask(
        self,
        verb: str,
        wanted: dict[str, str],
        in_ledger: Callable[[], Coroutine[object, None, JsonObject]],
        *,
        reads: bool,
    ) -> JsonObject:
        """Ask the running hub; if none runs, call `in_ledger`, which works on the ledger itself. `reads` says
        that nothing is changed, so no data folder is made."""
        hub = self.find_hub()
        if hub is not None:
            try:
                return hub.ask(f"/v1/admin/{verb}", wanted)
            except HubUnreachable:
                if not hub.local:
                    raise  # the run file may be left by a hub that was killed: use the ledger
        if not reads and not self.settings.ledger:
            from duly.runtime.files import private_folder

            if verb not in _FOUNDING:
                need_ledger(self.settings)
            private_folder(Path(self.settings.data))
        done = asyncio.run(in_ledger())
        if not reads:
            asyncio.run(self._record(verb, wanted))
        return done

    async def _record(self, verb: str, wanted: dict[str, str]) -> None:
        """Record in the audit chain what was done in the ledger without a hub."""
        from duly.server.audit_chain import AuditChain
        from duly.server.audited_verbs import audited

        record = audited(verb, wanted)
        if record is not None:
            async with await self.open(reads=False) as book:
                await AuditChain(book).add("local", "admin", *record)

    async def open(self, *, reads: bool) -> Ledger:
        """Open the ledger; with `reads` without disturbing the process that owns it."""
        from duly.storage import open_ledger

        if reads:
            return await open_to_read(self.folder, self.ledger)
        return await open_ledger(self.settings.ledger_url)


# ── a broker ─────────────────────────────────────────────────────────────────────────────────────

BrokerUrl = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="DULY_MQTT",
        help="The broker: mqtt://NAME:PASSWORD@HOST, or mqtts://; over WebSocket ws:// or wss://.",
    ),
]
NodeName = Annotated[
    str,
    typer.Option("--as", metavar="NAME", help="The node's name. [the name that logs in]", show_default=False),
]
Prefix = Annotated[str, typer.Option("--prefix", metavar="WORD", help="The first level of all topics.")]
CaFile = Annotated[
    str,
    typer.Option(
        "--cafile",
        metavar="FILE",
        help="The authority that signed the broker's certificate. [the system's]",
        show_default=False,
    ),
]
CertFile = Annotated[
    str,
    typer.Option(
        "--cert", metavar="FILE", help="The client's certificate, with --key. [none]", show_default=False
    ),
]
KeyFile = Annotated[
    str,
    typer.Option("--key", metavar="FILE", help="The key of --cert. [none]", show_default=False),
]
SignWith = Annotated[
    str | None,
    typer.Option(
        "--keys", metavar="FILE", envvar="DULY_KEYS", help="Sign with this keyring, from 'duly keys'. [none]"
    ),
]
RequireSigned = Annotated[
    bool,
    typer.Option("--require-signed", help="Refuse everything that its sender has not signed."),
]
NodeStore = Annotated[
    str, typer.Option("--data", metavar="FILE", help="The node's memory: a file, or the URL of a ledger.")
]


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """The options by which a node reaches its broker, and signs."""

    url: BrokerUrl
    prefix: Prefix = "nodes"
    cafile: CaFile = ""
    cert: CertFile = ""
    key: KeyFile = ""
    keys: SignWith = None
    require_signed: RequireSigned = False

    def address(self, name: str = "") -> str:
        """Return the broker's address with everything that the options add to it."""
        return broker_url(self.url, self.cafile, self.cert, self.key, name)


@dataclass(frozen=True, kw_only=True)
class NodeOptions(BrokerOptions):
    """The same options, and the node's name."""

    as_: NodeName = ""


def broker_url(url: str, cafile: str = "", cert: str = "", key: str = "", name: str = "") -> str:
    """Return a broker's address with TLS files and, if the address has no login, a name.

    >>> broker_url("mqtt://localhost", name="lamp 1")
    'mqtt://lamp%201@localhost'
    """
    from urllib.parse import quote, urlencode, urlsplit, urlunsplit

    parts = urlsplit(url)
    files = {word: file for word, file in (("cafile", cafile), ("cert", cert), ("key", key)) if file}
    query = "&".join(filter(None, (parts.query, urlencode(files))))
    where = parts.netloc if "@" in parts.netloc or not name else f"{quote(name, safe='')}@{parts.netloc}"
    return urlunsplit((parts.scheme, where, parts.path, query, parts.fragment))


# ── options of several verbs ─────────────────────────────────────────────────────────────────────


def length(flag: str, help: str, *, metavar: str = "30s") -> OptionInfo:
    """Declare an option that is a length of time, such as 30s or 2m."""
    option: OptionInfo = typer.Option(flag, parser=duration, metavar=metavar, help=help)
    return option


MessageId = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="The id to use; the same id again is a repeat. [a new one]"),
]
Limit = Annotated[
    int, typer.Option("--limit", min=1, max=10_000, help="How many to show at most, the newest first.")
]


# ── groups ───────────────────────────────────────────────────────────────────────────────────────


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a verb that is a group of options by the options of the group."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, type[object]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _options_of(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(verb)
    def run(**given: object) -> None:
        for name, group in groups.items():
            given[name] = group(**{option: given.pop(option) for option in _names(group)})
        verb(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: type[object]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(group).parameters.values()
    ]


def _names(group: type[object]) -> list[str]:
    return [field.name for field in fields(group)]  # type: ignore[arg-type] # it is a dataclass
