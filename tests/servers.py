"""Real servers for tests, each on a free port with a folder of its own, so that it can be killed.

A missing server is a skip on a laptop and a failure in CI.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def missing(what: str) -> None:
    message = f"{what} is not installed; 'make test' as root on Debian installs it"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def wait_for_port(port: int, process: subprocess.Popen[bytes], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended at once with code {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{what} did not open port {port} within {seconds} s")


class Postgres:
    """A PostgreSQL server of our own."""

    def __init__(self) -> None:
        found = (
            sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
            if Path("/usr/lib/postgresql").is_dir()
            else []
        )
        on_path = shutil.which("initdb")
        if not found and not on_path:
            missing("postgresql")
        self._bin = found[-1].parent if found else Path(str(on_path)).parent
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="duly-pg-"))
        self._data = self._folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(self._folder, entry.pw_uid, entry.pw_gid)
        subprocess.run(
            [self._bin / "initdb", "-D", self._data, "-U", "duly", "--auth=trust", "--no-sync", "-E", "UTF8"],
            check=True, capture_output=True, user=self._user, cwd=self._folder,
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(
            [self._bin / "postgres", "-D", self._data, "-p", str(self.port), "-k", self._folder, "-h", "127.0.0.1"],
            stdout=log, stderr=log, user=self._user, cwd=self._folder,
        )  # fmt: skip
        log.close()
        wait_for_port(self.port, self._process, "postgres")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def create_database(self, name: str) -> str:
        subprocess.run(
            [self._bin / "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "duly", "-d", "postgres", "-qc",
             f'CREATE DATABASE "{name}"'],
            check=True, capture_output=True,
        )  # fmt: skip
        return f"postgresql://duly@127.0.0.1:{self.port}/{name}"

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    try:
        yield server
    finally:
        server.remove()
