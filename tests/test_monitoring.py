"""What is in `deploy/prometheus` and `deploy/grafana` fits the metrics of a hub: by promtool, by a Prometheus
that reads a hub, and by the names of metrics."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duly.identity.accounts import Role
from duly.runtime.telemetry import METRICS, MetricKind
from tests import servers
from tests.guard import GUARD
from tests.local_hub import LocalHub

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES: dict[str, Any] = msgspec.yaml.decode((DEPLOY / "prometheus" / "alerts.yaml").read_bytes())
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "duly.json").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        servers.missing("prometheus")
    return found


def promtool(*args: str) -> None:
    done = subprocess.run(
        [program("promtool"), *args],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def known_names() -> set[str]:
    names = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    for metric in METRICS:
        ends = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        names |= {metric.name + end for end in ends}
    return names


def names_in(expr: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|(?:by|on) \([^)]*\)|\"[^\"]*\"", "", expr)
    words = set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_]+", bare))
    return words - {
        "sum", "rate", "max", "increase", "histogram_quantile", "max_over_time", "count_over_time",
        "sum_over_time", "and", "or", "on", "group_left",
    }  # fmt: skip


def test_the_rules_are_rules() -> None:
    promtool("check", "rules", "alerts.yaml")


def test_each_rule_fires_when_it_should() -> None:
    promtool("test", "rules", "alerts_test.yaml")


def test_the_configuration_is_one(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yaml"):
        shutil.copy(DEPLOY / "prometheus" / name, tmp_path)
    (tmp_path / "duly-token").write_text("duly_token")
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


@pytest.mark.parametrize("expr", [*(rule["expr"] for rule in ALERTS), *QUERIES])
def test_rules_and_panels_name_only_metrics_that_there_are(expr: str) -> None:
    assert names_in(expr) <= known_names()


def test_every_metric_is_on_the_dashboard_or_in_a_rule() -> None:
    used = set().union(*(names_in(expr) for expr in [*(rule["expr"] for rule in ALERTS), *QUERIES]))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {metric.name for metric in METRICS} - shown == {"duly_alert_average_retries"}


def test_every_rule_says_what_to_do() -> None:
    for rule in ALERTS:
        assert rule["annotations"]["summary"], rule
        assert rule["annotations"]["description"].endswith("."), rule
        assert rule["labels"]["severity"] in ("warning", "critical"), rule


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


async def test_a_prometheus_reads_a_hub_with_the_token_of_a_monitor(local: LocalHub, tmp_path: Path) -> None:
    server, port = program("prometheus"), servers.free_port()
    token = await local.hub.accounts.add(Role.MONITOR, "prometheus")
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = re.sub(r"targets: \[.*\]", f'targets: ["127.0.0.1:{local.port}"]', config)
    (tmp_path / "prometheus.yml").write_text(config.replace(": 15s", ": 200ms"))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", tmp_path)
    (tmp_path / "duly-token").write_text(token)
    process = await asyncio.create_subprocess_exec(
        server, "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.path=data", cwd=tmp_path, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(GUARD):
            while not (found := await asyncio.to_thread(ask, port, 'duly_cluster_hubs{job="duly"}')):
                await asyncio.sleep(0.1)
        assert found[0]["value"][1] == "1"
        assert await asyncio.to_thread(ask, port, "process_resident_memory_bytes")
        assert await asyncio.to_thread(ask, port, 'duly_commit_seconds_bucket{le="+Inf"}')
    finally:
        process.terminate()
        await process.wait()


def ask(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(url, timeout=GUARD) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []  # it is not up yet
