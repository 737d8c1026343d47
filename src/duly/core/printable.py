"""Makes text of other people safe to print: it must not control the terminal of its reader.

The law: what comes out has no control character (C0, DEL, C1), so no escape sequence, nothing that turns the
direction of writing or hides characters, no half of a surrogate pair, and is one line. Letters, signs and
emoji of every script stay as they are.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

BLOT: Final = "\ufffd"
NEW_LINE: Final = " ↵ "
_JOINERS: Final = "\u200c\u200d"
"""They hold letters and emoji together, and do nothing else."""
_UNFIT: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def is_fit(ch: str) -> bool:
    """Whether a character only shows itself."""
    return ch in _JOINERS or unicodedata.category(ch) not in _UNFIT


class _Table(dict[int, str]):
    """What each character is shown as; learned as they come."""

    def __missing__(self, code: int) -> str:
        ch = chr(code)
        self[code] = shown = ch if is_fit(ch) else BLOT
        return shown


_TABLE: Final = _Table({ord("\n"): NEW_LINE, ord("\t"): " "})


def printable(said: object) -> str:
    """Foreign text as one line that a terminal only shows. A line break is shown as such; what would steer a
    terminal, or turn the direction of writing, as a blot.

    >>> printable("one\\ntwo \\x1b[31mred")
    'one ↵ two �[31mred'
    """
    text = str(said)
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_TABLE)


def printable_lines(said: object) -> str:
    """The same for text that has lines of its own, which stay.

    >>> printable_lines("one\\ntwo\\x07")
    'one\\ntwo�'
    """
    return "\n".join(printable(line) for line in str(said).replace("\r\n", "\n").split("\n"))


_ESCAPED: Final = re.compile("[^\x20-\x7e]")


def printable_json(encoded: str) -> str:
    """JSON that means the same and is fit to be shown: what is not stands there as `\\\\u….`.

    JSON itself escapes only C0: DEL, C1 and marks of direction may stand in its strings as they are.

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
