"""Servers of our own: free ports on loopback, folders of their own, gone afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.processes import ProcessDied, Server, ending, first_line

READY = 60.0
"""Seconds that a server may take to start."""


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def until_open(port: int, process: subprocess.Popen[bytes], what: str, seconds: float = READY) -> None:
    """Returns when a server has opened its port; one that dies or takes too long is an error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            if process.poll() is not None:
                raise ProcessDied(f"{what} {ending(process.returncode)} before it was ready") from None
            if time.monotonic() > deadline:
                raise ProcessDied(f"{what} did not open its port within {seconds:g} s") from None
            time.sleep(0.02)


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a server afterwards: asks, and kills it if it does not listen."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def redis_server(root: Path, *options: str) -> Iterator[Server | None]:
    """A redis-server with its default settings and these; None if it is not installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    port = free_port()
    root.mkdir()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(root), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with running(process):
        until_open(port, process, "redis-server")
        yield Server(f"redis://127.0.0.1:{port}/0", process.pid, "redis-server")


@contextlib.contextmanager
def postgres_server() -> Iterator[Server | None]:
    """A new PostgreSQL with its default settings; None if it is not installed."""
    if not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) and shutil.which("initdb") is None:
        yield None
        return
    from tests import servers

    with servers.postgres() as server:
        yield Server(server.create_database(), server.pid, "PostgreSQL")


@contextlib.contextmanager
def nats_server(root: Path, *, synced: bool) -> Iterator[Server | None]:
    """A nats-server with JetStream; synced: every message is flushed before it is acknowledged. None if
    nats-py, which the load needs, is not installed."""
    if importlib.util.find_spec("nats") is None:
        yield None
        return
    port = free_port()
    root.mkdir()
    sync = "always" if synced else '"2m"'
    (root / "nats.conf").write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{root}", sync_interval: {sync} }}\n'
    )
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    process = subprocess.Popen([str(beside), "-c", str(root / "nats.conf"), "-l", str(root / "log")])
    with running(process):
        until_open(port, process, "nats-server")
        yield Server(f"nats://127.0.0.1:{port}", process.pid, "nats-server")


@contextlib.contextmanager
def serving(command: Sequence[str], what: str, **env: str) -> Iterator[Server]:
    """A program that says `ready URL` when it serves; killed afterwards, as nothing of it is needed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | env)
    try:
        line = first_line(process, what, READY)
        if not line.startswith("ready "):
            raise ProcessDied(f"{what} did not start: {line}")
        yield Server(line.split()[1], process.pid, what)
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def relay(name: str, root: Path, *more: str) -> contextlib.AbstractContextManager[Server]:
    """A contender of `bench.relays` in a process of its own."""
    root.mkdir(0o700, exist_ok=True)
    return serving([sys.executable, "-m", "bench.relays", name, str(root), *more], f"the {name} relay")


def hub(root: Path, *more: str, source: Path | None = None) -> contextlib.AbstractContextManager[Server]:
    """A hub, as `duly up --no-mqtt` runs it; of another version if its source is named."""
    root.mkdir(0o700, exist_ok=True)
    command = ["-m", "duly", "up", "--no-mqtt", "--port", "0", "--data", str(root), *more]
    env = {"PYTHONPATH": str(source)} if source else {}
    return serving([sys.executable, *command], "the hub" if source is None else "the hub before", **env)


def shared_hub(root: Path, ledger: str, *more: str) -> contextlib.AbstractContextManager[Server]:
    """One of several hubs on a PostgreSQL; they share the key beside their folders."""
    root.mkdir(0o700, exist_ok=True)
    return hub(root, "--ledger", ledger, "--secret-key", str(root.parent / "secret.key"), *more)
