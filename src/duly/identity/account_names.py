"""The rules for names of accounts.

A name also serves as an MQTT username and as a level of a topic. It never equals a name under which duly
itself records things: those begin with `$`, which no account's name does.
"""

from __future__ import annotations

import re
from typing import Final

from duly.errors import Malformed

RESERVED: Final = frozenset({"hub", "local"})
"""The names of the hub among MQTT nodes, and of the user who may read its data folder."""
UNUSED: Final = frozenset({"mqtt", "tower"})
"""Names that a new account may not have: older ledgers record refusals under `mqtt`; acks come from
`tower`."""
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def check_account_name(name: str) -> str:
    """Return the name if a new account may have it; raise `Malformed` otherwise."""
    if name in UNUSED:
        raise Malformed(f"{name!r} is a name that duly uses itself; choose another")
    return check_name(name)


def check_name(name: str) -> str:
    """Return the name if it is a valid one; raise `Malformed` otherwise.

    >>> check_name("lock-1")
    'lock-1'
    """
    if name in RESERVED:
        raise Malformed(f"{name!r} is the hub's own name; choose another")
    if not NAME.fullmatch(name):
        raise Malformed(
            f"{name[:80]!r} cannot be a name; use 1 to 64 letters a–z, digits and . _ -, "
            "not starting with a dot or a dash"
        )
    return name
