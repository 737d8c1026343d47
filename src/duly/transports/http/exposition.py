"""Writes metrics in the text form of Prometheus, with those of the process beside them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from duly.runtime.telemetry import MetricKind, MetricSnapshot, TelemetrySnapshot


class _SnapshotCollector(Collector):
    """Gives a snapshot to prometheus-client."""

    def __init__(self) -> None:
        self.metrics: list[MetricSnapshot] = []

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of the snapshot."""
        for metric in self.metrics:
            yield _family(metric)


class Exposition:
    """Writes snapshots of one process."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._own = _SnapshotCollector()
        self._registry.register(self._own)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def text(self, snapshot: TelemetrySnapshot) -> bytes:
        """Return a snapshot as Prometheus reads it."""
        self._own.metrics = snapshot.metrics
        return generate_latest(self._registry)


def _family(metric: MetricSnapshot) -> Family:
    labels = list(metric.labels)
    match metric.kind:
        case MetricKind.COUNTER:
            counter = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=labels)
            for sample in metric.samples:
                counter.add_metric([sample.labels[name] for name in labels], sample.value)
            return counter
        case MetricKind.GAUGE:
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=labels)
            for sample in metric.samples:
                gauge.add_metric([sample.labels[name] for name in labels], sample.value)
            return gauge
        case MetricKind.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            for one in metric.histograms:
                ends = [*(str(float(bound)) for bound in one.bounds), "+Inf"]
                buckets = [(end, float(n)) for end, n in zip(ends, accumulate(one.counts), strict=True)]
                histogram.add_metric([one.labels[name] for name in labels], buckets, one.sum)
            return histogram
