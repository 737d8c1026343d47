"""Detects two clients that use one identity and keep disconnecting each other.

The law: a client that reconnects takes over from its earlier connection, which a broken network may have left
open. An occasional takeover is therefore normal; several in a row mean that two clients are in conflict. The
conflict is reported while it lasts and for a minute afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import MINUTE, SECOND

TAKEOVERS: Final = Rate(1, 20 * SECOND, burst=3)
"""How many takeovers of an identity are normal; more are a conflict."""
SHOWN: Final = MINUTE
"""How long a conflict is shown after its last takeover."""
CONFLICTS: Final = 1_000
"""The most conflicts that are remembered."""
WORD: Final = "taken_over"
"""The word under which a conflict is recorded."""


class IdentityConflicts:
    """The takeovers of one hub, by identity: the client id of an MQTT client, the name of a device.

    >>> conflicts = IdentityConflicts()
    >>> [conflicts.note("lock", "two clients", now * SECOND) for now in range(5)]
    [False, False, False, True, True]
    >>> conflicts.present(30 * SECOND), conflicts.present(90 * SECOND)
    (['two clients'], [])
    """

    def __init__(self) -> None:
        self._limits = RateLimits(TAKEOVERS)
        self._conflicts: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """by identity, oldest first: the time of the last takeover and a sentence about it"""

    def note(self, identity: str, sentence: str, now: int) -> bool:
        """Count a takeover, and return whether there is a conflict; `sentence` describes it."""
        if not self._limits.take(identity, now):
            return False
        self._conflicts[identity] = (now, sentence)
        self._conflicts.move_to_end(identity)
        if len(self._conflicts) > CONFLICTS:
            self._conflicts.popitem(last=False)
        return True

    def present(self, now: int) -> list[str]:
        """Return a sentence about each present conflict."""
        return [sentence for at, sentence in self._conflicts.values() if abs(now - at) < SHOWN]
