"""Metrics are judged by the same numbers everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duly.runtime.telemetry import METRICS, Telemetry
from duly.runtime.thresholds import THRESHOLDS, Threshold, judge

RULES = (Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml").read_text()


def test_a_metric_above_its_threshold_is_told_with_what_to_do() -> None:
    telemetry = Telemetry()
    telemetry.read("duly_dead_letters", lambda: 2)
    telemetry.commits.observe(3.0)
    judged = {one.metric: one for one in judge(telemetry.snapshot())}
    assert [name for name, one in judged.items() if one.above] == ["duly_dead_letters", "duly_commit_seconds"]
    assert judged["duly_dead_letters"].value == 2
    assert "duly deliveries" in judged["duly_dead_letters"].advice


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda one: one.metric)
def test_a_threshold_is_of_a_metric_and_the_same_as_in_the_alert_rules(threshold: Threshold) -> None:
    assert threshold.metric in {metric.name for metric in METRICS}
    (limit,) = re.findall(rf"{threshold.metric}[^>]*> ([0-9.]+)$", RULES, re.MULTILINE)
    assert float(limit) == threshold.most
