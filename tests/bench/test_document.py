"""The tables of the documents are written from the recorded results, and say the same as these."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bench.__main__ import QUESTIONS
from bench.measure import ROOT, Options, Report, figure
from bench.record import Answer

from bench import document, record


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The documents, in a folder of the test's own."""
    for path in document.DOCUMENTS.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def gateway(rate: float) -> Answer:
    """An answer with one figure that has a target: 0.7 × 1,000 a second."""
    report = Report("Gateway", [figure("duly, 1 app × 100", rate, "cmd/s", 1_000.0, "durable relay")])
    return Answer("gateway", "2026-11-20T10:00+00:00", "0123456789", "a machine", Options(), report)


def test_the_documents_say_what_the_record_says() -> None:
    assert document.stale() == [], "run 'python -m bench.document'"


@pytest.mark.parametrize("path", document.DOCUMENTS.values())
def test_a_document_says_of_every_question_what_it_asks(path: str) -> None:
    introduction = (ROOT / path).read_text(encoding="utf-8").partition("<!-- generated")[0]
    assert [name for name in QUESTIONS if f"| `{name}` |" not in introduction] == []


def test_a_document_that_differs_from_the_record_is_noticed(copies: Path) -> None:
    results = record.published() | {"gateway": gateway(700)}
    assert document.stale(results, copies) == list(document.DOCUMENTS.values())
    document.write(results, copies)
    assert document.stale(results, copies) == []


@pytest.mark.parametrize(("rate", "word"), [(700.0, "holds"), (699.0, "**falls short**")])
def test_a_table_says_whether_a_figure_reaches_its_target(copies: Path, rate: float, word: str) -> None:
    document.write({"gateway": gateway(rate)}, copies)
    text = (copies / document.DOCUMENTS["en"]).read_text(encoding="utf-8")
    row = f"| duly, 1 app × 100 | {rate:.0f} cmd/s | 0.70 × durable relay | ≥ 0.7 × | {word} |"
    assert row in text
    assert "Measured 2026-11-20 at commit `0123456789`: a machine." in text


def test_the_chinese_document_has_the_same_figures(copies: Path) -> None:
    document.write({"gateway": gateway(700)}, copies)
    text = (copies / document.DOCUMENTS["zh"]).read_text(encoding="utf-8")
    assert "| duly, 1 app × 100 | 700 cmd/s | 0.70 × durable relay | ≥ 0.7 × | 达标 |" in text


def test_an_answer_is_published_and_an_error_leaves_the_record_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    good, bad = gateway(700), gateway(800)
    bad.error = "the load was killed by SIGKILL"
    record.publish(good, path)
    record.publish(bad, path)
    assert record.published(path) == {"gateway": good}


def test_what_was_not_measured_is_named() -> None:
    missing = [(target.figure, target.of) for target in gateway(700).missing]
    assert ("duly, 1 app × 100", "durable relay") not in missing
    assert ("duly, 1 app × 100", "Redis relay") in missing
