"""A test run that is killed leaves no server, no hub and no folder behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guard import GUARD
from tests.orphans import orphans

ROOT = Path(__file__).parents[1]
SERVES = """
import os, subprocess, sys, time
from pathlib import Path
from tests.servers import Mosquitto, Postgres

def test_that_is_killed():
    server, broker = Postgres(), Mosquitto()
    broker.start()
    hub = [sys.executable, "-m", "duly", "up", "--port", "0", "--mqtt-port", "0", "--data", "hub"]
    with subprocess.Popen(hub, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout.readline().startswith("ready ")
        Path("running.tmp").write_text(os.environ["TEST_RUN_FOLDER"])
        Path("running.tmp").rename("running")
        time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environments of processes")
@pytest.mark.parametrize(
    ("how", "workers"),
    [(signal.SIGTERM, []), (signal.SIGKILL, ["-n1"])],
    ids=["one process, by SIGTERM", "with a worker, by SIGKILL"],
)
def test_a_killed_run_leaves_nothing_running(how: signal.Signals, workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_killed.py").write_text(SERVES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ["-pxdist.plugin", "-ptests.run_folder"]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugins, *workers],
        cwd=tmp_path, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    ) as run:  # fmt: skip
        try:
            running = tmp_path / "running"
            wait_until(lambda: running.exists() or run.poll() is not None)
            folder = running.read_text()
            started = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in orphans(folder)}
        finally:
            run.send_signal(how)
    assert {"postgres", "mosquitto", "nats-server"} <= started
    wait_until(lambda: not Path(folder).exists())
    assert not list(orphans(folder))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
