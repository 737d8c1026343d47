"""Notices two clients that use one identity and so keep disconnecting each other.

The law: a client that comes back takes over what its earlier connection held, since a network that failed may
have left that one behind. One takeover now and then is therefore in order; several in a row are a conflict of
two clients, of which neither is served for long. The conflict is reported for as long as it goes on, and for
a minute after.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from duly.core.quota import Quota, Rate
from duly.core.units import MINUTE, SECOND

TAKEOVERS: Final = Rate(1, 20 * SECOND, burst=3)
"""How often an identity may be taken over before that counts as a conflict."""
SHOWN: Final = MINUTE
"""How long a conflict is shown after its last takeover."""
CONFLICTS: Final = 1_000
"""The most conflicts that are remembered."""
WORD: Final = "taken_over"
"""The word under which a conflict is recorded."""


class Takeovers:
    """The takeovers of one hub, by identity: the client id of an MQTT client, the name of a device.

    >>> takeovers = Takeovers()
    >>> [takeovers.note("lock", "two clients", now * SECOND) for now in range(5)]
    [False, False, False, True, True]
    >>> takeovers.conflicts(30 * SECOND), takeovers.conflicts(90 * SECOND)
    (['two clients'], [])
    """

    def __init__(self) -> None:
        self._quota = Quota(TAKEOVERS)
        self._conflicts: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """the time of the last takeover and the sentence about it, by identity; the oldest first"""

    def note(self, identity: str, sentence: str, now: int) -> bool:
        """Count a takeover; return whether there is a conflict, of which the sentence tells."""
        if not self._quota.take(identity, now):
            return False
        self._conflicts[identity] = (now, sentence)
        self._conflicts.move_to_end(identity)
        if len(self._conflicts) > CONFLICTS:
            self._conflicts.popitem(last=False)
        return True

    def conflicts(self, now: int) -> list[str]:
        """Return a sentence about each conflict that goes on."""
        return [sentence for at, sentence in self._conflicts.values() if abs(now - at) < SHOWN]
