"""Tokens that stand for an account for a short time.

A hub issues them to the user who may read its data folder, so that the command line can act as an account
without knowing its token. They are kept in memory alone. A temporary token ends with the hub, when it was
not used for a while, and with its account: when that is removed or given another token. Their
number is limited.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Final

from duly.core.units import MINUTE
from duly.identity.accounts import PREFIX, Principal, digest

LASTS: Final = 10 * MINUTE
"""How long a token is valid after its last use."""
MOST: Final = 1_000
"""Tokens that are valid at the same time; the longest unused one ends when there are more."""


class TemporaryTokens:
    """The temporary tokens of one hub. Times are in microseconds."""

    def __init__(self) -> None:
        self._issued: OrderedDict[bytes, tuple[Principal, int]] = OrderedDict()

    def issue(self, who: Principal, now: int) -> str:
        """Make a token that stands for this principal."""
        token = PREFIX + secrets.token_urlsafe(32)
        while self._issued and (
            len(self._issued) >= MOST or _is_over(next(iter(self._issued.values()))[1], now)
        ):
            self._issued.popitem(last=False)
        self._issued[digest(token)] = (who, now)
        return token

    def owner(self, token: str, now: int) -> Principal | None:
        """Return the principal that a token stands for, or None; a valid token is prolonged."""
        key = digest(token)
        found = self._issued.pop(key, None)
        if found is None or _is_over(found[1], now):
            return None
        self._issued[key] = (found[0], now)
        return found[0]


def _is_over(used: int, now: int) -> bool:
    return not used <= now < used + LASTS  # a clock that was set back ends it, too
