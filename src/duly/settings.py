"""What can be set, once: flags before `DULY_*` environment before `duly.toml` before defaults.

Everything is validated here, before anything starts: a hub that would forget an id too early, or listen to
the world without protection, does not start at all.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from duly.errors import Malformed

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a hub runs."""

    data: str = "duly-data"
    port: int = 7800
    listen: str = "127.0.0.1"
    mqtt_port: int = 7883
    mqtt: str = ""
    """an outside broker instead of the embedded one"""
    no_mqtt: bool = False
    ledger: str = ""
    """sqlite:///… in the data folder by default"""
    doorbell: str = ""
    """how hubs on one ledger wake each other: redis://…, or postgres, the default where the ledger is that"""
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    """listen beyond this machine without TLS, knowing what that means"""
    max_age: float = 600.0
    """seconds: how old a command may be when it first arrives"""
    remember: float = 86_400.0
    """seconds: how long ids and answers are remembered"""
    patience: float = 10.0
    """seconds: how long a device may take to answer"""
    window: float = 0.3
    """seconds: how long a gap in a sender's numbers is waited for"""

    def __post_init__(self) -> None:
        for name in ("port", "mqtt_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise Malformed(
                    f"{name} is a number from 0 to 65535 (0: any free one), not {getattr(self, name)}"
                )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise Malformed("TLS needs both --tls-cert and --tls-key")
        if self.listen not in LOOPBACK and not self.tls_cert and not self.insecure:
            raise Malformed(
                f"listening on {self.listen} without TLS would send tokens in clear; "
                "add --tls-cert and --tls-key, or say --insecure"
            )

        if self.doorbell and not self.shared:
            raise Malformed(
                "a doorbell is for hubs that share a ledger; "
                "say --ledger postgresql://…, or leave --doorbell out"
            )

    @property
    def shared(self) -> bool:
        """Whether other hubs may work on the same ledger."""
        return self.ledger.startswith(("postgresql:", "postgres:"))

    @property
    def ledger_url(self) -> str:
        return self.ledger or f"sqlite:///{Path(self.data).absolute()}/ledger.db"


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Settings:
    """The settings in force. A flag that is None was not given."""
    environment = os.environ if environment is None else environment
    chosen: dict[str, Any] = {}
    file = (folder or Path()) / "duly.toml"
    if file.exists():
        try:
            chosen |= tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise Malformed(f"{file} is not TOML: {problem}") from None
    for field in msgspec.structs.fields(Settings):
        text = environment.get(f"DULY_{field.name.upper()}")
        if text is not None:
            chosen[field.name] = text
    chosen |= {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert(chosen, Settings, strict=False)
    except msgspec.ValidationError as problem:
        raise Malformed(f"a setting does not fit: {problem}") from None
