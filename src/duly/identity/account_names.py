"""What an account may be called.

The law: a name also serves as an MQTT username and as a level of a topic, and it never is one of the names
that duly itself records things under: those begin with a `$`, which no account's name does.
"""

from __future__ import annotations

import re
from typing import Final

from duly.errors import Malformed

RESERVED: Final = frozenset({"hub", "local"})
"""The hub among the MQTT nodes, and whoever may read its data folder."""
UNUSED: Final = frozenset({"mqtt", "tower"})
"""Names that no new account is given: an older ledger has refusals under the one, acks are from the other."""
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def check_account_name(name: str) -> str:
    """The name if a new account may have it."""
    if name in UNUSED:
        raise Malformed(f"{name!r} is a name that duly uses itself; choose another")
    return check_name(name)


def check_name(name: str) -> str:
    """The name if it can be one.

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
