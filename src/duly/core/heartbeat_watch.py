"""Heartbeats: which sentinels have promised to send them, and which are overdue.

The laws. A silence is measured only by the watcher's own monotonic clock, from the moment it first saw the
last sign of life. So no two clocks need to agree, and setting a clock makes no sentinel silent. A watcher
that did not check for a while (it has just started, was asleep, or could not read the ledger) cannot judge
that time: it starts to measure every silence again, after the time that a sentinel may need to reconnect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from duly.core.ids import event_id
from duly.core.monitor.signals import SILENT, Severity
from duly.core.units import SECOND

BLINK: Final = 15 * SECOND
"""After a pause this long between two checks, every silence is measured from the start again."""
RETURN: Final = 12 * SECOND
"""How long a sentinel may need to reconnect to a tower that was down: it tries at least every 10 s."""


class Promise(Struct, frozen=True, omit_defaults=True):
    """A sentinel's promise as stored in the ledger. Times are the tower's wall time in microseconds."""

    sentinel: str
    profile: str
    every: int = 0
    """how often it sends a heartbeat; 0: as its profile demands"""
    heard: int = 0
    silent: int = 0
    """when it was found to be silent; 0: it is not"""
    severity: Severity = Severity.CRITICAL
    """the severity of its silence, by the profile at that moment"""
    event: str = ""
    """the id of the alert about its silence, until the alert is withdrawn"""

    def missed(self, now: int, severity: Severity) -> Promise:
        """Return the promise of a sentinel that has fallen silent. The alert's id is created here, once, so
        that all hubs report the same one."""
        event = event_id(
            sentinel=self.sentinel, tower="", profile=self.profile, reason=SILENT, session="", device="",
            window_start=self.heard,
        )  # fmt: skip
        return Promise(self.sentinel, self.profile, self.every, self.heard, now, severity, event)

    def kept(self, now: int, every: int) -> Promise:
        """Return the promise after a heartbeat. An alert about the silence, if there is one, has still to be
        withdrawn."""
        return Promise(self.sentinel, self.profile, every, now, 0, self.severity, self.event)


class HeartbeatWatch:
    """Measures, at one hub, how long each sentinel has been silent."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """by promise: the last sign of life, and when (monotonic) this hub first saw it"""
        self._looked: tuple[int, int] | None = None

    def overdue(
        self,
        promises: Mapping[str, Promise],
        patience: Callable[[Promise], int | None],
        elapsed: int,
        now: int,
    ) -> list[str]:
        """Return the names of the sentinels that are overdue. `patience` returns how long after a heartbeat
        the next one may come; None means for ever. `elapsed` is monotonic, `now` is not."""
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
        """Note that the promises could not be read, so that this time is not counted as silence."""
        self._looked = None

    def _blinked(self, elapsed: int, now: int) -> bool:
        looked, self._looked = self._looked, (elapsed, now)
        if looked is None:
            return True
        # While a machine sleeps, its wall clock goes on and its monotonic clock stops.
        return elapsed - looked[0] > BLINK or now - looked[1] > elapsed - looked[0] + BLINK
