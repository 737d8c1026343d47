"""All printing of the command line: lines, tables, colours and JSON, harmless for a terminal.

The law: everything that is printed may hold text of other people (names, bodies, reasons, ids), so everything
is made harmless for a terminal here; no verb has to think of it, and none can forget it. One argument is one
line: a line break inside it is shown as such, so that no text can forge a line. Colours are marked with a
random word of this process, which no text can contain, and become escape sequences last.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import typer

from duly.core.printable import printable, printable_json, printable_lines

_WORD: Final = secrets.token_hex(8)
_MARK: Final = re.compile(rf"\x1b\[{_WORD}:([0-9;]*)m")
_CODES: Final = {"red": "31", "green": "32", "yellow": "33", "dim": "2"}


def style(text: str, how: str) -> str:
    """Return text in a colour (`red`, `green`, `yellow`), or `dim`."""
    return f"\x1b[{_WORD}:{_CODES[how]}m{text}\x1b[{_WORD}:0m"


def rendered(text: str) -> str:
    """Return a line for a terminal: text made harmless, marks turned into colours unless NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return visible(text)
    parts = _MARK.split(text)  # text, codes, text, codes, …, text
    return "".join(f"\x1b[{part}m" if i % 2 else printable(part) for i, part in enumerate(parts))


def visible(text: str) -> str:
    """Return a line without the marks of its colours."""
    return printable(_MARK.sub("", text))


def say(*lines: str, err: bool = False) -> None:
    """Print lines. Colours are left out if the output is not a terminal."""
    typer.echo("\n".join(map(rendered, lines)), err=err)


def note(*lines: str) -> None:
    """Print lines to stderr, for people."""
    say(*lines, err=True)


def print_json(value: object) -> None:
    """Print a value as one line of JSON that is safe for a terminal."""
    import msgspec

    try:
        encoded = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a surrogate pair, from an argument that is not UTF-8
        import json

        encoded = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    typer.echo(printable_json(encoded))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns, each as wide as its longest cell; the last one is not padded."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(visible(line[i])) for line in lines) for i in range(len(head) - 1)]
    for number, line in enumerate(lines):
        cells = [pad(cell, width) for cell, width in zip(line, widths, strict=False)]
        text = "  ".join([*cells, line[-1]]).rstrip()
        say(text if number else style(text, "dim"))


_COLOURS: Final = {
    "done": "green",
    "accepted": "green",
    "failed": "red",
    "refused": "red",
    "expired": "red",
    "unknown": "yellow",
    "superseded": "yellow",
    "duplicate": "yellow",
}


def tint(word: str) -> str:
    """Return a state in its colour."""
    return style(word, _COLOURS[word]) if word in _COLOURS else word


def pad(text: str, width: int) -> str:
    """Return text padded to a width; marks do not count.

    >>> pad("on", 4) + "|", len(pad(tint("done"), 6)) - len(tint("done"))
    ('on  |', 2)
    """
    return text + " " * (width - len(visible(text)))


# ── what others print ────────────────────────────────────────────────────────────────────────────


class _Plain(logging.Formatter):
    """Formats log records so that they are harmless for a terminal: a record is one line, a traceback
    several."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format the message without control characters."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        """Format the traceback without control characters; its line breaks stay."""
        return printable_lines(super().formatException(ei))  # type: ignore[arg-type] # logging types it loosely


def guard_logs() -> None:
    """Make log lines harmless for a terminal, where they go to stderr by default."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())


def traceback_lines() -> list[str]:
    """Return the exception that is being handled, as lines to print."""
    import traceback

    return "".join(traceback.format_exception(*sys.exc_info())).rstrip("\n").split("\n")
