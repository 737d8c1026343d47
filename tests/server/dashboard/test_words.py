"""The words of the page: both languages have all of them, and the page uses no others."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duly.cli import app

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
    plain = {key for key, text in table("zh").items() if not re.search(r"[\u4e00-\u9fff：]", text)}
    assert plain == {"nav.api", "part.broker"}


# ── sentences of the hub ─────────────────────────────────────────────────────────────────────────

SOURCE = STATIC.parents[2]
PAIR = re.compile(r'^  \["((?:[^"\\]|\\.)+)", "((?:[^"\\]|\\.)+)"\],$', re.MULTILINE)
PLACE = re.compile(r"{\w+}")
COMPOSED = {
    "given up after {} attempts: {}",  # the number and its noun are put together
    "given up after 1 attempt: {}",
    "{}; the last attempt: {}",  # after either of two reasons
    "in doubt: {}",
    "once repeated, and again {}",
    "nothing is known of {} (any more)",  # a scope and an id
    "nothing is known of the alert {} (any more)",
    "by link from {}",  # or by password
    "by password from {}",
}


def sentences() -> list[tuple[str, str]]:
    return PAIR.findall((STATIC / "i18n" / "sentences.js").read_text(encoding="utf-8"))


def text_of(node: ast.AST) -> str | None:
    """A text of the source, with {} for its values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "{}" for part in parts)
    return None


@functools.cache
def said_by_the_hub() -> frozenset[str]:
    """Every text in the source of the hub."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (text := text_of(node)) is not None:
                found.add(text)
    return frozenset(found)


def test_every_sentence_is_one_that_the_hub_says() -> None:
    assert len(sentences()) > 80
    plain = [PLACE.sub("{}", english) for english, _ in sentences()]
    assert [one for one in plain if one not in said_by_the_hub() | COMPOSED] == []
    assert sorted(one for one in plain if plain.count(one) > 1) == []


def test_no_sentence_stands_behind_a_more_general_one() -> None:
    known = [english for english, _ in sentences()]
    patterns = [re.compile(".*".join(map(re.escape, PLACE.split(english)))) for english in known]
    for english in known:
        said = PLACE.sub("this", english)
        assert known[next(i for i, one in enumerate(patterns) if one.fullmatch(said))] == english


def test_sentences_are_chinese_and_keep_their_values() -> None:
    for english, chinese in sentences():
        assert sorted(PLACE.findall(english)) == sorted(PLACE.findall(chinese)), english
        assert re.search(r"[\u4e00-\u9fff：]", chinese), english


def reasons() -> set[str]:
    """What ends and refuses messages, as far as it stands in the source as an argument: the reasons of
    verdicts and of answers in the core and the gateway, and what the page's own requests raise."""
    found: set[str] = set()
    for folder in ("core", "apps/gateway"):
        for path in (SOURCE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Verdict", "Answer"):
                    given = [one.value for one in node.keywords if one.arg == "reason"] + node.args[2:3]
                    found |= {text for one in given if (text := text_of(one)) and " " in text}
    return found


def test_every_reason_that_the_core_gives_is_known() -> None:
    known = {PLACE.sub("{}", english) for english, _ in sentences()}
    assert len(reasons()) >= 12
    assert reasons() - known == set()


def test_commands_in_hints_exist() -> None:
    """What an empty page tells people to type is a command line of duly."""
    shown = set(re.findall(r'"(duly [^"\\]+)', sources())) | {"duly send lock lock_control '{}'"}
    assert len(shown) >= 6
    for line in shown:
        for command in line.split(" && "):
            words = command.replace("${name}", "lamp").split()[1:]
            verb = words[: 2 if words[0] in ("add", "alert", "audit", "dashboard", "profile") else 1]
            verb = verb[:1] if verb[0] == "add" else verb
            answer = CliRunner().invoke(app, [*verb, "--help"])
            assert answer.exit_code == 0, f"{command}: {answer.output}"
