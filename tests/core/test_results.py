"""Results are asked by the operation itself, wherever in its group it stands."""

from __future__ import annotations

import pytest

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import FRESH, Answer, Message, VerdictKind
from duly.errors import ProgramError
from duly.storage.memory import MemoryLedger

MESSAGE = Message("app", "1700000000000_1", "lock_control", "lock")


def test_every_operation_is_asked_for_its_own_result_and_nested_ones_too() -> None:
    append = w.AppendEntry("log", b"x", 1)
    late = w.Advance(MESSAGE.key, State.SUPERSEDED, 1)
    mark = w.RaiseMark("lane", 5, 1, (append,), (late,))
    admit = w.Admit(MESSAGE, 1 << 60, 1, then=(mark,))
    results = MemoryLedger().execute((admit, w.PutItem("bucket", "name", b"")))
    assert results.of(admit) == FRESH
    assert results.of(mark) is True
    assert results.of(append) == 1
    assert results.find(late) is None, "its cause went the other way"
    with pytest.raises(ProgramError, match="Advance was not carried out"):
        results.of(late)


def test_equal_operations_of_one_group_have_results_of_their_own() -> None:
    first, second = w.PutNewItem("bucket", "name", b""), w.PutNewItem("bucket", "name", b"")
    results = MemoryLedger().execute((first, second))
    assert (results.of(first), results.of(second)) == (True, False)
    assert results.of_each([second, first]) == [False, True]


def test_a_kind_is_asked_for_its_first_result() -> None:
    ledger = MemoryLedger()
    ledger.execute((w.Admit(MESSAGE, 1 << 60, 1),))
    results = ledger.execute((w.Admit(MESSAGE, 1 << 60, 1, then=(w.AppendEntry("log", b"x", 1),)),))
    verdict = results.first(w.Admit)
    assert verdict is not None
    assert verdict.kind is VerdictKind.DUPLICATE
    assert results.first(w.AppendEntry) is None


def test_the_names_of_kinds_and_numbers_of_entries_as_they_are_shown() -> None:
    assert [kind.word for kind in w.DeliveryKind][-1] == "by_hand"
    assert w.numbered(7) == Answer(data=b"7")
