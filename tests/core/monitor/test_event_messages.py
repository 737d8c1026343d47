"""The ids, bodies and expiry of what a sentinel sends."""

from __future__ import annotations

from duly.core.monitor.event_messages import MINTED, SCOPE, TOWER, EventMessages
from duly.core.monitor.signals import CANCEL, CancelData, Identity, Severity, Signal, read_event
from duly.core.monitor.suppression import Summary
from duly.core.units import HOUR, MS, SECOND

NOW = 1_700_000_000 * SECOND
FALL = Signal("watch-1", "fall", NOW)


def messages() -> EventMessages:
    return EventMessages(Identity("sentinel-1", "tower-1", "home", "session-1"), HOUR)


def test_the_same_signal_has_the_same_id_and_one_that_was_called_off_another() -> None:
    assert messages().id_of(FALL, 0) == messages().id_of(FALL, 0)
    assert messages().id_of(FALL, 0) != messages().id_of(FALL, 1)


def test_a_critical_signal_and_a_summary_have_ids_of_their_own() -> None:
    critical = Signal("watch-1", "fall", NOW, Severity.CRITICAL)
    summary = Summary("watch-1", {"fall": 3}, NOW, NOW)
    ids = {messages().id_of(FALL, 0), messages().id_of(critical, 0), messages().id_of_summary(summary)}
    assert len(ids) == 3


def test_an_event_is_for_the_tower_and_carries_both_clocks_once_they_are_known() -> None:
    made = messages()
    assert read_event(made.event("e", FALL, 0, NOW).body).offset_ms is None
    made.offset = -7 * SECOND
    event = made.event("e", FALL, 2, NOW)
    assert (event.scope, event.recipient, event.id, event.time) == (SCOPE, TOWER, "e", NOW)
    data = read_event(event.body)
    assert (data.offset_ms, data.cancelled_count) == (-7 * SECOND // MS, 2)


def test_an_event_expires_unless_it_is_critical() -> None:
    critical = Signal("watch-1", "fall", NOW, Severity.CRITICAL)
    assert messages().event("e", FALL, 0, NOW + SECOND).expires == NOW + SECOND + HOUR
    assert messages().event("e", critical, 0, NOW).expires == 0


def test_cancels_are_numbered_on_after_a_restart() -> None:
    first, mark = messages().about(CANCEL, NOW, CancelData("e", NOW // MS), NOW)
    assert mark.mark == MINTED
    restarted = messages()
    restarted.restore((mark.n, mark.ms))
    second, after = restarted.about(CANCEL, NOW, CancelData("e", NOW // MS), NOW)
    assert after.n == mark.n + 1
    assert first.id != second.id
