"""Foreign text: what comes out shows itself and does nothing else."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.printable import printable, printable_json, printable_lines

ANY = st.text(st.characters(exclude_categories=()), max_size=40)


def steers(text: str) -> list[str]:
    """The characters that do something to a terminal, or to the reader's eyes."""
    return [
        ch
        for ch in text
        if unicodedata.category(ch) in ("Cc", "Cf", "Cs", "Zl", "Zp") and ch not in "\u200c\u200d"
    ]


@given(ANY)
def test_nothing_that_comes_out_steers_a_terminal(said: str) -> None:
    assert steers(printable(said)) == []


@given(ANY)
def test_lines_stay_lines(said: str) -> None:
    shown = printable_lines(said)
    assert steers(shown.replace("\n", "")) == []
    assert shown.count("\n") == said.replace("\r\n", "\n").count("\n")


@given(st.recursive(st.text(max_size=20), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_means_the_same_and_steers_nothing(value: object) -> None:
    shown = printable_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(shown) == value
    assert steers(shown) == []


@pytest.mark.parametrize(
    "said",
    [
        "plain",
        "grüße",
        "你好，世界",
        "全角\u3000空格",
        "ألو",
        "می\u200cخواهم",
        "👩\u200d🚀",
        "a\u00a0b",
        "e\u0301",
    ],
)
def test_letters_and_signs_of_every_script_stay(said: str) -> None:
    assert printable(said) == said
    assert printable_json(said) == said


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[2J", "�[2J"),
        ("\x9b2J", "�2J"),
        ("\x1b]0;title\x07", "�]0;title�"),
        ("a\x7f\x08b", "a��b"),
        ("\u202egnp.exe", "�gnp.exe"),
        ("\u2066x\u2069", "�x�"),
        ("one\r\ntwo\rthree", "one ↵ two�three"),
        ("zero\u200bwidth\ufeff", "zero�width�"),
        ("a\u2028b", "a�b"),
        ("\udcff", "�"),
        ("tab\there", "tab here"),
        ("\U000e0041", "�"),
    ],
)
def test_what_would_steer_is_seen(said: str, shown: str) -> None:
    assert printable(said) == shown


def test_it_is_as_fast_as_it_need_be() -> None:
    """A table of what was seen, not a question per character."""
    assert printable("你" * 1_000_000).count("你") == 1_000_000
    assert sys.getsizeof(printable("x" * 1000)) < 2000
