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
        """Start it, and come back when it lets people in."""
        deadline = time.monotonic() + 20
        while not self._started():
            # The port is open before it has recovered; after a SIGKILL what is left of its predecessor may
            # still hold the memory they share, and it ends at once.
            if time.monotonic() > deadline:
                raise RuntimeError(f"postgres did not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def _started(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            where = ["-D", str(self._data), "-p", str(self.port), "-k", str(self._folder), "-h", "127.0.0.1"]
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [self._bin / "postgres", *where],
                    stdout=log,
                    stderr=log,
                    user=self._user,
                    cwd=self._folder,
                    start_new_session=True,
                )
        asked = ["-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "duly", "-d", "postgres"]
        return subprocess.run([self._bin / "pg_isready", *asked], check=False).returncode == 0

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGKILL is for the whole server, its children too."""
        if self._process is not None:
            if how is signal.SIGKILL:
                os.killpg(self._process.pid, how)
            else:
                self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def create_database(self, name: str) -> str:
        """A place of its own: a schema, since a real database costs 300 files and a tenth of a second."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "duly", "-d", "postgres"]
        subprocess.run(
            [self._bin / "psql", *where, "-qc", f'CREATE SCHEMA "{name}"'], check=True, capture_output=True
        )
        return f"postgresql://duly@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{name}"

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)  # at once: nobody needs what it would still write
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    try:
        yield server
    finally:
        server.remove()
