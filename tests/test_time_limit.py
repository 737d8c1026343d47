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


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["in one process", "in a worker"])
def test_the_stacks_of_threads_and_tasks_are_in_the_output_of_the_run(
    workers: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    plugins = [f"-p{name}" for name in ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-ptests.time_limit", "--timeout=2", *workers],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "test_hanging.py::test_hangs was not over after 2 s" in said
    assert "the last words" in said
    assert "thread MainThread:" in said
    at = said[said.index("1 task at:") :]
    assert "await asyncio.Event().wait()" in at
    assert "await asyncio.wait([task])" in at
