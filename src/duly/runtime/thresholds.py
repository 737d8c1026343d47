"""Thresholds: the values above which a metric needs attention, and what to do then.

The same numbers are in the alert rules of `deploy/prometheus`, in `duly doctor` and in `GET /v1/metrics`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duly.runtime.telemetry import TelemetrySnapshot


class Threshold(Struct, frozen=True):
    """The largest healthy value of a metric; for a histogram it is the 99th percentile, in seconds."""

    metric: str
    most: float
    unit: str
    advice: str


class JudgedMetric(Struct, frozen=True):
    """A metric and its threshold."""

    metric: str
    value: float
    most: float
    unit: str
    above: bool
    advice: str


THRESHOLDS: Final = (
    Threshold(
        "duly_oldest_pending_seconds",
        3600,
        "s",
        "its recipient is offline or does not answer; see 'duly list'",
    ),
    Threshold(
        "duly_dead_letters",
        0,
        "",
        "see 'duly deliveries list --state dead'; 'duly deliveries retry' sends again",
    ),
    Threshold(
        "duly_commit_seconds", 0.5, "s", "every sender waits that long; look at the disk or the database"
    ),
    Threshold("duly_clock_skew_seconds", 60, "s", "set the sender's clock: what is too far off is refused"),
)


def judge(snapshot: TelemetrySnapshot) -> list[JudgedMetric]:
    """Return the metrics that have a threshold, each with it."""
    metrics = {metric.name: metric for metric in snapshot.metrics}
    found = []
    for one in THRESHOLDS:
        metric = metrics[one.metric]
        values = [sample.value for sample in metric.samples] + [each.p99 for each in metric.histograms]
        value = max(values, default=0.0)
        found.append(
            JudgedMetric(one.metric, round(value, 3), one.most, one.unit, value > one.most, one.advice)
        )
    return found
