"""Examines a running hub for `duly doctor`.

It shows the settings that this process uses, even if a file has changed since, and tests the dependencies of
the hub: it reads from the ledger, and sends itself a hint through the notifier. A part that does not answer
within a few seconds is reported as a problem. Nothing is changed, and no secret is shown: addresses are
without their passwords.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from duly.errors import LedgerError, Stopped
from duly.server.floor_watch import lanes_ahead

if TYPE_CHECKING:
    from duly.apps.gateway.command_timing import CommandTiming
    from duly.cluster.notifier import Notifier
    from duly.settings import Settings
    from duly.storage.ledger import Ledger

ANSWER_SECONDS: Final = 5.0
"""How long the ledger may take to answer."""
ECHO_SECONDS: Final = 2.0
"""How long a hint may take; a slower notifier is of no use, since other hubs poll the ledger more often."""


async def examine(
    settings: Settings, timing: CommandTiming, ledger: Ledger, notifier: Notifier | None
) -> dict[str, object]:
    """Return the settings and margins of a hub, and whether its disk, ledger and notifier are well."""
    of_ledger, of_notifier = await asyncio.gather(
        check_ledger(ledger), check_notifier(notifier, settings.notifier or settings.ledger_url)
    )
    return {
        "settings": settings_in_force(settings),
        "margins": margins(timing),
        "disk": check_disk(settings.data),
        "ledger": of_ledger,
        "notifier": of_notifier,
    }


def address(url: str) -> str:
    """Return an address without its password.

    >>> address("postgresql://duly:secret@db:5432/duly?sslpassword=x")
    'postgresql://duly@db:5432/duly'
    """
    parts = urlsplit(url)
    if not parts.scheme or not parts.netloc:
        return url
    login, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"{login.partition(':')[0]}{at}{host}", parts.path, "", ""))


def settings_in_force(settings: Settings) -> dict[str, object]:
    """Return every setting; addresses without passwords, profiles by their names."""
    shown: dict[str, object] = msgspec.to_builtins(settings)
    shown["profiles"] = sorted(settings.profiles)
    shown["ledger"] = settings.ledger_url
    return {name: address(value) if isinstance(value, str) else value for name, value in shown.items()}


def margins(timing: CommandTiming) -> dict[str, int]:
    """Return how long ids are remembered, and how long they have to be remembered, in microseconds."""
    span = timing.resend.span() or 0
    return {
        "remember": timing.remember,
        "max_age": timing.max_age,
        "resends": span,
        "skew": timing.skew,
        "needed": timing.max_age + span + timing.skew,
        "window": timing.window,
        "patience": timing.patience,
    }


async def check_ledger(ledger: Ledger) -> dict[str, object]:
    """Return what kind of ledger it is, how much it holds, and how fast it answers."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            about, size = await ledger.describe(), await ledger.size()
            ahead = await lanes_ahead(ledger)
    except TimeoutError:
        return {"problem": f"no answer within {ANSWER_SECONDS:.0f} s"}
    except (LedgerError, Stopped) as problem:
        return {"problem": str(problem)}
    took = round((time.monotonic() - began) * 1000, 1)
    shown: dict[str, object] = msgspec.to_builtins(about) | msgspec.to_builtins(size)
    return shown | {"ms": took, "lanes_ahead": ahead, "problem": None}


async def check_notifier(notifier: Notifier | None, url: str) -> dict[str, object] | None:
    """Return how fast the notifier carries a hint back to this hub; None where there is only one hub."""
    if notifier is None:
        return None
    shown: dict[str, object] = {"url": address(url)}
    try:
        took = await notifier.check(ECHO_SECONDS)
    except TimeoutError:
        why = f" ({notifier.problem})" if notifier.problem else ""
        return shown | {"problem": f"a hint does not arrive within {ECHO_SECONDS:.0f} s{why}"}
    return shown | {"ms": round(took * 1000, 1), "problem": None}


def check_disk(folder: str) -> dict[str, int]:
    """Return the free and total bytes of the disk with the data folder."""
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total}
