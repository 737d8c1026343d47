"""Ids are minted once, never repeat, never go backwards, and tell their own age."""

from __future__ import annotations

from hashlib import sha256
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duly.core.ids import SeqId, SeqIds, Uuid7Ids, event_id, time_of, uuid7, uuid7_time
from duly.errors import Malformed

NOW = 1_700_000_000_000_000

clocks = st.lists(st.integers(0, 10**16), min_size=1, max_size=30)
"""Readings of a clock that jumps about as it likes."""
bits = st.integers(0, 2**80)
seq_ids = st.builds(SeqId, st.integers(0, 2**48 - 1), st.integers(0, 2**63 - 1))

ALERT: dict[str, Any] = {
    "sentinel": "phone",
    "tower": "hub",
    "profile": "home",
    "reason": "disconnect",
    "session": "s1",
    "device": "AA:BB",
    "window_start": NOW,
}

# -- SeqId ---------------------------------------------------------------------------------------------


@given(seq_ids)
def test_a_seq_id_reads_back_as_it_was_written(id: SeqId) -> None:
    assert SeqId.parse(str(id)) == id


@given(seq_ids, seq_ids)
def test_seq_ids_are_ordered_by_time_and_then_by_counter(one: SeqId, other: SeqId) -> None:
    assert (one < other) == ((one.ms, one.n) < (other.ms, other.n))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "_",
        "1_",
        "_1",
        "1",
        "1_2_3",
        "1-2",
        "01_2",
        "1_02",
        "00_0",
        "-1_2",
        "+1_2",
        "1_-2",
        " 1_2",
        "1_2 ",
        "1_2\n",
        "1 _2",
        "1.0_2",
        "1e3_2",
        "0x1_2",
        "١_٢",
        "1_²",
        "1\x00_2",
        "281474976710656_0",
        "0_9223372036854775808",
        "9" * 5000 + "_1",
    ],
)
def test_a_seq_id_in_any_other_spelling_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        SeqId.parse(text)
    assert time_of(text) is None


@pytest.mark.parametrize("text", ["0_0", "281474976710655_9223372036854775807", "1702234567890_0"])
def test_the_extremes_of_a_seq_id_are_accepted(text: str) -> None:
    assert str(SeqId.parse(text)) == text


def test_the_complaint_says_what_was_expected_what_came_and_what_to_do() -> None:
    with pytest.raises(Malformed, match=r"like 1700000000000_1.*got 'nonsense'.*Mint a new id"):
        SeqId.parse("nonsense")


@pytest.mark.parametrize(("ms", "n"), [(-1, 0), (2**48, 0), (0, -1), (0, 2**63)])
def test_a_seq_id_that_could_not_be_written_cannot_be_made(ms: int, n: int) -> None:
    with pytest.raises(Malformed):
        SeqId(ms, n)


# -- SeqIds --------------------------------------------------------------------------------------------


def test_the_counter_starts_at_0_and_does_not_reset_with_the_millisecond() -> None:
    ids = SeqIds()
    assert [str(ids.next(now)) for now in (5_000, 5_999, 6_000, 7_000)] == ["5_0", "5_1", "6_2", "7_3"]


@given(clocks)
def test_ids_rise_by_one_and_never_go_back_whatever_the_clock_does(clock: list[int]) -> None:
    ids = SeqIds()
    minted = [ids.next(now) for now in clock]
    assert minted == sorted(minted)
    assert [id.n for id in minted] == list(range(len(clock)))


@given(clocks, clocks)
def test_a_restart_from_the_last_id_goes_on_as_if_nothing_had_happened(
    before: list[int], after: list[int]
) -> None:
    ids, restarted = SeqIds(), SeqIds()
    for now in before:
        ids.next(now)
        restarted.next(now)
    restarted = SeqIds(restarted.last)
    assert [restarted.next(now) for now in after] == [ids.next(now) for now in after]


# -- UUIDv7 --------------------------------------------------------------------------------------------


@given(st.integers(0, (2**48 - 1) * 1000), bits)
def test_a_uuid7_is_a_standard_uuid_of_version_7_that_carries_its_millisecond(now: int, random: int) -> None:
    text = uuid7(now, random)
    assert UUID(text).version == 7
    assert UUID(text).variant == "specified in RFC 4122"
    assert str(UUID(text)) == text
    assert uuid7_time(text) == uuid7_time(text.upper()) == now // 1000 * 1000


