"""The log lines of a hub: one JSON object a line for programs, or lines for people.

The law: no secret is written. Tokens, passwords in addresses and `Authorization` headers are replaced
everywhere, also in tracebacks. Foreign text cannot control a terminal or forge a line.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from duly.core.printable import printable, printable_json, printable_lines

FIELDS: Final = ("scope", "id", "kind", "to", "attempt", "word", "detail", "part", "seconds")
"""The fields of a record about a message or a part of the hub, besides its text (`extra=`)."""
HIDDEN: Final = "(hidden)"

_SECRETS: Final = (
    (re.compile(r"duly_(?:[^\s:/'\"]{1,100}:)?[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=:-]{6,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@"), rf"\1:{HIDDEN}@"),
    (
        re.compile(r"(?i)\b(password|passwd|secret|token|sslpassword)(['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,;}]+"),
        rf"\1\2{HIDDEN}",
    ),
)


def without_secrets(text: str) -> str:
    """Return a text in which everything that looks like a token or a password is hidden.

    >>> without_secrets("postgresql://duly:geheim@db/duly refused duly_0123456789abcdefgh")
    'postgresql://duly:(hidden)@db/duly refused (hidden)'
    """
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


class JsonLogFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, logger, message, hub, and the fields it has."""

    def __init__(self, hub: Callable[[], str]) -> None:
        super().__init__()
        self._hub = hub

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        shown: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
            "hub": self._hub(),
        }
        shown |= _fields(record)
        if record.exc_info and record.exc_info[0] is not None:
            shown["exception"] = without_secrets(self.formatException(record.exc_info))
        return printable_json(msgspec.json.encode(shown, enc_hook=str).decode(errors="replace"))


class HumanLogFormatter(logging.Formatter):
    """Writes a record as one line for people; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, followed by those of its traceback."""
        fields = _fields(record)
        scope, id_ = fields.pop("scope", ""), fields.pop("id", "")
        text = printable(without_secrets(record.getMessage()))
        about = [f"[{scope}/{id_}]"] if scope or id_ else []
        about += [f"{name}={value}" for name, value in fields.items()]
        line = f"{_time(record)[:23].replace('T', ' ')} {record.levelname:<7} {record.name}: {text}"
        if about:
            line += f"  {printable(' '.join(map(str, about)))}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + printable_lines(without_secrets(self.formatException(record.exc_info)))
        return line


def set_up_logs(form: Literal["human", "json"], level: str, hub: Callable[[], str]) -> None:
    """Log to stderr in this form. `hub` returns the name of the hub."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter(hub) if form == "json" else HumanLogFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("duly").setLevel(level.upper())


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {
        name: without_secrets(value) if isinstance(value, str) else value
        for name, value in found.items()
        if value not in (None, "")
    }
