from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly import errors
from duly.core.lifecycle import State
from duly.core.messages import (
    BODY_LIMIT,
    CONFLICT,
    FORGOTTEN,
    FRESH,
    NAME_LIMIT,
    Answer,
    Message,
    Mode,
    Order,
    Verdict,
    VerdictKind,
    key_of,
    names_in,
    pack_answer,
    unpack_answer,
)
from duly.errors import Fault, Malformed, SenderError, TooLarge

GOOD: dict[str, Any] = {
    "scope": "app-1",
    "id": "1700000000000_7",
    "kind": "lock_control",
    "recipient": "lock-1",
}

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.mark.parametrize("field", ["scope", "id", "kind", "recipient"])
@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ("", Malformed, "is empty"),
        ("a\0b", Malformed, "NUL"),
        ("\ud800", Malformed, "UTF-8"),
        (b"app", Malformed, "must be text"),
        (None, Malformed, "must be text"),
        (7, Malformed, "must be text"),
        ([], Malformed, "must be text"),
        ("x" * (NAME_LIMIT + 1), TooLarge, f"limit is {NAME_LIMIT}"),
        ("锁" * (NAME_LIMIT // 3 + 1), TooLarge, f"limit is {NAME_LIMIT}"),
    ],
)
def test_a_bad_name_is_the_senders_fault_and_says_what_to_do(
    field: str, value: Any, error: type[SenderError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        Message(**{**GOOD, field: value})
    assert field in str(caught.value)
    assert caught.value.fault is Fault.SENDER
    assert not caught.value.retry


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"body": "text"}, Malformed),
        ({"body": bytes(BODY_LIMIT + 1)}, TooLarge),
        ({"time": -1}, Malformed),
        ({"time": 1 << 70}, Malformed),
        ({"expires": -5}, Malformed),
        ({"expires": 1 << 70}, Malformed),
        ({"order": Order("x" * (NAME_LIMIT + 1))}, TooLarge),
        ({"order": Order("a\0b")}, Malformed),
        ({"order": Order("\ud800")}, Malformed),
        ({"order": Order("k", n=-2)}, Malformed),
        ({"order": Order("k", n=1 << 62)}, Malformed),
    ],
)
def test_a_bad_value_is_refused_when_the_message_is_made(
    change: dict[str, Any], error: type[SenderError]
) -> None:
    with pytest.raises(error):
        Message(**{**GOOD, **change})


def test_limits_themselves_are_allowed() -> None:
    Message(**{**GOOD, "body": bytes(BODY_LIMIT), "scope": "x" * NAME_LIMIT})


@given(names, names, names, names)
def test_two_different_pairs_never_share_a_key(scope: str, id_: str, scope2: str, id2: str) -> None:
    assert (key_of(scope, id_) == key_of(scope2, id2)) == ((scope, id_) == (scope2, id2))


@given(names, names)
def test_a_key_gives_its_names_back(scope: str, id_: str) -> None:
    assert names_in(key_of(scope, id_)) == (scope, id_)
    assert Message(scope, id_, "k", "r").key == key_of(scope, id_)


def test_keys_of_timed_ids_sort_by_time_and_behind_untimed_ones() -> None:
    keys = [key_of("z", "order-7"), key_of("b", "1700000000000_9"), key_of("a", "1700000000001_1")]
    assert sorted(keys) == keys


def test_the_fingerprint_is_the_meaning_not_the_circumstances() -> None:
    first = Message(**GOOD, body=b"x", time=1, order=Order("k", Mode.LATEST, 1))
    again = Message(**GOOD, body=b"x", time=2, expires=9, order=Order("k", Mode.LATEST, 1, after=0))
    assert first.fingerprint == again.fingerprint


@pytest.mark.parametrize(
    "change", [{"body": b"y"}, {"kind": "query"}, {"recipient": "r2"}, {"order": Order("k")}, {"order": None}]
)
def test_other_meaning_has_another_fingerprint(change: dict[str, Any]) -> None:
    base = {**GOOD, "body": b"x", "order": Order("power", Mode.LATEST)}
    assert Message(**base).fingerprint != Message(**{**base, **change}).fingerprint


def test_the_borders_of_fields_count_in_the_fingerprint() -> None:
    one = Message("s", "i", "ab", "c", b"d")
    other = Message("s", "i", "a", "bc", b"d")
    assert one.fingerprint != other.fingerprint


def test_replacing_a_field_makes_key_and_fingerprint_anew() -> None:
    message = Message(**GOOD)
    changed = msgspec.structs.replace(message, scope="app-2", body=b"z")
    assert changed.key == key_of("app-2", message.id)
    assert changed.fingerprint != message.fingerprint


def test_made_is_the_ids_time_before_the_stated_one() -> None:
    assert Message(**GOOD, time=5).made == 1_700_000_000_000_000
    assert Message(**{**GOOD, "id": "x"}, time=5).made == 5
    assert Message(**{**GOOD, "id": "x"}).made == 0


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        (CONFLICT, errors.Conflict),
        (FORGOTTEN, errors.Stale),
        (Verdict(VerdictKind.EXPIRED, reason="late"), errors.Expired),
        (Verdict(VerdictKind.REFUSED, reason="clock", cause="future"), errors.FromTheFuture),
        (Verdict(VerdictKind.REFUSED, reason="no"), errors.SenderError),
        (Verdict(VerdictKind.REFUSED, reason="full", retry=True), errors.LedgerUnavailable),
    ],
)
def test_a_verdict_can_be_turned_into_its_error(verdict: Verdict, error: type[errors.DulyError]) -> None:
    with pytest.raises(error, match=verdict.reason) as caught:
        verdict.require()
    assert type(caught.value) is error


def test_a_message_that_was_taken_raises_nothing() -> None:
    assert FRESH.require() is FRESH
    assert Verdict(VerdictKind.DUPLICATE, State.DONE).require().state is State.DONE


@given(st.integers(-(2**31), 2**31), st.binary(), st.text(st.characters(exclude_categories=["Cs"])))
def test_an_answer_survives_packing(code: int, data: bytes, reason: str) -> None:
    answer = Answer(code, data, reason)
    assert unpack_answer(pack_answer(answer)) == answer


@pytest.mark.parametrize(
    "order", [Order(n=1 << 63), Order(n=-2), Order(n=1, after=1 << 63), Order(n=1, after=-2)]
)
def test_numbers_that_no_counter_reaches_are_malformed(order: Order) -> None:
    with pytest.raises(Malformed):
        Message("app", "1700000000000_1", "lock_control", "lock", order=order)