def test_a_uuid7_holds_74_random_bits() -> None:
    assert len({uuid7(NOW, 1 << bit) for bit in range(74)}) == 74
    assert uuid7(NOW, 1 << 74) == uuid7(NOW, 0)


@given(st.lists(st.tuples(st.integers(0, 10**16), bits), min_size=1, max_size=30))
def test_uuid7s_rise_whatever_the_clock_and_the_dice_do(draws: list[tuple[int, int]]) -> None:
    ids = Uuid7Ids()
    minted: list[str] = []
    for now, random in draws:
        minted.append(ids.next(now, random))
        assert ids.last == minted[-1]
        ids = Uuid7Ids(ids.last)  # a restart changes nothing
    assert minted == sorted(set(minted))
    assert all(UUID(id).version == 7 for id in minted)


def test_a_full_millisecond_spills_into_the_next() -> None:
    ids = Uuid7Ids(uuid7(5_000, 2**74 - 1))
    assert uuid7_time(ids.next(5_000, 0)) == 6_000


def test_a_generator_starts_from_a_uuid7_or_not_at_all() -> None:
    assert Uuid7Ids().last is None
    with pytest.raises(Malformed):
        Uuid7Ids("1700000000000_1")


def test_a_time_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    ids = Uuid7Ids()
    with pytest.raises(Malformed):
        ids.next(2**48 * 1000, 0)
    assert ids.last is None
    with pytest.raises(Malformed):
        uuid7(-1, 0)


# -- the time of an id ---------------------------------------------------------------------------------


@given(
    st.one_of(
        st.text(max_size=40),
        st.text("0123456789_", max_size=40),
        st.from_regex(r"[0-9]{1,16}_[0-9]{1,20}", fullmatch=True),
        seq_ids.map(str),
    )
)
@example("0_9223372036854775807")
@example("0_9223372036854775808")
@example("281474976710655_1")
@example("281474976710656_1")
def test_the_time_of_a_seq_id_is_what_parsing_it_would_say(text: str) -> None:
    try:
        expected = SeqId.parse(text).ms * 1000
    except Malformed:
        expected = None
    assert time_of(text) == expected


@given(st.uuids(), st.integers(0, 2**48 - 1))
def test_only_a_version_7_uuid_has_a_time(uuid: UUID, ms: int) -> None:
    number = uuid.int & ~(0xF << 76 | 0b11 << 62) | 0b10 << 62
    for version in range(16):
        text = str(UUID(int=number & (1 << 80) - 1 | ms << 80 | version << 76))
        assert time_of(text) == uuid7_time(text) == (ms * 1000 if version == 7 else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "order-66",
        "0" * 36,
        "017f22e279b07cc398c4dc0c0c07398f",
        "{017f22e2-79b0-7cc3-98c4-dc0c0c07398f}",
        "017f22e2-79b0-7cc3-c8c4-dc0c0c07398f",
        "017f22e2-79b0-7cc3-98c4-dc0c0c07398g",
        "017f22e2-79b0-7cc3-98c4-dc0c0c07398f\n",
        "+17f22e2-79b0-7cc3-98c4-dc0c0c07398f",
        "０17f22e2-79b0-7cc3-98c4-dc0c0c07398f",
    ],
)
def test_other_ids_carry_no_time(text: str) -> None:
    assert time_of(text) is None
    assert uuid7_time(text) is None


# -- event ids -----------------------------------------------------------------------------------------


def test_an_event_id_is_the_start_of_a_sha256_over_canonical_json() -> None:
    canonical = (
        '{"device":"门","profile":"home","reason":"disconnect","sentinel":"phone","session":"s1",'
        '"tower":"hub","window_start":1700000000000000}'
    )
    assert event_id(**{**ALERT, "device": "门"}) == sha256(canonical.encode()).hexdigest()[:32]


@pytest.mark.parametrize("field", ALERT)
def test_every_field_of_an_event_counts(field: str) -> None:
    changed = {**ALERT, field: NOW + 1 if field == "window_start" else "other"}
    assert event_id(**changed) != event_id(**ALERT)


def test_no_two_events_run_together_where_their_fields_are_joined() -> None:
    one = event_id(**{**ALERT, "sentinel": "a-b", "tower": "c"})
    assert one != event_id(**{**ALERT, "sentinel": "a", "tower": "b-c"})


def test_half_a_surrogate_pair_is_malformed() -> None:
    with pytest.raises(Malformed):
        event_id(**{**ALERT, "device": "\ud800"})
