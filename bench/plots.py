"""The figures as pictures, in `bench/out`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.record import Answer


def draw(answers: list[Answer], out: Path) -> list[Path]:
    """A picture for each answer that has something to draw; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[Path] = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(out / name, dpi=120)
        pyplot.close(figure)
        drawn.append(out / name)

    for answer in answers:
        report = answer.report
        if report.rates:
            figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(report.rates) + 1.4))
            bars = axes.barh(list(report.rates), list(report.rates.values()))
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.set_xscale("log")
            axes.margins(x=0.15)
            axes.invert_yaxis()
            axes.set(title=report.title, xlabel="a second")
            save(figure, f"{answer.question}.png")
        if report.sizes:
            figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
            ids, cost, memory = (report.sizes[name] for name in ("ids", "cost", "memory"))
            left.plot(ids, cost, "o-")
            left.axhline(1.3 * cost[0], linestyle="--", color="gray", label="1.3 × the first")
            left.legend()
            left.set(xscale="log", ylim=(0, None), xlabel="ids remembered", ylabel="µs per admission")
            right.plot(ids, [value / 1e6 for value in memory], "o-")
            right.set(xscale="log", ylim=(0, None), xlabel="ids remembered", ylabel="memory, MB")
            figure.suptitle(report.title)
            save(figure, f"{answer.question}.png")
    return drawn
