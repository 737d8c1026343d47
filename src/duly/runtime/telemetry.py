"""The metrics of one hub: counters, gauges and histograms, declared as data.

The laws. A counter is one attribute, and counting adds 1 to it: no lookup by labels happens per message. A
gauge is read on demand. Labels are bounded: kinds of messages beyond `KINDS` are counted as `other`. A kind
has a counter for each of `OUTCOMES` from its first message on, so that a rate sees the first of each. A
durable counter is never shown higher than it is stored (`durable_totals`), so that no counter goes backwards
when the hub is killed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct

from duly.core.units import MS, SECOND
from duly.runtime.clock import Clock, SystemClock
from duly.runtime.time_series import ChartPoint, ChartStep, TimeSeries, quantile

KINDS: Final = 40
"""How many kinds of messages are counted by name; further ones are `other`."""
OTHER: Final = "other"
RATE_SECONDS: Final = 10
"""The time in seconds over which the rates of a snapshot are measured."""

FAST: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds of the buckets for what takes milliseconds, in seconds."""
SLOW: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)
"""Upper bounds of the buckets for what may wait for people, in seconds."""

Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in their order."""
GaugeReader: TypeAlias = Callable[[], float | Mapping[Labels, float]]
"""Reads a gauge: a number, or a number for each of its labels. It is called often and must be cheap."""


class MetricKind(StrEnum):
    """What a metric measures."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(Struct, frozen=True):
    """The declaration of a metric. The total of a `durable` metric survives a restart."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    durable: bool = False
    buckets: tuple[float, ...] = ()


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help_, labels, durable=True)


def _gauge(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, help_, labels)


METRICS: Final = (
    _counter(
        "duly_messages_total",
        "Messages by what was said of them (accepted, duplicate, conflict, stale, refused) and by how they "
        "ended (done, failed, expired, superseded, cancelled, unknown).",
        "kind", "outcome",
    ),
    _counter("duly_duplicates_total", "Repeats of messages that were answered without running anything."),
    _counter("duly_retries_total", "Attempts after the first one, to devices and to recipients of alerts."),
    _counter("duly_superseded_total", "Messages that came too late: a later one of their order had run."),
    _counter("duly_auth_failures_total", "Logins with a wrong token or password."),
    _counter(
        "duly_broker_refused_total",
        "What the embedded broker refused: connections, publishes and subscriptions.",
    ),
    _counter(
        "duly_limited_total",
        "What was refused since its account had sent or stored too much: commands, lines, pushes, alerts, "
        "groups; or had too many commands waiting (queue).",
        "kind",
    ),
    _gauge(
        "duly_limit",
        "The limits of one account: messages a minute by kind, commands that may wait (queue), megabytes a "
        "day (stored); 0 does not limit.",
        "kind",
    ),
    _counter("duly_alert_events_total", "Events that sentinels reported, without repeats."),
    _counter("duly_alert_duplicates_total", "Repeats of events."),
    _counter(
        "duly_alert_held_back_total",
        "Signals that sentinels held back, by reason: debounce, limit, cooldown.",
        "reason",
    ),
    _counter("duly_alert_retry_attempts_total", "Attempts after the first one to notify a recipient."),
    _counter("duly_alert_retry_successes_total", "Notifications that arrived after a retry."),
    _counter(
        "duly_alert_retries_of_successes_total",
        "Retries that those notifications took; divided by their number it is the average.",
    ),
    _gauge("duly_alert_average_retries", "Retries per notification that arrived after a retry."),
    _gauge("duly_pending", "Messages that this hub has under way."),
    _gauge(
        "duly_waiting",
        "Commands in a ledger of several hubs that wait for devices of no hub; the same at every hub.",
    ),
    _gauge("duly_oldest_pending_seconds", "Age of the oldest of those messages."),
    _gauge("duly_reorder_held", "Messages that wait for their turn or for a missing number before them."),
    _gauge("duly_dead_letters", "Notifications that were given up and still need a person."),
    _gauge(
        "duly_clock_skew_seconds",
        "How far the clock of the sender that is farthest off was from the hub's, in the last minute or two.",
    ),
    _gauge("duly_connections", "Open connections, by the role of their account.", "role"),
    _gauge("duly_cluster_hubs", "Hubs on this ledger that are alive, with this one."),
    _gauge("duly_ready", "Whether this hub takes messages, as /readyz answers: 1, or 0."),
    _gauge("duly_notifier_up", "Whether hints of other hubs arrive: 1, or 0. 1 where there is only one hub."),
    Metric(
        "duly_commit_seconds",
        MetricKind.HISTOGRAM,
        "Time that the ledger takes to store a group of steps.",
        buckets=FAST,
    ),
    Metric(
        "duly_end_to_end_seconds",
        MetricKind.HISTOGRAM,
        "Time of a message from its acceptance: until it is first sent (send), from there until it ends "
        "(run), and altogether (total).",
        ("stage",),
        buckets=SLOW,
    ),
)  # fmt: skip
"""Every metric of duly's own. Those of the process are added by `/metrics`."""

