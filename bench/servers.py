"""Servers of our own: free ports on loopback, folders of their own, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def until_open(port: int, process: subprocess.Popen[bytes], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.args!r} did not start") from None
            time.sleep(0.02)


@contextlib.contextmanager
def redis_server(place: Path, *options: str) -> Iterator[int | None]:
    """The port of a redis-server with its default settings and these; None if it is not installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    port = free_port()
    place.mkdir()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(place), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until_open(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def postgres_url() -> Iterator[str | None]:
    """A new PostgreSQL with its default settings; None if it is not installed."""
    if not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) and shutil.which("initdb") is None:
        yield None
        return
    from tests import servers

    with servers.postgres() as server:
        yield server.create_database("bench")


@dataclass
class Server:
    url: str
    pid: int

    @property
    def memory(self) -> int:
        """Bytes it holds."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    @property
    def worked(self) -> float:
        """Seconds of processor time it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def nats_server(place: Path, *, synced: bool) -> Iterator[Server]:
    """A nats-server with JetStream; synced: every message is flushed before it is acknowledged."""
    port = free_port()
    place.mkdir()
    sync = "always" if synced else '"2m"'
    (place / "nats.conf").write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{place}", sync_interval: {sync} }}\n'
    )
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    command = [str(beside), "-c", str(place / "nats.conf"), "-l", str(place / "log")]
    process = subprocess.Popen(command)
    try:
        until_open(port, process)
        yield Server(f"nats://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def hub(name: str, place: Path, *more: str) -> Iterator[Server]:
    """A contender of `bench.hubs` in a process of its own."""
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.hubs", name, str(place), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"the hub {name!r} did not start")
        yield Server(line.split()[1], process.pid)
    finally:
        process.kill()
        process.wait(10)
