"""Counters count, gauges are read when asked for, labels are bounded, and charts are short."""

from __future__ import annotations

import pytest

from duly.runtime.telemetry import KINDS, METRICS, MetricKind, Telemetry, TelemetrySnapshot
from duly.runtime.time_series import ChartStep, TimeSeries, quantile


def value(snapshot: TelemetrySnapshot, name: str, **labels: str) -> float | None:
    (metric,) = [one for one in snapshot.metrics if one.name == name]
    found = [sample.value for sample in metric.samples if sample.labels == labels]
    return found[0] if found else None


def test_every_name_is_declared_once_and_says_what_it_means() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)


def test_a_message_is_counted_by_kind_and_outcome() -> None:
    telemetry = Telemetry("hub-1")
    for outcome in ("accepted", "duplicate", "duplicate", "superseded"):
        telemetry.count("lock_control", outcome)
    shown = telemetry.snapshot()
    assert value(shown, "duly_messages_total", kind="lock_control", outcome="duplicate") == 2
    assert value(shown, "duly_duplicates_total") == 2
    assert value(shown, "duly_superseded_total") == 1


def test_kinds_beyond_the_limit_are_counted_together() -> None:
    telemetry = Telemetry()
    for n in range(10 * KINDS):
        telemetry.count(f"own_{n}", "done")
    shown = telemetry.snapshot()
    (metric,) = [one for one in shown.metrics if one.name == "duly_messages_total"]
    assert len({sample.labels["kind"] for sample in metric.samples}) == KINDS + 1
    assert value(shown, "duly_messages_total", kind="other", outcome="done") == 9 * KINDS


def test_every_outcome_of_a_kind_is_there_from_its_first_message_on() -> None:
    telemetry = Telemetry()
    telemetry.count("lock_control", "accepted")
    telemetry.count("", "refused")
    for kind, outcome, times in (
        ("lock_control", "unknown", 0), ("lock_control", "accepted", 1), ("other", "accepted", 0),
    ):  # fmt: skip
        shown = value(telemetry.snapshot(stored=True), "duly_messages_total", kind=kind, outcome=outcome)
        assert shown == 0  # nothing is stored yet
        assert telemetry.counter("duly_messages_total", kind, outcome).total == times
    assert telemetry.unsaved() == {
        ("duly_messages_total", ("lock_control", "accepted")): 1,
        ("duly_messages_total", ("other", "refused")): 1,
    }


def test_rates_of_refusals_include_conflicts_and_what_is_stale() -> None:
    telemetry = Telemetry()
    telemetry.sample()
    for outcome in ("refused", "conflict", "stale"):
        telemetry.count("query", outcome, 100)
    telemetry.sample()
    all_ = telemetry.snapshot().rates["refused"]
    telemetry.count("query", "refused", 1)
    assert all_ > 0
    assert telemetry._charted["refused"].value == 301


def test_a_gauge_is_read_when_it_is_asked_for() -> None:
    telemetry, numbers = Telemetry(), iter((3.0, 5.0))
    telemetry.read("duly_pending", lambda: next(numbers))
    assert value(telemetry.snapshot(), "duly_pending") == 3
    assert value(telemetry.snapshot(), "duly_pending") == 5
    with pytest.raises(ValueError, match="not a gauge"):
        telemetry.read("duly_retries_total", lambda: 0)


def test_a_counter_that_is_durable_is_shown_as_it_is_stored() -> None:
    telemetry = Telemetry()
    telemetry.retried(7)
    telemetry.retries.stored = 4
    assert value(telemetry.snapshot(), "duly_retries_total") == 7
    assert value(telemetry.snapshot(stored=True), "duly_retries_total") == 4


def test_a_histogram_has_percentiles() -> None:
    telemetry = Telemetry()
    for ms in range(1, 101):
        telemetry.commits.observe(ms / 1000)
    (metric,) = [one for one in telemetry.snapshot().metrics if one.name == "duly_commit_seconds"]
    (histogram,) = metric.histograms
    assert histogram.count == 100
    assert histogram.p50 == pytest.approx(0.05, abs=0.01)
    assert histogram.p99 == pytest.approx(0.1, abs=0.01)
    assert histogram.sum == pytest.approx(5.05)


def test_a_quantile_beyond_the_last_bucket_is_its_end() -> None:
    assert quantile((1.0, 2.0), [0, 0, 5], 0.5) == 2.0
    assert quantile((1.0,), [0, 0], 0.5) == 0.0


def test_points_become_rates_and_percentiles_of_their_own_time() -> None:
    series = TimeSeries(("accepted", "pending"))
    for second in range(123):
        series.add(second * 1000, [second * 10], [second], [second, 0], [0, 0])
    seconds, minutes = series.points(ChartStep.SECOND), series.points(ChartStep.MINUTE)
    assert [point.rates for point in seconds[-3:]] == [[10.0]] * 3
    assert [(point.rates, point.totals) for point in minutes] == [([10.0], [60, 0])] * 2
    assert seconds[-1].gauges == [122]


def test_charts_are_bounded_and_outlive_a_clock_that_is_set_back() -> None:
    series = TimeSeries(("accepted",))
    for second in range(2_000):
        series.add(second * 1000, [second], [], [0], [0])
    assert len(series.points(ChartStep.SECOND)) == ChartStep.SECOND.kept
    series.add(0, [2_000], [], [0], [0])
    series.add(1_000, [2_001], [], [0], [0])
    assert series.points(ChartStep.SECOND)[-1].rates == [1.0]


def test_rates_of_a_snapshot_are_those_of_the_last_seconds() -> None:
    telemetry = Telemetry()
    assert telemetry.snapshot().rates == {}
    telemetry.read("duly_pending", lambda: 4)
    telemetry.sample()
    telemetry.count("query", "done", 100)
    telemetry.sample()
    rates = telemetry.snapshot().rates
    assert rates["done"] > 0
    assert rates["pending"] == 4
    chart = telemetry.chart(ChartStep.SECOND)
    assert chart.columns[0] == "time"
    assert all(len(row) == len(chart.columns) for row in chart.rows)
