"""The figures as pictures, in `bench/out`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.measure import Report


def draw(reports: dict[str, Report], out: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[Path] = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(out / name, dpi=120)
        pyplot.close(figure)
        drawn.append(out / name)

    for name, report in reports.items():
        series = report.series
        if "rates" in series:
            figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(series["rates"]) + 1.4))
            bars = axes.barh(list(series["rates"]), list(series["rates"].values()))
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.set_xscale("log")
            axes.margins(x=0.15)
            axes.invert_yaxis()
            axes.set(title=report.title, xlabel="a second")
            save(figure, f"{name}.png")
        if "sizes" in series:
            figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
            left.plot(series["sizes"], series["cost"], "o-")
            left.axhline(1.5 * series["cost"][0], linestyle="--", color="gray", label="1.5 × the first")
            left.legend()
            left.set(xscale="log", ylim=(0, None), xlabel="ids remembered", ylabel="µs per admission")
            right.plot(series["sizes"], [value / 1e6 for value in series["memory"]], "o-")
            right.set(xscale="log", ylim=(0, None), xlabel="ids remembered", ylabel="memory, MB")
            figure.suptitle(report.title)
            save(figure, f"{name}.png")
    return drawn
