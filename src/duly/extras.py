"""The extras of the package: which one brings a module that is missing.

`pip install duly` is the library: `once`, the ledgers in memory and SQLite, the HTTP middleware, the clients.
What only some programs need comes with an extra. This file is the one place that knows which, and that says
so.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from duly.errors import MissingExtra

EXTRA_OF: Final = {
    "apprise": "alerts",
    "argon2": "hub",
    "asyncpg": "postgres",
    "bcrypt": "hub",
    "cryptography": "hub",
    "nats_server": "hub",
    "opentelemetry": "otel",
    "prometheus_client": "hub",
    "prompt_toolkit": "cli",
    "redis": "redis",
    "rich": "cli",
    "typer": "cli",
    "uvloop": "hub",
}
"""The extra that brings each module."""


def of(problem: ImportError) -> str | None:
    """Return the extra that contains the module that could not be imported; None if it belongs to no extra of
    duly.
    """
    return EXTRA_OF.get((problem.name or "").partition(".")[0])


def sentence(what: str, extra: str) -> str:
    """Return the sentence that says what to install.

    >>> sentence("a ledger in PostgreSQL", "postgres")
    "a ledger in PostgreSQL needs a package that is not installed: pip install 'duly[postgres]'"
    """
    return f"{what} needs a package that is not installed: pip install 'duly[{extra}]'"


class needed_for:  # noqa: N801 - reads as words
    """A block of imports: a module of an extra that is missing becomes a `MissingExtra` that says what to
    install."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ImportError) and (extra := of(error)) is not None:
            raise MissingExtra(sentence(self._what, extra), name=error.name) from None
