"""The settings of a hub: flags come before `DULY_*` environment variables, these before `duly.toml`, and
that before defaults.

All settings are checked here, before anything starts: a hub that would forget an id too early, or listen
to the network without protection, does not start at all.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from duly.core.trusted_proxies import TrustedProxies
from duly.errors import Malformed
from duly.storage import file_url

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})

SECTIONS: Final = frozenset({"sentinel", "home_assistant"})
"""Tables of `duly.toml` that do not belong to the hub."""

_ORIGIN: Final = re.compile(r"https?://[^/\s?#@]+")

T = TypeVar("T", bound=Struct)


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a hub."""

    data: str = "duly-data"
    port: int = 7800
    listen: str = "127.0.0.1"
    mqtt_port: int = 7883
    mqtt_ws_port: int | None = None
    """where the embedded broker also serves MQTT over WebSocket, for browsers and for networks that allow
    nothing else; nowhere by default"""
    mqtt: str = ""
    """the address of an outside broker, to be used instead of the embedded one"""
    no_mqtt: bool = False
    ledger: str = ""
    """the address of the ledger; sqlite:///… in the data folder by default"""
    notifier: str = ""
    """how hubs on one ledger notify each other: redis://…, or postgres, which is the default for such a
    ledger"""
    secret_key: str = ""
    """the file with the key that encrypts secrets in the ledger; secret.key in the data folder by default"""
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    """listen beyond this machine without TLS, although tokens can be read on the network then"""
    max_age: float = 600.0
    """seconds: how old a command may be when it first arrives"""
    remember: float = 86_400.0
    """seconds: how long ids and answers are remembered"""
    patience: float = 10.0
    """seconds: how long a device may take to answer"""
    window: float = 0.3
    """seconds: how long a command waits for a missing earlier one of its sender"""
    max_exp: float = 7 * 86_400.0
    """seconds: how far in the future the `exp` of a command may be"""
    max_queued: int = 10_000
    """commands of one app, or for one device, that may wait"""
    max_queued_bytes: int = 64 * 1024 * 1024
    """bytes of data in these commands"""
    commands_per_minute: int = 600_000
    """commands that one account may send; as many may come at once; 0 does not limit them"""
    lines_per_minute: int = 600_000
    """chat lines, changes and questions that one person may send; 0 does not limit them"""
    pushes_per_minute: int = 600_000
    """pushes that one device may send; 0 does not limit them"""
    alerts_per_minute: int = 600_000
    """alerts, changes of alerts and heartbeats that one account may send, and 600 critical ones besides; 0
    does not limit them"""
    stored_mb_per_day: int = 4_096
    """megabytes of all these that one account may store in a day; as many may come at once; 0 does not limit
    them"""
    groups_per_day: int = 200
    """groups that one person may make in a day; as many may come at once; 0 does not limit them"""

    public_url: str = ""
    """the address under which people reach this hub, for links in notifications: https://duly.example; its
    own address by default"""
    log: Literal["human", "json"] = "human"
    """the form of log lines on stderr: for people, or one JSON object a line"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """the least important log lines that are written; retries and duplicates are debug"""
    trail_kept: float = 7.0
    """days: how long the hops of messages are kept"""
    trail_mb: int = 128
    """megabytes of hops that are kept; 0 keeps them in memory only"""

    origins: list[str] = []
    """origins of web pages that may use this hub: https://app.example"""
    trusted_proxies: list[str] = []
    """addresses and networks of proxies whose X-Forwarded-For is believed: 10.0.0.0/8"""
    connections_per_address: int = 0
    """connections of one address; 0 allows half of all connections"""
    registration: Literal["auto", "open", "closed"] = "auto"
    """whether strangers may register as users; auto allows it where only this machine can reach the hub"""
    friends_only: bool = False
    """whether only friends may write to each other"""
    allow_private_webhooks: bool = False
    """whether alerts may be sent to addresses in private networks"""
    profiles: dict[str, dict[str, object]] = {}
    """the recipients of alerts: [profiles.home] with send, escalate, quiet, …"""
    alerts_kept: float = 90.0
    """days: how long alerts stay in the ledger"""
    deliveries_kept: float = 90.0
    """days: how long the deliveries of an alert stay there; never longer than the alert itself"""
    alerts_remembered: float = 30.0
    """days: how old an alert may be when it arrives; its id is remembered at least that long"""
    archives_kept: float = 365.0
    """days: how long forgotten alerts stay in the archive; 0 archives nothing"""

    def __post_init__(self) -> None:
        for name in ("port", "mqtt_port", "mqtt_ws_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65_535:
                raise Malformed(
                    f"{name} is a number from 0 to 65535 (0: any free one), not {getattr(self, name)}"
                )
        if min(self.alerts_kept, self.deliveries_kept, self.alerts_remembered) <= 0 or self.archives_kept < 0:
            raise Malformed(
                "alerts_kept, deliveries_kept and alerts_remembered are days, more than 0; "
                "archives_kept may be 0"
            )
        if self.max_exp <= 0 or self.max_queued < 1 or self.max_queued_bytes < 1:
            raise Malformed("max_exp is seconds, more than 0; max_queued and max_queued_bytes are at least 1")
        per_minute = (
            self.commands_per_minute, self.lines_per_minute, self.pushes_per_minute, self.alerts_per_minute
        )  # fmt: skip
        if min(*per_minute, self.stored_mb_per_day, self.groups_per_day) < 0:
            raise Malformed(
                "commands_per_minute, lines_per_minute, pushes_per_minute, alerts_per_minute, "
                "stored_mb_per_day and groups_per_day are numbers, or 0 for no limit"
            )
        if self.trail_kept <= 0 or self.trail_mb < 0:
            raise Malformed("trail_kept is days, more than 0; trail_mb is a number of megabytes, or 0")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise Malformed(
                    f"an origin looks like https://app.example or http://localhost:8080, not {origin!r}"
                )
        TrustedProxies(self.trusted_proxies)
        if self.public_url and not _ORIGIN.fullmatch(self.public_url):
            raise Malformed(f"public_url looks like https://duly.example, not {self.public_url!r}")
        if self.connections_per_address < 0:
            raise Malformed("connections_per_address is a number of connections, or 0 for half of all")
        if self.mqtt_ws_port is not None and (self.mqtt or self.no_mqtt):
            raise Malformed(
                "mqtt_ws_port is a port of the embedded broker; leave it out, or leave out mqtt and no_mqtt"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise Malformed("TLS needs both --tls-cert and --tls-key")
        if self.listen not in LOOPBACK and not self.tls_cert and not self.insecure:
            raise Malformed(
                f"listening on {self.listen} without TLS would send tokens in clear; "
                "add --tls-cert and --tls-key, or say --insecure"
            )

        if self.notifier and not self.shared:
            raise Malformed(
                "a notifier is for hubs that share a ledger; "
                "use --ledger postgresql://…, or leave --notifier out"
            )

    @property
    def shared(self) -> bool:
        """Whether other hubs may work on the same ledger."""
        return self.ledger.startswith(("postgresql:", "postgres:"))

    @property
    def open_registration(self) -> bool:
        """Whether strangers may register as users."""
        return self.registration == "open" or (self.registration == "auto" and self.listen in LOOPBACK)

    @property
    def ledger_url(self) -> str:
        """The address of the ledger."""
        return self.ledger or file_url(Path(self.data).absolute() / "ledger.db")


def load(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Settings:
    """Read the settings. A flag that is None was not given."""
    table = {name: value for name, value in _read(folder).items() if name not in SECTIONS}
    return _choose(Settings, table, "DULY_", flags, environment)


def section(
    name: str,
    kind: type[T],
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> T:
    """Read a table of `duly.toml`, with the same precedence: `[sentinel] countdown = 10` is
    `DULY_SENTINEL_COUNTDOWN=10` and `--countdown 10`."""
    table = _read(folder).get(name, {})
    if not isinstance(table, dict):
        raise Malformed(f"{name} in duly.toml is a table: write [{name}] and its settings below")
    return _choose(kind, table, f"DULY_{name.upper()}_", flags, environment)


def _read(folder: Path | None) -> dict[str, object]:
    file = (folder or Path()) / "duly.toml"
    if not file.exists():
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise Malformed(f"{file} is not TOML: {problem}") from None


def _choose(
    kind: type[T],
    chosen: dict[str, object],
    prefix: str,
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None,
) -> T:
    environment = os.environ if environment is None else environment
    for field in msgspec.structs.fields(kind):
        text = environment.get(f"{prefix}{field.name.upper()}")
        if text is not None:
            chosen[field.name] = text.split(",") if field.default_factory is list else text
    chosen |= {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert(chosen, kind, strict=False)
    except msgspec.ValidationError as problem:
        # "Expected `int`, got `str` - at `$.port`": the name of the setting comes first for people.
        found = re.fullmatch(r"(.*) - at `\$\.(.*)`", str(problem))
        sentence = f"{found[2]}: {found[1]}" if found is not None else str(problem)
        raise Malformed(f"a setting is not valid: {sentence}") from None
