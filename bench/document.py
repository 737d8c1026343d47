"""Writes the tables of docs/performance.md, in English and Chinese, from the recorded results.

Between the markers nothing is written by hand: a table says what `bench/results.json` says, when and where
that was measured, and whether it reaches its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.markers import replace

from bench import record
from bench.measure import ROOT, Figure
from bench.record import Answer
from bench.targets import TARGETS, target_of

DOCUMENTS = {"en": "docs/performance.md", "zh": "docs/zh/performance.md"}
ORDER = (
    "gateway", "nodes", "chat", "alerts", "admission", "once", "middleware", "duplicates", "postgres",
    "before", "many", "figures", "page", "growth", "connections", "remembered", "restart",
)  # fmt: skip
WORDS = {
    "en": {
        "head": ("", "median (of the rounds)", "beside", "target", ""),
        "summary": ("question", "measured", "targets that hold", "falls short", "not measured"),
        "holds": "holds",
        "short": "**falls short**",
        "never": "never",
        "quick": "a quick run",
        "where": "Measured {date} at commit `{commit}`{quick}: {machine}.",
        "none": "Not measured yet.",
    },
    "zh": {
        "head": ("", "中位数（各轮范围）", "与谁相比", "目标", ""),
        "summary": ("问题", "测量时间", "达标", "未达标", "未测"),
        "holds": "达标",
        "short": "**未达标**",
        "never": "从未",
        "quick": "快速运行",
        "where": "测于 {date}，提交 `{commit}`{quick}：{machine}。",
        "none": "尚未测量。",
    },
}


def number(value: float) -> str:
    """A figure as people read it."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(question: str, figure: Figure, words: Mapping[str, str]) -> tuple[str, ...]:
    """One figure."""
    value = f"{number(figure.value)} {figure.unit}"
    if len(figure.rounds) > 1:
        value += f" ({number(min(figure.rounds))} – {number(max(figure.rounds))})"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} × {figure.to}"
    target = target_of(question, figure.name, figure.to)
    holds = target.holds(figure.value, figure.ratio) if target else None
    word = {None: "", True: words["holds"], False: words["short"]}[holds]
    return figure.name, value, ratio, str(target or ""), word


def without_repeats(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A figure that is compared with several contenders is named once."""
    before = [("", ""), *(each[:2] for each in rows)]
    return [
        ("", "", *each[2:]) if each[:2] == last else each for last, each in zip(before, rows, strict=False)
    ]


def answer_table(answer: Answer | None, language: str) -> str:
    """What is recorded of one question."""
    words = WORDS[language]
    if answer is None:
        return str(words["none"])
    quick = f" ({words['quick']})" if answer.options.quick else ""
    where = str(words["where"]).format(
        date=answer.date[:10], commit=answer.commit, quick=quick, machine=answer.machine
    )
    text = {key: word for key, word in words.items() if isinstance(word, str)}
    rows = without_repeats([row(answer.question, figure, text) for figure in answer.report.figures])
    head = words["head"]
    assert isinstance(head, tuple)
    notes = "\n".join(f"{note.rstrip('.')}." for note in answer.report.notes)
    return f"{where}\n\n{table(head, rows)}\n\n{notes}".rstrip()


def summary(results: Mapping[str, Answer], language: str) -> str:
    """All questions: which targets hold."""
    words = WORDS[language]
    rows: list[tuple[str, ...]] = []
    for question in ORDER:
        targets = sum(target.question == question for target in TARGETS)
        answer = results.get(question)
        if answer is None:
            rows.append((f"`{question}`", str(words["never"]), "", "", str(targets or "")))
            continue
        good = sum(holds for _, _, holds in answer.judged)
        counts = good, len(answer.judged) - good, len(answer.missing)
        rows.append((f"`{question}`", answer.date[:10], *(str(count or "") for count in counts)))
    head = words["summary"]
    assert isinstance(head, tuple)
    return table(head, rows)


def texts(results: Mapping[str, Answer], language: str, text: str) -> str:
    """A document with its tables as these results have them."""
    text = replace(text, "summary", summary(results, language))
    for question in ORDER:
        text = replace(text, question, answer_table(results.get(question), language))
    return text


def stale(results: Mapping[str, Answer] | None = None, root: Path = ROOT) -> list[str]:
    """The documents that do not say what the record says."""
    found = record.published() if results is None else results
    return [
        path
        for language, path in DOCUMENTS.items()
        if (text := (root / path).read_text(encoding="utf-8")) != texts(found, language, text)
    ]


def write(results: Mapping[str, Answer] | None = None, root: Path = ROOT) -> None:
    """Writes the tables into the documents."""
    found = record.published() if results is None else results
    for language, path in DOCUMENTS.items():
        file = root / path
        file.write_text(texts(found, language, file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
