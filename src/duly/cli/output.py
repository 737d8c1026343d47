"""Where the command line prints, and nowhere else.

The law: everything that is printed may hold text of strangers (names, bodies, reasons, ids), so everything is
made fit for a terminal here, on its way out; no verb has to think of it, and none can forget it. One argument
is one line: a line break inside it is shown, so that nobody forges lines. Colours are ours: they are marked
with a word that was drawn when the program began, which no stranger knows, and become escape sequences last.
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
    """Text in a colour (`red green yellow`), or `dim`. What it does not end, the end of the text does."""
    return f"\x1b[{_WORD}:{_CODES[how]}m{text}\x1b[{_WORD}:0m"


def rendered(text: str) -> str:
    """A line as a terminal gets it: foreign text is harmless, our own marks are colours, if there are any."""
    if os.environ.get("NO_COLOR"):
        return visible(text)
    parts = _MARK.split(text)  # text, codes, text, codes, …, text
    return "".join(f"\x1b[{part}m" if i % 2 else printable(part) for i, part in enumerate(parts))


def visible(text: str) -> str:
    """A line as it looks: without marks."""
    return printable(_MARK.sub("", text))


def say(*lines: str, err: bool = False) -> None:
    """Print lines. Colours are left out where nobody would see them."""
    typer.echo("\n".join(map(rendered, lines)), err=err)


def note(*lines: str) -> None:
    """For the person, not for the pipe."""
    say(*lines, err=True)


def print_json(value: object) -> None:
    """Print a value as one line of JSON, in which nothing steers a terminal either."""
    import msgspec

    try:
        encoded = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a surrogate pair, from an argument that is not UTF-8
        import json

        encoded = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    typer.echo(printable_json(encoded))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one runs free."""
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
    """A state in its colour."""
    return style(word, _COLOURS[word]) if word in _COLOURS else word


def pad(text: str, width: int) -> str:
    """Text as wide as it should look; colours take no room.

    >>> pad("on", 4) + "|", len(pad(tint("done"), 6)) - len(tint("done"))
    ('on  |', 2)
    """
    return text + " " * (width - len(visible(text)))


# ── what others print ────────────────────────────────────────────────────────────────────────────


class _Plain(logging.Formatter):
    """Log lines: a record is one line, a traceback as many as it has."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        return printable_lines(super().formatException(ei))  # type: ignore[arg-type]


def guard_logs() -> None:
    """Make fit for a terminal what is logged without anybody having said where to: it goes to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())


def traceback_lines() -> list[str]:
    """The exception that is being handled, as lines to print."""
    import traceback

    return "".join(traceback.format_exception(*sys.exc_info())).rstrip("\n").split("\n")
