"""A test that hangs is ended, and the run says where it stood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HANGS = """
import asyncio, logging

async def waits_for_ever():
    await asyncio.Event().wait()

async def test_hangs():
    logging.getLogger("hub").warning("the last words")
    task = asyncio.create_task(waits_for_ever())
    await asyncio.wait([task])
"""
STARVES = """
import os, subprocess, sys

WORK = '''import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
while time.process_time() < 1: pass'''

def test_waits_for_three_that_share_a_processor():
    processor = str(min(os.sched_getaffinity(0)))
    working = [subprocess.Popen([sys.executable, "-c", WORK, processor]) for _ in range(3)]
    assert [each.wait() for each in working] == [0, 0, 0]
"""


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["in one process", "in a worker"])
def test_the_stacks_of_threads_and_tasks_are_in_the_output_of_the_run(
    workers: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGS)
    done = run(tmp_path, "--timeout=2", *workers)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "test_hanging.py::test_hangs was not over after 2 s" in said
    assert "the last words" in said
    assert "thread MainThread:" in said
    at = said[said.index("1 task at:") :]
    assert "await asyncio.Event().wait()" in at
    assert "await asyncio.wait([task])" in at


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a process had no processor")
def test_the_time_for_which_a_process_of_the_test_had_no_processor_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_starving.py").write_text(STARVES)
    done = run(tmp_path, "--timeout=2")
    assert done.returncode == 0, done.stdout + done.stderr


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder, under the time limit of this one."""
    (folder / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    plugins = [f"-p{name}" for name in ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-ptests.run_folder", "-ptests.time_limit", *args],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
