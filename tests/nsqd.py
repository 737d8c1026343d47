"""An NSQ server for tests, built once with Go: Debian has no package of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.servers import OneProcess, free_port, server_folder, unable, wait_for_port

VERSION = "v1.2.0"
PACKAGE = "github.com/nsqio/nsq/apps/nsqd"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "duly-tests")


def binary() -> Path:
    """The server's program; it is built into a cache folder if it is not there."""
    made = CACHE / f"nsqd-{VERSION}"
    if made.exists():
        return made
    go = shutil.which("go")
    if go is None:
        unable("NSQ is tested where there is Go to build it with, and there is none here")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "nsqd.lock").open("w") as lock, tempfile.TemporaryDirectory() as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for command in (["mod", "init", "nsqd"], ["get", f"{PACKAGE}@{VERSION}"], ["install", PACKAGE]):
                done = subprocess.run(
                    [go, *command], cwd=folder, env=os.environ | {"GOBIN": folder}, capture_output=True,
                    text=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    unable(f"NSQ could not be built: go {' '.join(command)}: {done.stderr[-500:]}")
            shutil.move(Path(folder, "nsqd"), made)
    return made


class Nsqd(OneProcess):
    """An NSQ of our own."""

    def __init__(self) -> None:
        self._binary = binary()
        super().__init__(server_folder("nsq"))
        self.http_port = free_port()

    def start(self) -> None:
        self._start(
            self._binary, f"--data-path={self.folder}", "--broadcast-address=127.0.0.1",
            f"--tcp-address=127.0.0.1:{self.port}", f"--http-address=127.0.0.1:{self.http_port}",
        )  # fmt: skip
        assert self._process is not None
        wait_for_port(self.http_port, self._process, "nsqd")
