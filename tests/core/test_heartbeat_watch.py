"""When a sentinel counts as silent: by the watcher's own monotonic clock, and only if it kept looking."""

from __future__ import annotations

from duly.core.heartbeat_watch import HeartbeatWatch, Promise
from duly.core.monitor.signals import Severity
from duly.core.units import DAY, SECOND

LIMIT = 90 * SECOND
WALL = 1_700_000_000 * SECOND
PROMISE = Promise("gate", "home", 60 * SECOND, heard=WALL)


class Eye:
    """A watcher that looks every two seconds; its wall clock can be set."""

    def __init__(self) -> None:
        self.watcher = HeartbeatWatch()
        self.elapsed = 5 * SECOND
        self.ahead = 0
        self.promise = PROMISE
        self.limit = LIMIT

    def look(self, seconds: int = 0) -> bool:
        """Let so much time pass; whether the sentinel was found silent."""
        late = False
        for _ in range(max(1, seconds // 2)):
            self.elapsed += 2 * SECOND if seconds else 0
            late |= bool(
                self.watcher.overdue(
                    {"gate/home": self.promise},
                    lambda _: self.limit,
                    self.elapsed,
                    WALL + self.elapsed + self.ahead,
                )
            )
        return late

    def beat(self) -> None:
        self.promise = self.promise.kept(self.promise.heard + 1, 60 * SECOND)


def test_a_sentinel_that_keeps_its_promise_is_not_silent() -> None:
    eye = Eye()
    for _ in range(50):
        assert not eye.look(60)
        eye.beat()


def test_one_that_does_not_is_after_its_grace() -> None:
    eye = Eye()
    eye.look(2)
    eye.beat()
    assert not eye.look(90)
    assert eye.look(4)


def test_a_watcher_that_has_just_begun_waits_a_whole_time() -> None:
    eye = Eye()
    eye.promise = Promise("gate", "home", 60 * SECOND, heard=WALL - DAY)
    assert not eye.look(88)


def test_a_clock_that_is_set_makes_no_sentinel_silent() -> None:
    eye = Eye()
    assert not eye.look(20)
    eye.ahead = DAY
    assert not eye.look(60)
    eye.ahead = -DAY
    assert not eye.look(8)


def test_a_watcher_that_did_not_look_for_a_while_begins_anew() -> None:
    eye = Eye()
    assert not eye.look(80)
    eye.elapsed += 3_600 * SECOND  # the ledger was away
    assert not eye.look(80)
    assert eye.look(40)


def test_a_watcher_that_could_not_look_begins_anew_however_short_that_was() -> None:
    eye = Eye()
    eye.look(2)
    eye.beat()
    assert not eye.look(90)
    eye.watcher.interrupted()
    assert not eye.look(80)
    assert eye.look(40)


def test_after_its_start_a_watcher_gives_sentinels_the_time_to_connect_again() -> None:
    eye = Eye()
    eye.limit = 4 * SECOND
    assert not eye.look(), "the tower was away for a minute: sentinels try to connect every 10 s by now"
    assert not eye.look(10)
    eye.beat()
    assert not eye.look(4)
    assert eye.look(4), "from then on the promise counts"


def test_a_machine_that_slept_begins_anew() -> None:
    eye = Eye()
    assert not eye.look(80)
    eye.ahead += 3_600 * SECOND  # the wall clock went on, the monotonic one did not
    assert not eye.look(80)
    assert eye.look(40)


def test_all_hubs_give_one_silence_the_same_id_and_the_next_one_another() -> None:
    first = PROMISE.missed(WALL + 1, Severity.CRITICAL)
    again = PROMISE.missed(WALL + 2, Severity.CRITICAL)
    later = first.kept(WALL + 9, 1).missed(WALL + 10, Severity.CRITICAL)
    assert first.event == again.event != later.event
