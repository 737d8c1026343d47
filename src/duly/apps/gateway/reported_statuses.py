"""What MQTT devices and nodes last reported of themselves: version, battery, signal.

It is kept in memory as it came, for the accounts that there are, and decoded when it is shown: a report costs
next to nothing. After a restart the broker sends the retained reports again.
"""

from __future__ import annotations

from typing import Final

from duly.core.units import MS
from duly.errors import DulyError
from duly.runtime.clock import Clock
from duly.wire import fd

LONGEST: Final = 8 * 1024
"""Bytes of a report that is remembered."""


class ReportedStatuses:
    """The last reports of one hub's devices and nodes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[bytes, int, bool]] = {}

    def note(self, name: str, payload: bytes, old: bool) -> None:
        """Remember a report; `old` if the broker had kept it, so that its time is not known."""
        if len(payload) <= LONGEST:
            self._reports[name] = (payload, self._clock.now(), old)

    def of(self, name: str) -> dict[str, object]:
        """What an account last reported, with the time in milliseconds; empty if that is nothing."""
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
