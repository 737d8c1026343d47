"""Makes foreign text safe to print, so that it cannot control the reader's terminal.

The law: the result is one line without control characters (C0, DEL, C1) and so without escape sequences,
without marks that change the direction of writing or hide characters, and without lone surrogates. Letters,
signs and emoji of every script stay as they are.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

BLOT: Final = "\ufffd"
NEW_LINE: Final = " ↵ "
_JOINERS: Final = "\u200c\u200d"
"""Characters that only join letters or emoji."""
_UNFIT: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def is_fit(ch: str) -> bool:
    """Return whether a character is safe to print."""
    return ch in _JOINERS or unicodedata.category(ch) not in _UNFIT


class _Table(dict[int, str]):
    """What each character is printed as; filled on demand."""

    def __missing__(self, code: int) -> str:
        ch = chr(code)
        self[code] = shown = ch if is_fit(ch) else BLOT
        return shown


_TABLE: Final = _Table({ord("\n"): NEW_LINE, ord("\t"): " "})


def printable(said: object) -> str:
    """Return foreign text as one line that is safe to print. A line break becomes ↵; a character that could
    control the terminal or the direction of writing becomes �.

    >>> printable("one\\ntwo \\x1b[31mred")
    'one ↵ two �[31mred'
    """
    text = str(said)
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_TABLE)


def printable_lines(said: object) -> str:
    """Return foreign text that is safe to print, keeping its lines.

    >>> printable_lines("one\\ntwo\\x07")
    'one\\ntwo�'
    """
    return "\n".join(printable(line) for line in str(said).replace("\r\n", "\n").split("\n"))


_ESCAPED: Final = re.compile("[^\x20-\x7e]")


def printable_json(encoded: str) -> str:
    """Return equivalent JSON that is safe to print, with unsafe characters as `\\\\u…`.

    JSON itself escapes only C0: its strings may contain DEL, C1 and marks of direction.

    >>> printable_json('{"a":"\\u202eb"}')
    '{"a":"\\\\u202eb"}'
    """
    return encoded if encoded.isascii() and encoded.isprintable() else _ESCAPED.sub(_escape, encoded)


def _escape(found: re.Match[str]) -> str:
    ch = found[0]
    if is_fit(ch) or ch in "\n\t":
        return ch
    units = ch.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
