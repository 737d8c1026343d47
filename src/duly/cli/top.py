"""`duly top`: the metrics of a hub in a terminal, as they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Annotated, Final

import typer

from duly.cli.common import (
    CommandFailed,
    HubClient,
    HubUnreachable,
    JsonObject,
    clock,
    pad,
    print_json,
    say,
    style,
    tint,
    took,
)
from duly.cli.options import HubOptions, Json, grouped, length
from duly.cli.output import rendered

EVERY: Final = 1.0
SHORTEST: Final = 0.1
KINDS_SHOWN: Final = 12
LEDGERS: Final = {"PostgresLedger": "PostgreSQL", "SqliteLedger": "SQLite", "MemoryLedger": "memory"}
"""The names of ledgers as shown, by the class that the hub reports."""
SPARKS: Final = "▁▂▃▄▅▆▇█"
RATES: Final = ("accepted", "done", "duplicate", "retries", "superseded", "refused", "unknown", "failed")
OUTCOMES: Final = (
    "accepted", "done", "failed", "expired", "superseded", "cancelled", "unknown", "duplicate", "refused",
)  # fmt: skip


@grouped
def top(
    once: Annotated[bool, typer.Option("--once", help="Show the metrics once and exit.")] = False,
    every: Annotated[float | None, length("--every", "How often to refresh. [1s]")] = None,
    *,
    at: HubOptions,
    json: Json = False,
) -> None:
    """Show the metrics of a hub as they change. Ctrl-C ends it.

    Needs the token of an admin or a monitor, or the data folder of the hub. With --json they are printed
    once.
    """
    hub = at.need()
    if json:
        print_json(hub.ask("/v1/metrics"))
    elif once:
        say(*overview(*_read(hub)))
    else:
        if every is not None and every < SHORTEST:
            raise typer.BadParameter(f"at least {SHORTEST:g}s", param_hint="--every")
        _live(at, hub, EVERY if every is None else every)


def _read(hub: HubClient) -> tuple[JsonObject, list[list[float]]]:
    chart = hub.ask("/v1/metrics/second")
    return hub.ask("/v1/metrics"), chart["rows"][-60:]


def _live(at: HubOptions, hub: HubClient, every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    terminal = console.is_terminal
    with Live(console=console, screen=True, auto_refresh=False) if terminal else nullcontext() as live:
        while True:
            try:
                shown = overview(*_read(hub))
            except HubUnreachable as gone:
                shown = [f"{gone}; waiting for it"]
                hub = _again(at, hub)
            if live is None:
                say(*shown, "")
            else:
                live.update(Text.from_ansi("\n".join(map(rendered, shown))), refresh=True)
            time.sleep(every)


def _again(at: HubOptions, hub: HubClient) -> HubClient:
    """Return the hub as it is found now: after a restart its run file has another token."""
    try:
        return at.need()
    except CommandFailed:
        return hub


# ── what is shown ────────────────────────────────────────────────────────────────────────────────


def overview(answer: JsonObject, chart: list[list[float]]) -> list[str]:
    """Return the metrics as lines."""
    snapshot, state = answer["snapshot"], answer["state"]
    rates = snapshot["rates"]
    gauges = {metric["name"]: metric for metric in snapshot["metrics"]}

    def value(name: str) -> float:
        return float(sum(sample["value"] for sample in gauges[name]["samples"]))

    pending, oldest = value("duly_pending") + value("duly_waiting"), value("duly_oldest_pending_seconds")
    waits = f", the oldest for {took(oldest * 1000)}" if pending else ""
    connections = " · ".join(
        f"{sample['labels']['role']} {sample['value']:.0f}"
        for sample in gauges["duly_connections"]["samples"]
    )
    return [
        _headline(snapshot),
        _health(state, value),
        "",
        _row("per second", " · ".join(f"{tint(word)} {rates.get(word, 0):.1f}" for word in RATES)),
        _row("last minute", _sparks([row[1] for row in chart])),
        _row(
            "time",
            f"p50 {took(rates.get('p50_ms', 0))}, p99 {took(rates.get('p99_ms', 0))} · "
            f"commit p50 {took(rates.get('commit_p50_ms', 0))}, p99 {took(rates.get('commit_p99_ms', 0))}",
        ),
        _row(
            "pending",
            f"{pending:.0f}{waits} · held for order {value('duly_reorder_held'):.0f} · "
            f"dead letters {value('duly_dead_letters'):.0f}",
        ),
        _row("connections", connections),
        _row("clocks", f"the largest difference of a sender is {value('duly_clock_skew_seconds'):.1f} s"),
        "",
        *_totals(answer["cluster"]),
        "",
        _row("alerts", _alerts(answer["cluster"])),
    ]


def _row(name: str, text: str) -> str:
    return f"{style(pad(name, 12), 'dim')}  {text}"


def _headline(snapshot: JsonObject) -> str:
    lasted = took(snapshot["time"] - snapshot["started"])
    return f"duly {snapshot['hub']}  up {lasted}  {clock(snapshot['time'])}"


def _health(state: JsonObject, value: Callable[[str], float]) -> str:
    """Return the health of the hub as a line; a monitor is not told the reasons."""
    hubs = f"{value('duly_cluster_hubs'):.0f} hub{'s' if value('duly_cluster_hubs') != 1 else ''}"
    notifier = "" if value("duly_notifier_up") else style(" · no hints arrive", "yellow")
    if not state:
        return hubs + notifier
    mqtt = state["mqtt"]
    broker = "no MQTT" if mqtt is None else mqtt["problem"] or "broker works"
    health = style(f"down: {state['down']}", "red") if state["down"] else style("works", "green")
    problems = "".join(style(f" · {part} does not run", "red") for part in state["problems"])
    ledger = LEDGERS.get(state["ledger"], state["ledger"])
    return f"{health} · {ledger} · {broker} · {hubs}{notifier}{problems}"


def _sparks(rates: list[float]) -> str:
    """Return accepted messages per second as a row of bars."""
    if not rates:
        return "(nothing yet)"
    most = max(rates)
    bars = (SPARKS[min(7, int(8 * rate / most))] if most else SPARKS[0] for rate in rates)
    return f"{''.join(bars)}  at most {most:.1f} accepted a second"


def _totals(cluster: list[JsonObject]) -> Iterable[str]:
    """Return the totals of all hubs by kind and outcome, as a table."""
    counts: dict[str, dict[str, int]] = {}
    for one in cluster:
        if one["name"] == "duly_messages_total":
            row = counts.setdefault(one["labels"]["kind"], {})
            outcome = one["labels"]["outcome"]
            row[outcome if outcome in OUTCOMES else "refused"] = (
                row.get(outcome if outcome in OUTCOMES else "refused", 0) + one["value"]
            )
    if not counts:
        return ["there are no messages yet; 'duly send' sends one"]
    kinds = sorted(counts, key=lambda kind: -sum(counts[kind].values()))
    width = max(len("in all"), *(len(kind) for kind in kinds[:KINDS_SHOWN]))
    lines = [style(pad("in all", width) + "".join(f"{word:>11}" for word in OUTCOMES), "dim")]
    for kind in kinds[:KINDS_SHOWN]:
        cells = "".join(f"{counts[kind].get(word, 0) or '·':>11}" for word in OUTCOMES)
        lines.append(pad(kind, width) + cells)
    if len(kinds) > KINDS_SHOWN:
        lines.append(f"… and {len(kinds) - KINDS_SHOWN} more kinds")
    return lines


def _alerts(cluster: list[JsonObject]) -> str:
    totals = {(one["name"], *one["labels"].values()): one["value"] for one in cluster}

    def total(name: str, *labels: str) -> int:
        return int(totals.get((f"duly_alert_{name}_total", *labels), 0))

    successes = total("retry_successes")
    average = total("retries_of_successes") / successes if successes else 0.0
    held = " · ".join(f"{word} {total('held_back', word)}" for word in ("debounce", "limit", "cooldown"))
    return (
        f"events {total('events')} · duplicates {total('duplicates')} · held back by {held} · "
        f"retries {total('retry_attempts')}, successful {successes}, on average {average:.1f}"
    )
