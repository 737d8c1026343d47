"""How far a clock can be trusted: a wrong minute costs nothing, a lagging floor catches up, and what was
forgotten stays stale."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duly.core.messages import FORGOTTEN
from duly.core.trusted_time import CONFIRM, DRIFT, RESTORED, RESTORED_UNTIMED, Floor, TrustedClock
from duly.core.units import DAY, HOUR, MINUTE, MS, SECOND

START = 1_700_000_000 * SECOND


class ClockedProcess:
    """A process that prunes twice a minute, with a wall clock of its own."""

    def __init__(self, ledger: Ledger, wrong: int = 0) -> None:
        self.ledger, self.wrong = ledger, wrong
        self._witness = TrustedClock(self.now, ledger.time)

    @property
    def now(self) -> int:
        return self.ledger.time + self.wrong

    def prune(self) -> None:
        self.ledger.floor = self._witness.judge(self.ledger.floor, self.now, self.ledger.time)


class Ledger:
    """A stored floor, and the true time."""

    def __init__(self) -> None:
        self.floor = Floor()
        self.time = START

    def run(self, length: int, *processes: ClockedProcess) -> None:
        for _ in range(length // (30 * SECOND)):
            self.time += 30 * SECOND
            for process in processes:
                process.prune()

    @property
    def lag(self) -> int:
        return self.time - self.floor.until


def running() -> tuple[Ledger, ClockedProcess]:
    """A hub that has run for a while."""
    ledger = Ledger()
    hub = ClockedProcess(ledger)
    ledger.run(2 * HOUR, hub)
    assert abs(ledger.lag) <= DRIFT
    return ledger, hub


def test_a_new_ledger_trusts_its_clock_after_an_hour() -> None:
    ledger = Ledger()
    hub = ClockedProcess(ledger)
    ledger.run(CONFIRM - MINUTE, hub)
    assert ledger.lag > DAY
    ledger.run(2 * MINUTE, hub)
    assert abs(ledger.lag) <= DRIFT


def test_a_clock_that_is_wrong_for_a_minute_raises_nothing() -> None:
    ledger, hub = running()
    for wrong in (2 * DAY, 400 * DAY, -2 * DAY):
        hub.wrong = wrong
        ledger.run(MINUTE, hub)
        assert ledger.floor.until <= ledger.time + DRIFT
        hub.wrong = 0
        ledger.run(MINUTE, hub)
        assert abs(ledger.lag) <= DRIFT


def test_nor_does_one_that_is_wrong_when_the_hub_starts() -> None:
    for ledger in (Ledger(), running()[0]):
        hub = ClockedProcess(ledger, wrong=2 * DAY)
        ledger.run(MINUTE, hub)
        hub.wrong = 0
        ledger.run(2 * HOUR, hub)
        assert 0 <= ledger.lag <= DRIFT


def test_a_hub_that_is_killed_while_its_clock_is_wrong_leaves_nothing_behind() -> None:
    ledger, hub = running()
    hub.wrong = 2 * DAY
    ledger.run(MINUTE, hub)
    again = ClockedProcess(ledger)
    ledger.run(MINUTE, again)
    assert abs(ledger.lag) <= 2 * MINUTE
    assert ledger.floor.claim <= ledger.time


def test_a_machine_that_was_off_for_days_catches_up_after_an_hour() -> None:
    ledger, _ = running()
    ledger.time += 3 * DAY
    hub = ClockedProcess(ledger)
    ledger.run(30 * MINUTE, hub)
    assert 3 * DAY - MINUTE <= ledger.lag <= 3 * DAY + MINUTE, "it rises as time passes, no faster"
    ledger.run(HOUR, hub)
    assert abs(ledger.lag) <= DRIFT


def test_processes_that_live_for_a_moment_trust_the_claim_of_an_earlier_one() -> None:
    ledger = Ledger()
    for day in range(5):
        ClockedProcess(ledger).prune()
        if day > 1:
            assert ledger.lag <= DAY + DRIFT
        ledger.time += DAY


def test_and_not_one_that_a_later_one_contradicts() -> None:
    ledger, _ = running()
    ClockedProcess(ledger, wrong=30 * DAY).prune()
    for _ in range(3):
        ledger.time += HOUR * 2
        ClockedProcess(ledger).prune()
        assert ledger.floor.until <= ledger.time


def test_a_hub_whose_clock_is_wrong_for_days_is_contradicted_by_another_on_the_same_ledger() -> None:
    ledger, right = running()
    wrong = ClockedProcess(ledger, wrong=2 * DAY)
    ledger.run(10 * HOUR, right, wrong)
    assert 0 <= ledger.lag <= MINUTE


def test_hubs_that_were_off_together_catch_up_together() -> None:
    ledger, _ = running()
    ledger.time += 3 * DAY
    one = ClockedProcess(ledger)
    ledger.run(MINUTE, one)
    other = ClockedProcess(ledger)
    ledger.run(70 * MINUTE, one, other)
    assert abs(ledger.lag) <= DRIFT


@given(
    st.lists(
        st.tuples(st.sampled_from(["wrong", "right", "restart", "off"]), st.integers(1, 50)), max_size=25
    )
)
def test_no_wrong_minutes_ever_raise_it_beyond_the_true_time(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    hub = ClockedProcess(ledger)
    for what, minutes in steps:
        if what == "wrong":
            hub.wrong = minutes * DAY
            ledger.run(min(minutes, 20) * MINUTE, hub)
            hub.wrong = 0
        elif what == "restart":
            hub = ClockedProcess(ledger)
        elif what == "off":
            ledger.time += minutes * HOUR
            hub = ClockedProcess(ledger)
        ledger.run(minutes * MINUTE, hub)
        assert ledger.floor.until <= ledger.time + DRIFT * (len(steps) + 1)


# ── mending ──────────────────────────────────────────────────────────────────────────────────────


def test_a_mended_floor_takes_what_is_new_and_leaves_stale_what_may_have_been_forgotten() -> None:
    now = START
    mended = Floor(until=now + 2 * DAY, trusted=now + 2 * DAY).mend(now)
    assert mended.refusal(now + DAY + SECOND, now + SECOND, now) is None
    assert mended.refusal(now + DAY, now, now) is not None
    assert mended.refusal(now + DAY, 0, now) is not None, "what does not say when it was made may be old"
    assert mended.refusal(now + 2 * DAY + SECOND, 0, now) is None
    assert max(mended.until, mended.barrier) == now + 2 * DAY


def test_who_is_refused_for_a_floor_in_the_future_is_not_advised_a_new_id_that_is_refused_as_well() -> None:
    now, far = START, Floor(until=START + 2 * DAY)
    refusal = far.refusal(now + DAY, now, now)
    assert refusal is not None
    assert "'duly floor --mend'" in refusal.reason
    after = far.mend(now + SECOND)
    assert after.refusal(now + DAY, now, now + MINUTE) is FORGOTTEN, "a new id is accepted by now"
    assert after.refusal(now + MINUTE + DAY, now + MINUTE, now + MINUTE) is None


def test_what_is_made_after_the_mending_is_stale_again_once_it_may_be_forgotten() -> None:
    mended = Floor(until=START + 2 * DAY, trusted=START + 2 * DAY).mend(START)
    ledger = Ledger()
    ledger.floor = mended
    hub = ClockedProcess(ledger)
    ledger.run(2 * HOUR, hub)
    assert mended.mended == ledger.floor.mended
    assert abs(ledger.lag) <= DRIFT
    assert ledger.floor.refusal(START + HOUR, START + SECOND, START + MINUTE) is not None


def test_mending_everything_forgets_the_barrier_too() -> None:
    floor = Floor(until=START + 2 * DAY, trusted=START + 2 * DAY)
    for bad in (floor, floor.mend(START)):
        assert bad.mend(START, everything=True) == Floor(START, START)


def test_a_floor_that_is_not_in_the_future_needs_no_mending() -> None:
    floor = Floor(until=START, trusted=START)
    assert floor.mend(START + SECOND) is floor


def test_after_a_restore_what_was_made_before_the_loss_and_is_not_known_is_stale() -> None:
    floor = Floor(until=START - DAY, trusted=START).restore(START, START)
    assert floor.refusal(START + HOUR, START - MINUTE, START) is not None, (
        "it may have been accepted after the backup"
    )
    assert floor.refusal(START + HOUR, START + MINUTE, START) is None, "it was made after the loss"
    assert floor.refusal(START + 10 * 365 * DAY, START - MINUTE, START) is None, (
        "an alert that is kept for years"
    )
    assert floor.refusal(START + HOUR, 0, START) is not None, (
        "it does not say when it was made, and expires soon"
    )
    assert floor.refusal(START + 30 * DAY, 0, START) is None, "nothing of its kind would ever be accepted"


def test_mending_everything_forgets_barrier_and_restore() -> None:
    risen = Floor(until=START + DAY, trusted=START + DAY)
    assert risen.mend(START, everything=True) == Floor(START, START)
    mended = risen.mend(START)
    assert mended.refusal(START + HOUR, START - 1, START) is not None, "its id may have been forgotten"
    assert mended.mend(START, everything=True).refusal(START + HOUR, START - 1, START) is None


def test_after_a_restore_what_to_do_with_an_older_message_depends_on_whether_new_ids_are_accepted() -> None:
    lost = START + MINUTE
    floor = Floor(trusted=START).restore(lost, START)
    made, until = START - MINUTE, START + HOUR
    early = floor.refusal(until, made, START)
    assert early is not None
    assert early.wait == MINUTE + MS
    assert floor.refusal(until, made, lost + MS) is RESTORED
    assert floor.refusal(until, 0, START) is RESTORED_UNTIMED
    assert floor.refusal(until, lost + 1, START) is None


_TIMES = st.integers(1, 40).map(lambda days: START + days * DAY)


@given(st.builds(Floor, *[st.just(0) | _TIMES] * 6), _TIMES, st.just(0) | _TIMES)
def test_the_usual_case_is_decided_as_every_other(floor: Floor, until: int, made: int) -> None:
    stale = floor._forgets(until, made) or floor._lost(until, made)
    assert (floor.refusal(until, made, START) is not None) == stale
