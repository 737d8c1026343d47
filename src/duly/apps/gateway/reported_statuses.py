"""The last status reports of MQTT devices and nodes: version, battery, signal.

Reports of existing accounts are kept in memory undecoded, and decoded when they are shown, so that a report
costs next to nothing. After a restart the broker sends the retained reports again.
"""

from __future__ import annotations

from typing import Final

from duly.core.units import MS
from duly.errors import DulyError
from duly.runtime.clock import Clock
from duly.wire import fd

LONGEST: Final = 8 * 1024
"""The longest report that is remembered, in bytes."""


class ReportedStatuses:
    """The last reports of one hub's devices and nodes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[bytes, int, bool]] = {}

    def note(self, name: str, payload: bytes, old: bool) -> None:
        """Remember a report; `old` if the broker had retained it, so that its time is not known."""
        if len(payload) <= LONGEST:
            self._reports[name] = (payload, self._clock.now(), old)

    def note_stored(self, name: str, payload: bytes, at: int) -> None:
        """Remember a report that the broker stored at this time."""
        if len(payload) <= LONGEST:
            self._reports[name] = (payload, at, False)

    def forget(self, name: str) -> None:
        """Forget the report of an account that is removed."""
        self._reports.pop(name, None)

    def of(self, name: str) -> dict[str, object]:
        """Return the last report of an account with its time in milliseconds; empty if there is none."""
        found = self._reports.get(name)
        if found is None:
            return {}
        payload, at, old = found
        try:
            status = fd.decode_status(payload)
        except DulyError:
            return {}
        if status is None or fd.is_question(status):
            return {}
        told = status.time // MS if status.time else None
        return {
            "online": status.online is not False,
            "battery": status.battery,
            "signal": status.rssi,
            "version": status.version,
            "uptime": status.uptime,
            "heartbeat": status.heartbeat // MS,
            "at": told if old else at // MS,
        }
