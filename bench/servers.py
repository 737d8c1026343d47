"""Servers of our own: free ports on loopback, folders of their own, gone afterwards."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("redis-server did not start") from None
                time.sleep(0.02)
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
