"""Writes the table of docs/reliability.md, in English and Chinese, from the published results.

Between the markers nothing is written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.markers import replace

from proof import record
from proof.record import ROOT, PartResult

DOCUMENTS: Final = {"en": "docs/reliability.md", "zh": "docs/zh/reliability.md"}
ROWS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("simulation", "runs", "simulated runs, over all worlds", "模拟运行，覆盖全部世界"),
    ("simulation", "violations", "… of which broke a promise", "……其中违反承诺的"),
    (
        "planted",
        "planted bugs",
        "planted bugs that were caught, each by the promise it breaks",
        "被发现的植入缺陷，每个都由它所违反的承诺发现",
    ),
    (
        "kills",
        "kills",
        "`kill -9` under load, from which the process came back",
        "负载下的 `kill -9`，进程随后恢复",
    ),
    (
        "kills",
        "messages under faults",
        "messages meanwhile: lost 0, double 0, wrong answer 0, unsettled 0",
        "其间的消息：丢失 0、重复 0、错误应答 0、未决 0",
    ),
    (
        "faults",
        "faults",
        "faults without a death, under load: a hub or a database that stands still, a full disk, a failed "
        "flush, a cut network",
        "负载下不致死的故障：中枢或数据库停顿、磁盘写满、刷盘失败、网络中断",
    ),
    (
        "faults",
        "messages under faults",
        "commands meanwhile: lost 0, double 0, wrong answer 0, unsettled 0",
        "其间的命令：丢失 0、重复 0、错误应答 0、未决 0",
    ),
    (
        "flood",
        "faults",
        "cut connections, clocks set by an hour and stops of a hub in a flood of messages",
        "消息洪流中的断开连接、时钟拨动一小时与中枢停顿",
    ),
    (
        "flood",
        "messages under faults",
        "commands, tasks, chat lines and alerts in it, dropped, repeated, overtaken and delayed: lost 0, "
        "double 0, phantom 0, wrong answer 0, unsettled 0",
        "其中的命令、任务、聊天消息与告警，遭丢弃、重复、乱序与延迟："
        "丢失 0、重复 0、凭空出现 0、错误应答 0、未决 0",
    ),
    ("power", "power losses", "losses of power under a hub", "中枢断电次数"),
    (
        "power",
        "messages under faults",
        "commands meanwhile: lost 0, double 0, wrong answer 0, unsettled 0",
        "其间的命令：丢失 0、重复 0、错误应答 0、未决 0",
    ),
    ("hostile", "hostile input", "hostile inputs: crashes 0, hangs 0", "恶意输入：崩溃 0、卡死 0"),
    (
        "hostile",
        "watched for leaks",
        "… of which with a watch over the memory and descriptors of what read them: leaks 0",
        "……其中同时监视读取者内存与描述符的：泄漏 0",
    ),
    (
        "soak",
        "soaked seconds",
        "seconds of mixed load: memory, descriptors, threads, tasks, journal and disk flat",
        "持续混合负载的秒数：内存、描述符、线程、任务、日志与磁盘平稳",
    ),
    (
        "soak",
        "messages under faults",
        "commands, tasks, chat lines and alerts meanwhile: lost 0, double 0, phantom 0, wrong answer 0, "
        "unsettled 0",
        "其间的命令、任务、聊天消息与告警：丢失 0、重复 0、凭空出现 0、错误应答 0、未决 0",
    ),
)
"""Part, what it counts, and what that is called."""
HEADS: Final = {
    "en": ("what", "figure", "measured", "replay"),
    "zh": ("内容", "数字", "测量", "重放"),
}
SOME: Final = {"en": ", {} of {} steps", "zh": "，{} / {} 步"}
GONE: Final = {"en": " (not in the history any more)", "zh": "（已不在历史中）"}
NEVER: Final = {"en": "not run yet", "zh": "尚未运行"}


def table(language: str, results: Mapping[str, PartResult]) -> str:
    """Return the table."""
    head = HEADS[language]
    lines = [head, tuple("---" for _ in head)]
    for part, what, english, chinese in ROWS:
        name = chinese if language == "zh" else english
        found = results.get(part)
        if found is None or what not in found.counts:
            lines.append((name, NEVER[language], "", ""))
        else:
            when = measured(language, found, what)
            lines.append((name, f"{found.counts[what]:,}", when, f"`{found.command}`"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(language: str, found: PartResult, what: str) -> str:
    """Return when a figure was measured, and at which commit; how much at each, where there are several. Runs
    that did not count it, as older ones did not, are left out."""
    at: dict[tuple[str, str], int] = {}
    runs = [run for run in found.runs if what in run.counts]
    for run in sorted(runs, key=lambda run: run.date):
        place = f"`{run.commit}`" + (GONE[language] if run.unreachable else "")
        at[run.date[:10], place] = at.get((run.date[:10], place), 0) + run.counts[what]
    alone = len(at) == 1
    said = [f"{day}, {place}" + ("" if alone else f": {many:,}") for (day, place), many in at.items()]
    steps = sum(len(run.steps) for run in runs)
    some = SOME[language].format(steps, found.of) if steps < found.of else ""
    return "; ".join(said) + some


def written(language: str, text: str, results: Mapping[str, PartResult]) -> str:
    """Return a document with the table in it."""
    return replace(text, "proof", table(language, results))


def stale(results: Mapping[str, PartResult] | None = None, root: Path = ROOT) -> list[str]:
    """Return the documents that do not say what the results say."""
    results = record.results() if results is None else results
    return [
        path
        for language, path in DOCUMENTS.items()
        if (text := (root / path).read_text(encoding="utf-8")) != written(language, text, results)
    ]


def write(results: Mapping[str, PartResult] | None = None, root: Path = ROOT) -> None:
    """Write the tables."""
    results = record.results() if results is None else results
    for language, path in DOCUMENTS.items():
        text = (root / path).read_text(encoding="utf-8")
        (root / path).write_text(written(language, text, results), encoding="utf-8")


if __name__ == "__main__":
    write()
