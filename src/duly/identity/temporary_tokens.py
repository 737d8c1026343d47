"""Tokens that a hub lends to whoever may read its data folder: to be an account without knowing its token.

The laws. A borrowed token is in memory alone and ends with the hub, when it was not used for a while, and
with the account it stands for: when that is removed, disabled or given another token. There are only so many.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Final

from duly.core.units import MINUTE
from duly.identity.accounts import PREFIX, Principal, digest

LASTS: Final = 10 * MINUTE
"""How long one is good for after its last use."""
MOST: Final = 1_000


class TemporaryTokens:
    """One hub's. Times are in microseconds."""

    def __init__(self) -> None:
        self._lent: OrderedDict[bytes, tuple[Principal, int]] = OrderedDict()

    def lend(self, who: Principal, now: int) -> str:
        """A token with which to be them for a while."""
        token = PREFIX + secrets.token_urlsafe(32)
        while self._lent and (len(self._lent) >= MOST or _is_over(next(iter(self._lent.values()))[1], now)):
            self._lent.popitem(last=False)
        self._lent[digest(token)] = (who, now)
        return token

    def owner(self, token: str, now: int) -> Principal | None:
        """Whom this token stands for, if it is still good; it is good for a while longer then."""
        key = digest(token)
        found = self._lent.pop(key, None)
        if found is None or _is_over(found[1], now):
            return None
        self._lent[key] = (found[0], now)
        return found[0]


def _is_over(used: int, now: int) -> bool:
    return not used <= now < used + LASTS  # a clock that was set back ends it, too
