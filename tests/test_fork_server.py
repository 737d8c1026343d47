"""A program that the fork server starts is a process like any other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.guard import GUARD
from tests.power_loss import PowerLoss, build

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="all programs are ordinary here")
DULY = [sys.executable, "-m", "duly"]


def test_its_output_its_exit_code_and_its_folder_are_its_own(tmp_path: Path) -> None:
    made = subprocess.run([*DULY, "add", "app", "phone"], cwd=tmp_path, capture_output=True, check=False)
    assert (made.returncode, made.stdout[:5]) == (0, b"duly_")
    assert (tmp_path / "duly-data" / "ledger.db").exists()
    wrong = subprocess.run([*DULY, "--nonsense"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--nonsense" in wrong.stderr


def test_its_environment_is_its_own(tmp_path: Path) -> None:
    env = {**os.environ, "DULY_DATA": str(tmp_path / "there")}
    subprocess.run([*DULY, "add", "app", "phone"], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_it_is_a_child_of_this_process_and_dies_of_its_signals(tmp_path: Path) -> None:
    up = [*DULY, "up", "--no-mqtt", "--port", "0"]
    for how, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with subprocess.Popen(up, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as hub:
            assert hub.stdout is not None
            assert hub.stdout.readline().startswith("ready ")
            stat = Path(f"/proc/{hub.pid}/stat").read_text()
            assert int(stat.rpartition(")")[2].split()[1]) == os.getpid()
            os.kill(hub.pid, how)
            assert hub.wait(GUARD) == code


async def test_an_event_loop_waits_for_it_too(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(*DULY, "--version", cwd=tmp_path, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    assert (process.returncode, said[:5]) == (0, b"duly ")


def test_an_interpreter_with_other_settings_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("the fork server was asked")

    monkeypatch.setattr(fork_server.ForkServer, "start", refuse)
    env = {**os.environ, "PYTHONUTF8": "1"}
    assert subprocess.run([*DULY, "--version"], env=env, capture_output=True, check=False).returncode == 0


def test_a_library_that_is_preloaded_has_a_fork_server_of_its_own(tmp_path: Path) -> None:
    """And learns what it is to watch when its program is split off."""
    library, folder = build(tmp_path), tmp_path / "disk"
    folder.mkdir()
    power = PowerLoss(library, folder, tmp_path / "log")
    add = [*DULY, "add", "app", "phone", "--data", str(folder)]
    subprocess.run(add, env=os.environ | power.env, check=True, capture_output=True)
    assert str(library) in fork_server._servers
    assert str(folder / "ledger.db").encode() in (tmp_path / "log" / "log").read_bytes()
