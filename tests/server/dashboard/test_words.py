"""The words of the page: both languages have all of them, and the page uses no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[3] / "src" / "duly" / "server" / "dashboard" / "static"
ENTRY = re.compile(r'^  "([^"]+)": "(.*)",$', re.MULTILINE)


def table(language: str) -> dict[str, str]:
    return dict(ENTRY.findall((STATIC / "i18n" / f"{language}.js").read_text(encoding="utf-8")))


def sources() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in STATIC.rglob("*.js")
        if "vendor" not in path.parts and "i18n" not in path.parts
    )


def test_both_languages_have_the_same_words() -> None:
    assert list(table("en")) == list(table("zh"))


def test_a_text_has_the_same_places_for_values_in_both_languages() -> None:
    english, chinese = table("en"), table("zh")
    differing = [
        key
        for key in english
        if set(re.findall(r"{\w+}", english[key])) != set(re.findall(r"{\w+}", chinese[key]))
    ]
    assert differing == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_word_is_missing_or_empty(language: str) -> None:
    words = table(language)
    assert all(words.values())
    used = set(re.findall(r'\bt\("([^"]+)"', sources()))
    assert len(used) > 100
    assert used - words.keys() == set()


def test_every_word_is_used() -> None:
    text = sources()
    groups = set(re.findall(r'\b(?:word|badge)\("(\w+)"', text)) | set(re.findall(r"\bt\(`(\w+)\.\$", text))
    groups |= {"deliveries", "alerts"}
    unused = [key for key in table("en") if f'"{key}"' not in text and key.partition(".")[0] not in groups]
    assert unused == []


def test_chinese_is_chinese() -> None:
    plain = {key for key, text in table("zh").items() if not re.search(r"[\u4e00-\u9fff]", text)}
    assert plain == {"nav.api", "part.broker"}
