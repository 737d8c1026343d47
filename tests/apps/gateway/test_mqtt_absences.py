"""What a broker has kept of a device that is offline: what is news, and what is not."""

from __future__ import annotations

import pytest

from duly.apps.gateway.mqtt_absences import ABSENT, LastOnlineStatuses, MqttAbsences
from duly.storage.memory import MemoryLedger
from duly.testing.clocks import ManualClock
from duly.wire.fd import FdStatus


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        (("1", 100, "a", "b"), ("1", 100, "c"), True),
        (("1", 100, "a", "b"), ("1", 99, "c"), True),
        (("1", 100, "a", "b"), ("1", 101, "c"), False),
        (("1", 100, "a", "b"), ("2", 99, "c"), False),
        (("", 0, "a", "b"), ("", 0, "a"), True),
        (("", 0, "a", "b"), ("", 0, "b"), True),
        (("", 0, "a", "b"), ("", 0, "c"), False),
        (("", 0, "a", "b"), ("", 5, "c"), False),
    ],
)
def test_what_is_kept_is_what_was_said_before(
    before: tuple[str, int, str, str], now: tuple[str, int, str], kept: bool
) -> None:
    session, time, digest = now
    status = FdStatus(time, online=True, session=session)
    assert LastOnlineStatuses(*before).covers(status, digest) is kept


async def test_the_same_bytes_with_session_and_time_are_a_repeat_once() -> None:
    """After that, the clock of the device stands still."""
    ledger = MemoryLedger(clock=ManualClock(1_000))
    absences = MqttAbsences(ledger, lambda _: 0)
    status = FdStatus(100, online=True, session="1")
    absences.note("lock", status, b"said")
    await absences.went_offline("lock")
    again = MqttAbsences(ledger, lambda _: 0)
    await again.load()
    assert again.was_said_before("lock", status, b"said", retained=False)
    assert not again.was_said_before("lock", status, b"said", retained=False)
    assert again.was_said_before("lock", status, b"said", retained=True)
    await again.came_online("lock")
    assert not again.was_said_before("lock", status, b"said", retained=True)
    assert await ledger.bucket(ABSENT) == {}


async def test_what_a_removed_device_had_said_was_said_before_of_its_successor() -> None:
    """The broker has kept it; but what the successor says itself counts, also if it is the same."""
    ledger = MemoryLedger(clock=ManualClock(1_000))
    born = 0
    absences = MqttAbsences(ledger, lambda _: born)
    status = FdStatus(100, online=True, session="1")
    absences.note("lock", status, b"said")
    await absences.went_offline("lock")
    born = 2_000
    assert absences.was_said_before("lock", status, b"said", retained=True)
    assert not absences.was_said_before("lock", status, b"said", retained=False)
    assert not absences.was_said_before(
        "lock", FdStatus(101, online=True, session="1"), b"later", retained=True
    )
