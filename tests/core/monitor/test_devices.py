"""What a sentinel remembers of one device."""

from __future__ import annotations

from duly.core.monitor.devices import RECENT, MonitoredDevice
from duly.core.units import DAY, SECOND


def test_only_the_newest_events_are_remembered_and_none_for_longer_than_a_day() -> None:
    device = MonitoredDevice()
    for n in range(RECENT + 3):
        device.add(f"event {n}", n * SECOND)
    assert list(device.events) == [f"event {n}" for n in range(3, RECENT + 3)]
    device.add("next day", 2 * DAY)
    assert list(device.events) == ["next day"]
