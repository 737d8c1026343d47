"""Heartbeats: which sentinels have promised them, and which are overdue.

The laws. Only the watcher's own monotonic clock measures a silence, from the moment it first saw the last
sign of life, so no two clocks need agree, and none that is set makes a sentinel silent. A watcher that did
not check for a while (it has just started, was asleep, or could not read the ledger) cannot judge that
while: every silence begins anew, and only after the time that a sentinel may need to connect again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from duly.core.ids import event_id
from duly.core.monitor.signals import SILENT, Severity
from duly.core.units import SECOND

BLINK: Final = 15 * SECOND
"""After a pause this long between two checks, every silence begins anew."""
RETURN: Final = 12 * SECOND
"""How long a sentinel may need to come back to a tower that was away: it tries every 10 s at last."""


class Promise(Struct, frozen=True, omit_defaults=True):
    """A sentinel's promise as the ledger keeps it. Wall times of the tower, in microseconds."""

    sentinel: str
    profile: str
    every: int = 0
    """how often it shows that it is there; 0: as its profile demands"""
    heard: int = 0
    silent: int = 0
    """when it was found to be silent; 0: it is not"""
    severity: Severity = Severity.CRITICAL
    """how bad that is, by the profile of that moment"""
    event: str = ""
    """the alert about its silence, until that is taken back"""

    def missed(self, now: int, severity: Severity) -> Promise:
        """Return the promise of a sentinel that has fallen silent. The alert's id is made here, once: all
        hubs report the same one."""
        event = event_id(
            sentinel=self.sentinel, tower="", profile=self.profile, reason=SILENT, session="", device="",
            window_start=self.heard,
        )  # fmt: skip
        return Promise(self.sentinel, self.profile, self.every, self.heard, now, severity, event)

    def kept(self, now: int, every: int) -> Promise:
        """Return the promise after a heartbeat. An alert about the silence, if there is one, is still to
        be taken back."""
        return Promise(self.sentinel, self.profile, every, now, 0, self.severity, self.event)


class HeartbeatWatch:
    """Measures, at one hub, how long each sentinel has been silent."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """of each promise the last sign of life, and when (monotonic) it was first seen here"""
        self._looked: tuple[int, int] | None = None

    def overdue(
        self,
        promises: Mapping[str, Promise],
        patience: Callable[[Promise], int | None],
        elapsed: int,
        now: int,
    ) -> list[str]:
        """Return the names of the promises that were not kept. `patience` says how long after a heartbeat
        the next one may come, None: for ever. `elapsed` is monotonic, `now` is not."""
        anew = self._blinked(elapsed, now)
        before, self._seen = self._seen, {}
        late: list[str] = []
        for name, promise in promises.items():
            old = before.get(name)
            since = elapsed if old is None or old[0] != promise.heard else old[1]
            if anew:
                since = elapsed + RETURN
            self._seen[name] = (promise.heard, since)
            limit = patience(promise)
            if limit is not None and not promise.silent and elapsed - since > limit:
                late.append(name)
        return late

    def interrupted(self) -> None:
        """Note that the promises could not be read: what happened meanwhile is not known."""
        self._looked = None

    def _blinked(self, elapsed: int, now: int) -> bool:
        looked, self._looked = self._looked, (elapsed, now)
        if looked is None:
            return True
        # A machine that slept has a wall clock that went on and a monotonic one that did not.
        return elapsed - looked[0] > BLINK or now - looked[1] > elapsed - looked[0] + BLINK
