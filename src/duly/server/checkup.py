"""The checkup: what a running hub says of itself to `duly doctor`.

The law: it says what is in force in this process, whatever a file remote says, and tries what the hub
depends on: the ledger is asked, the notifier is rung and heard. What does not answer within a few
seconds is trouble, and is told as such; nothing here waits longer, and nothing changes anything. No secret
leaves: addresses are told without their passwords.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from duly.errors import LedgerError, Stopped

if TYPE_CHECKING:
    from duly.apps.gateway.control import ControlPolicy
    from duly.cluster.notifier import Notifier
    from duly.settings import Settings
    from duly.storage.ledger import Ledger

ANSWER_SECONDS: Final = 5.0
ECHO_SECONDS: Final = 2.0
"""A notifier that takes longer than this is of no use: the others have looked by then."""


async def examine(
    settings: Settings, policy: ControlPolicy, ledger: Ledger, bell: Notifier | None
) -> dict[str, Any]:
    """Everything a hub knows of how it is set up, and whether what it depends on answers."""
    book, notifier = await asyncio.gather(
        look_at_ledger(ledger), look_at_notifier(bell, settings.notifier or settings.ledger_url)
    )
    return {
        "settings": settings_in_force(settings),
        "margins": margins(policy),
        "disk": look_at_disk(settings.data),
        "ledger": book,
        "notifier": notifier,
    }


def address(url: str) -> str:
    """An address without its password.

    >>> address("postgresql://duly:secret@db:5432/duly?sslpassword=x")
    'postgresql://duly@db:5432/duly'
    """
    parts = urlsplit(url)
    if not parts.scheme or not parts.netloc:
        return url
    login, at, place = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"{login.partition(':')[0]}{at}{place}", parts.path, "", ""))


def settings_in_force(settings: Settings) -> dict[str, Any]:
    """Every setting; addresses without passwords, profiles by their names."""
    shown: dict[str, Any] = msgspec.to_builtins(settings)
    shown["profiles"] = sorted(settings.profiles)
    shown["ledger"] = settings.ledger_url
    return {name: address(value) if isinstance(value, str) else value for name, value in shown.items()}


def margins(policy: ControlPolicy) -> dict[str, int]:
    """How long ids are remembered, and how long they have to be, in microseconds."""
    span = policy.resend.span() or 0
    return {
        "remember": policy.remember,
        "max_age": policy.max_age,
        "resends": span,
        "skew": policy.skew,
        "needed": policy.max_age + span + policy.skew,
        "window": policy.window,
        "patience": policy.patience,
    }


async def look_at_ledger(ledger: Ledger) -> dict[str, Any]:
    """Whether the ledger answers, what it is, and how much is in it."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            about, size = await ledger.describe(), await ledger.size()
    except TimeoutError:
        return {"problem": f"it has not answered within {ANSWER_SECONDS:.0f} s"}
    except (LedgerError, Stopped) as problem:
        return {"problem": str(problem)}
    took = round((time.monotonic() - began) * 1000, 1)
    shown: dict[str, Any] = msgspec.to_builtins(about) | msgspec.to_builtins(size)
    return shown | {"ms": took, "problem": None}


async def look_at_notifier(bell: Notifier | None, url: str) -> dict[str, Any] | None:
    """Whether this hub hears what is rung; None where there is only one hub."""
    if bell is None:
        return None
    shown = {"url": address(url)}
    try:
        took = await bell.check(ECHO_SECONDS)
    except TimeoutError:
        why = f" ({bell.problem})" if bell.problem else ""
        return shown | {"problem": f"nothing that is rung is heard within {ECHO_SECONDS:.0f} s{why}"}
    return shown | {"ms": round(took * 1000, 1), "problem": None}


def look_at_disk(folder: str) -> dict[str, int]:
    """How much room there is where a hub keeps its files."""
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total}