STAGES: Final = ("send", "run", "total")
REFUSED: Final = ("refused", "conflict", "stale")
"""The verdicts on messages that are not taken; charts and rates show them together, as `refused`."""
ENDS: Final = ("done", "failed", "expired", "superseded", "cancelled", "unknown")
OUTCOMES: Final = ("accepted", "duplicate", *REFUSED, *ENDS)
"""The outcomes by which messages of every kind are counted."""
CHARTED: Final = ("accepted", *ENDS, "duplicate", "refused", "retries")
"""The columns of a chart that are rates, per second."""


class CounterCell:
    """One counter. `value` counts since the start of this process; `stored` is the total in the ledger,
    including earlier processes; `base` is the part of `stored` from before the start."""

    __slots__ = ("base", "stored", "value")

    def __init__(self) -> None:
        self.value = 0
        self.base = 0
        self.stored = 0

    @property
    def total(self) -> int:
        """The whole total, including what is not stored yet."""
        return self.base + self.value


class HistogramCell:
    """One histogram: observations per bucket, their number and their sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    def observe_all(self, lengths: list[int]) -> None:
        """Add many observations, in microseconds."""
        if not lengths:
            return
        lengths.sort()
        before = 0
        for at, bound in enumerate(self._bounds):
            upto = bisect_right(lengths, bound * SECOND)
            self.counts[at] += upto - before
            before = upto
            if upto == len(lengths):
                break
        else:
            self.counts[-1] += len(lengths) - before
        self.sum += sum(lengths) / SECOND


class SampleSnapshot(Struct, frozen=True):
    """One value of a metric, with its labels."""

    labels: dict[str, str]
    value: float


class HistogramSnapshot(Struct, frozen=True):
    """One histogram of a metric, with its labels: counts per bucket (not summed up), and percentiles in
    seconds."""

    labels: dict[str, str]
    bounds: tuple[float, ...]
    counts: list[int]
    sum: float
    count: int
    p50: float
    p90: float
    p99: float


class MetricSnapshot(Struct, frozen=True):
    """A metric with its values."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    samples: list[SampleSnapshot] = []
    histograms: list[HistogramSnapshot] = []


class TelemetrySnapshot(Struct, frozen=True):
    """All metrics of one hub at one moment; times in milliseconds since 1970."""

    time: int
    hub: str
    started: int
    rates: dict[str, float]
    """events per second in the last seconds; also `p50_ms` and `p99_ms` of a message from acceptance to
    outcome, and `commit_p50_ms` and `commit_p99_ms` of a commit"""
    metrics: list[MetricSnapshot]


class ChartSnapshot(Struct, frozen=True):
    """Columns over time for a chart: `rows` begin with a time in milliseconds, oldest first."""

    step: ChartStep
    seconds: int
    columns: list[str]
    rows: list[list[float]]


