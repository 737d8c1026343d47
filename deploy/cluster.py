"""The set of `compose.yaml` as plain processes: PostgreSQL, Redis, a broker, three hubs and a balancer.

    python -m deploy.cluster                       # until Ctrl-C; what is where is printed
    python -m deploy.cluster --notifier postgres   # without Redis

Everything is on free ports of this machine, in a folder that goes with it. The tests kill its parts in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.servers import Mosquitto, Postgres, Redis, free_port, wait_for_port

HERE = Path(__file__).parent


class HubServer:
    """One hub, as `duly up` runs it."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        own = {"data": str(folder), "port": str(self.port)} | settings
        self._env = clean | {f"DULY_{name.upper()}": value for name, value in own.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "errors").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "duly", "up"], env=self._env, stdout=subprocess.DEVNULL, stderr=errors
            )
        wait_for_port(self.port, self._process, f"hub {self.folder.name}: {self.errors}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def errors(self) -> str:
        """What it has complained about."""
        place = self.folder / "errors"
        return place.read_text() if place.exists() else ""


class Balancer:
    """HAProxy, with the configuration of `compose.yaml`."""

    def __init__(self, hubs: list[HubServer]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        places = {f"HUB{n + 1}": f"127.0.0.1:{hub.port}" for n, hub in enumerate(hubs)}
        self._env = os.environ | places | {"LISTEN": f"127.0.0.1:{self.port}"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = shutil.which("haproxy") or "/usr/sbin/haproxy"
        self._process = subprocess.Popen(
            [binary, "-db", "-f", str(HERE / "haproxy.cfg")],
            env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for_port(self.port, self._process, "haproxy")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


class Cluster:
    """All of it. Its parts can be stopped and started one by one."""

    def __init__(self, hubs: int = 3, *, notifier: str = "redis", mqtt: bool = True, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="duly-cluster-"))
        self._closing = contextlib.ExitStack()
        self._closing.callback(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            self.postgres = Postgres()
            self._closing.callback(self.postgres.remove)
            self.ledger = self.postgres.create_database()
            settings |= {"ledger": self.ledger, "notifier": notifier}
            settings |= {"secret_key": str(self.folder / "secret.key")}
            self.redis = Redis() if notifier == "redis" else None
            if self.redis is not None:
                self._begin(self.redis)
                settings["notifier"] = self.redis.url
            self.broker = Mosquitto() if mqtt else None
            if self.broker is not None:
                self._begin(self.broker)
            settings |= {"no_mqtt": "true"} if self.broker is None else {"mqtt": self.broker.url("hub")}
            self.hubs = [HubServer(self.folder / f"hub{n + 1}", settings) for n in range(hubs)]
            self.balancer = Balancer(self.hubs) if hubs == 3 else None
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start the hubs, and the balancer before them; the servers behind them run already."""
        for hub in self.hubs:
            self._closing.callback(hub.stop, signal.SIGKILL)
            hub.start()
        if self.balancer is not None:
            self._closing.callback(self.balancer.stop)
            self.balancer.start()

    def _begin(self, server: Redis | Mosquitto) -> None:
        self._closing.callback(server.remove)
        server.start()

    @property
    def urls(self) -> str:
        """All hubs, as clients want to know them."""
        return ",".join(hub.url for hub in self.hubs)

    def stop(self) -> None:
        self._closing.close()


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--notifier", choices=["redis", "postgres"], default="redis")
    wanted = told.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = Cluster(notifier=wanted.notifier)
    try:
        cluster.start()
        lines = {
            "balancer": cluster.balancer.url if cluster.balancer else "",
            "hubs": cluster.urls,
            "mqtt": f"mqtt://127.0.0.1:{cluster.broker.port}" if cluster.broker else "",
            "ledger": cluster.ledger,
            "accounts": f"duly add device lock --data {cluster.hubs[0].folder}",
        }
        for name, value in lines.items():
            sys.stdout.write(f"{name:9} {value}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