class Telemetry:
    """The metrics of one hub; `hub` is its name."""

    def __init__(self, hub: str = "", clock: Clock | None = None) -> None:
        self.hub = hub
        self._clock = clock or SystemClock()
        self.started = self._clock.now()
        self.metrics = {metric.name: metric for metric in METRICS}
        self._counters: dict[str, dict[Labels, CounterCell]] = {
            metric.name: {} for metric in METRICS if metric.kind is MetricKind.COUNTER
        }
        self._kinds: set[str] = set()
        self._gauges: dict[str, GaugeReader] = {}
        self.duplicates = self.counter("duly_duplicates_total")
        self.retries = self.counter("duly_retries_total")
        self.superseded = self.counter("duly_superseded_total")
        self.auth_failures = self.counter("duly_auth_failures_total")
        self.broker_refused = self.counter("duly_broker_refused_total")
        self.commits = HistogramCell(FAST)
        self.stages = {stage: HistogramCell(SLOW) for stage in STAGES}
        self._outcomes: dict[tuple[str, str], CounterCell] = {}
        """counters of messages by kind and outcome, before kinds are bounded"""
        self._charted = {name: CounterCell() for name in CHARTED}
        self.series = TimeSeries((*CHARTED, "pending", "connections"))

    # ── counting ─────────────────────────────────────────────────────────────────────────────────

    def counter(self, name: str, *labels: str) -> CounterCell:
        """Return the counter of a metric with these labels; a caller on a hot path keeps it."""
        cells = self._counters[name]
        return cells.get(labels) or cells.setdefault(labels, CounterCell())

    def count(self, kind: str, outcome: str, times: int = 1) -> None:
        """Count messages of a kind by their verdict or outcome."""
        cell = self._outcomes.get((kind, outcome))
        if cell is None:
            cell = self._outcomes[kind, outcome] = self._outcome(kind, outcome)
        cell.value += times
        charted = self._charted.get("refused" if outcome in REFUSED else outcome)
        if charted is not None:
            charted.value += times
        if outcome == "duplicate":
            self.duplicates.value += times
        elif outcome == "superseded":
            self.superseded.value += times

    def count_refused(self, kind: str, word: str) -> None:
        """Count a message that was refused before it reached its application. A kind of which no message was
        ever taken is counted as `other`, since anything may stand in its place."""
        known = kind if kind in self._kinds else OTHER
        self.count(known, word if word in REFUSED else "refused")

    def _outcome(self, kind: str, outcome: str) -> CounterCell:
        if len(self._outcomes) > 50 * KINDS:
            self._outcomes.clear()
        return self.counter("duly_messages_total", self.bounded_kind(kind), outcome)

    def bounded_kind(self, kind: str) -> str:
        """Return the label of a kind: its name, or `other` if there are too many kinds. A new label gets a
        counter for each outcome."""
        if kind in self._kinds:
            return kind
        label = kind if kind and len(self._kinds) < KINDS else OTHER
        if label != OTHER:
            self._kinds.add(kind)
        for outcome in OUTCOMES:
            self.counter("duly_messages_total", label, outcome)
        return label

    def retried(self, times: int = 1) -> None:
        """Count attempts after the first."""
        self.retries.value += times
        self._charted["retries"].value += times

    def read(self, name: str, reader: GaugeReader) -> None:
        """Set the reader of a gauge."""
        if self.metrics[name].kind is not MetricKind.GAUGE:
            raise ValueError(f"{name} is not a gauge")
        self._gauges[name] = reader

    # ── showing ──────────────────────────────────────────────────────────────────────────────────

    def cells(self) -> Iterator[tuple[Metric, Labels, CounterCell]]:
        """Return all counters that have been used."""
        for name, cells in self._counters.items():
            for labels, cell in list(cells.items()):
                yield self.metrics[name], labels, cell

    def unsaved(self) -> dict[tuple[str, Labels], int]:
        """Return the counts that are not stored yet, by name and labels."""
        return {
            (metric.name, labels): cell.total - cell.stored
            for metric, labels, cell in self.cells()
            if cell.total != cell.stored
        }

    def gauge(self, name: str) -> dict[Labels, float]:
        """Return the present values of a gauge; none if it cannot be read yet."""
        reader = self._gauges.get(name)
        found = {} if reader is None else reader()
        return dict(found) if isinstance(found, Mapping) else {(): float(found)}

    def sample(self) -> None:
        """Add a point to the charts; called once a second."""
        gauges = [sum(self.gauge(name).values()) for name in ("duly_pending", "duly_connections")]
        self.series.add(
            self._clock.now() // MS,
            [cell.value for cell in self._charted.values()],
            gauges,
            self.stages["total"].counts,
            self.commits.counts,
        )

    def chart(self, step: ChartStep) -> ChartSnapshot:
        """Return the columns of a chart with points of this length."""
        columns = [*self.series.columns, *LATENCIES]
        rows = [_row(point) for point in self.series.points(step)]
        return ChartSnapshot(step, step.seconds, ["time", *columns], rows)

    def snapshot(self, *, stored: bool = False) -> TelemetrySnapshot:
        """Return all metrics; with `stored`, durable counters as far as they are stored."""
        found: list[MetricSnapshot] = []
        for metric in METRICS:
            shown = MetricSnapshot(metric.name, metric.kind, metric.help, metric.labels, [], [])
            match metric.kind:
                case MetricKind.COUNTER:
                    cells = self._counters[metric.name]
                    values = {
                        labels: cell.stored if stored and metric.durable else cell.total
                        for labels, cell in cells.items()
                    }
                    shown.samples.extend(_sample(metric, *one) for one in sorted(values.items()))
                case MetricKind.GAUGE:
                    gauges = sorted(self.gauge(metric.name).items())
                    shown.samples.extend(_sample(metric, *one) for one in gauges)
                case MetricKind.HISTOGRAM:
                    shown.histograms.extend(self._histograms(metric))
            found.append(shown)
        return TelemetrySnapshot(self._clock.now() // MS, self.hub, self.started // MS, self.rates(), found)

    def rates(self) -> dict[str, float]:
        """Return the rates per second over the last seconds, and the percentiles of that time."""
        point = self.series.recent(RATE_SECONDS)
        if point is None:
            return {}
        return dict(zip((*self.series.columns, *LATENCIES), _row(point)[1:], strict=True))

    def _histograms(self, metric: Metric) -> Iterator[HistogramSnapshot]:
        cells = {(): self.commits} if not metric.labels else {(s,): c for s, c in self.stages.items()}
        for labels, cell in cells.items():
            named = dict(zip(metric.labels, labels, strict=True))
            p50, p90, p99 = (quantile(metric.buckets, cell.counts, part) for part in (0.5, 0.9, 0.99))
            count = sum(cell.counts)
            yield HistogramSnapshot(named, metric.buckets, list(cell.counts), cell.sum, count, p50, p90, p99)


LATENCIES: Final = ("p50_ms", "p99_ms", "commit_p50_ms", "commit_p99_ms")


def _row(point: ChartPoint) -> list[float]:
    """Return a point as numbers: its time, its rates and gauges, and percentiles in milliseconds."""
    of_total = [quantile(SLOW, point.totals, part) * 1000 for part in (0.5, 0.99)]
    of_commit = [quantile(FAST, point.commits, part) * 1000 for part in (0.5, 0.99)]
    numbers = [*point.rates, *point.gauges, *of_total, *of_commit]
    return [float(point.time), *(round(number, 3) for number in numbers)]


def _sample(metric: Metric, labels: Labels, value: float) -> SampleSnapshot:
    return SampleSnapshot(dict(zip(metric.labels, labels, strict=True)), value)
