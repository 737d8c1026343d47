"""Real servers for tests, each on a free port with a folder of its own, so that it can be killed.

A missing server is a skip on a laptop and a failure in CI.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Coroutine, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import quote

import pytest

from duly.broker.acl_dialects import BrokerUser
from duly.broker.embedded import EmbeddedBroker, nats_server
from tests.guard import GUARD
from tests.orphans import RUN_FOLDER
from tests.stopwatch import family

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
HOSTS = 8
"""Virtual hosts of the RabbitMQ that the workers of a run share."""
MADE_AT_ONCE = 50
"""Schemas in PostgreSQL."""

_reserved: deque[int] = deque()
"""Descriptors of sockets whose names are the ports that this process was given last. A name exists once."""
RESERVED = 256


def free_port() -> int:
    """A port of this process's own, until it has asked for many more.

    No server listens there, no other test is given it until its server does or while that is down, and no
    outgoing connection: clients that knock while a server is down would sooner or later connect to themselves
    there, and the server could not have it back."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # below what the system gives to connections
        name = socket.socket(socket.AF_UNIX)
        try:
            if sys.platform == "linux":
                name.bind(f"\0port-of-a-test-{port}")
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _reserved.append(name.detach())
        if len(_reserved) > RESERVED:
            os.close(_reserved.popleft())
        return port


def server_folder(of: str) -> Path:
    """A new folder for a server, in the folder of the run, if there is one: it goes with the run."""
    return Path(tempfile.mkdtemp(prefix=f"duly-{of}-", dir=os.environ.get(RUN_FOLDER)))


def missing(what: str) -> NoReturn:
    unable(f"{what} is not installed; 'make test' as root on Debian installs it")


def unable(message: str) -> NoReturn:
    """Skips a test that this machine cannot run; in CI every machine can, so it fails there."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def wait_for_port(port: int, process: subprocess.Popen[bytes], what: str, seconds: float = GUARD) -> None:
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
        self._folder = server_folder("pg")
        self._data = self._folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._unused: list[str] = []
        """schemas that no test has used"""
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(self._folder, entry.pw_uid, entry.pw_gid)
        self._prepare()
        self.start()

    def _prepare(self) -> None:
        """Make its files. `initdb` takes a second of a processor: the first server of a run does it, and the
        others copy what it has made."""
        run = os.environ.get(RUN_FOLDER)
        if run is None:
            self._initdb()
            return
        made = Path(run, "postgres")
        with Path(run, "postgres.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                self._initdb()
                subprocess.run(["cp", "-a", self._data, made], check=True)
                return
        subprocess.run(["cp", "-a", made, self._data], check=True)

    def _initdb(self) -> None:
        subprocess.run(
            [self._bin / "initdb", "-D", self._data, "-U", "duly", "--auth=trust", "--no-sync", "-E", "UTF8"],
            check=True, capture_output=True, user=self._user, cwd=self._folder,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and come back when it lets people in."""
        deadline = time.monotonic() + GUARD
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
        """SIGKILL is for the whole server, its children too: they would answer until they notice that it is
        gone."""
        if self._process is not None:
            if how is signal.SIGKILL:
                self.tell_all(how)
            else:
                self._process.send_signal(how)
            self._process.wait(GUARD)
            self._process = None

    def tell_all(self, what: signal.Signals) -> None:
        """A signal to the server and to each of its processes, which lead groups of their own."""
        for pid in list(family(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def create_database(self) -> str:
        """A place of its own: a schema, since a real database costs 300 files and a tenth of a second. Many
        are made at once: each call of psql takes a fiftieth of a second of a processor."""
        if not self._unused:
            self._unused = [f"t{secrets.token_hex(6)}" for _ in range(MADE_AT_ONCE)]
            where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "duly", "-d", "postgres"]
            made = "; ".join(f"CREATE SCHEMA {name}" for name in self._unused)
            subprocess.run([self._bin / "psql", *where, "-qc", made], check=True, capture_output=True)
        return (
            f"postgresql://duly@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{self._unused.pop()}"
        )

    def dump(self, url: str) -> str:
        """What is in such a place, as statements for another one."""
        name = url.rpartition("%3D")[2]
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "duly", "-d", "postgres", "-n", name]
        how = ["--inserts", "--no-owner", "--no-comments", "--no-privileges"]
        text = subprocess.run(
            [self._bin / "pg_dump", *where, *how], check=True, capture_output=True, text=True
        ).stdout
        left_out = ("--", "\\", "SET ", "CREATE SCHEMA", "SELECT pg_catalog.set_config")
        lines = [line for line in text.splitlines() if line and not line.startswith(left_out)]
        return "\n".join(lines).replace(f"{name}.", "") + "\n"

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


class OneProcess:
    """A server that is one process, with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _start(self, *command: str | Path) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_port(self.port, self._process, Path(command[0]).name)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(GUARD)
            self._process = None

    def remove(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Redis(OneProcess):
    """A Redis of our own, which keeps nothing."""

    def __init__(self) -> None:
        found = shutil.which("redis-server")
        if not found:
            missing("redis-server")
        super().__init__(server_folder("redis"))
        self._binary = str(found)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self._start(self._binary, *where, "--save", "", "--appendonly", "no")


class MqttServer(Protocol):
    """An MQTT broker of our own."""

    port: int

    def url(self, name: str) -> str:
        """Where it is, for a client of this name."""
        ...

    def start(self) -> None: ...
    def stop(self, how: signal.Signals = signal.SIGTERM) -> None: ...
    def remove(self) -> None: ...


class Mosquitto(OneProcess):
    """A Mosquitto of our own: the settings that docs/ recommends."""

    def __init__(self, *extra: str) -> None:
        found = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        if not Path(found).exists():
            missing("mosquitto")
        super().__init__(server_folder("mosquitto"))
        self._binary = found
        lines = [
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            "set_tcp_nodelay true",
            "max_queued_messages 1000000",
            "max_inflight_messages 1000",
            "persistence true",
            f"persistence_location {self.folder}/",
            "autosave_interval 1",
            *(["user root"] if os.geteuid() == 0 else []),
            *(line.format(folder=self.folder) for line in extra),
        ]
        (self.folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")

    def url(self, name: str) -> str:
        return f"mqtt://{quote(name)}@127.0.0.1:{self.port}"

    def start(self) -> None:
        self._start(self._binary, "-c", self.folder / "mosquitto.conf")


class RabbitMqHost:
    """A virtual host of a RabbitMQ: a broker by itself, at a port of its own."""

    def __init__(self, port: int, env: dict[str, str], host: str = "/") -> None:
        self.port = port
        self._env = env
        self._host = host

    @property
    def amqp_url(self) -> str:
        """Its address for those who do not speak MQTT."""
        return f"amqp://guest:guest@127.0.0.1:{self._env['RABBITMQ_NODE_PORT']}/{quote(self._host, safe='')}"

    def url(self, name: str) -> str:
        # It knows one user only, whom we use for everybody: the session's name is what tests need. It knows
        # each name once, whatever the virtual host: a test at another worker would take the session over.
        session = f"{quote(name).replace('.', '_')}-{self.port}"
        return f"mqtt://guest:guest@127.0.0.1:{self.port}?client_id={session}"

    def run(self, script: str) -> None:
        """A shell script that calls rabbitmqctl; unless told otherwise, it means the first virtual host."""
        env = self._env | {"PATH": f"{RABBITMQ.parent}:{self._env['PATH']}"}
        done = subprocess.run(["sh", "-e"], input=script.encode(), env=env, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{done.stdout.decode()} {done.stderr.decode()}")

    def start(self) -> None:
        raise RuntimeError("other tests use it: a test that stops its broker needs a RabbitMq of its own")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.start()

    def remove(self) -> None:
        self.start()


class RabbitMq(RabbitMqHost):
    """A RabbitMQ with its MQTT plugin, of our own: node, epmd, cookie and folders too."""

    def __init__(self, hosts: int = 1) -> None:
        epmd = shutil.which("epmd")
        if not RABBITMQ.exists() or epmd is None:
            missing("rabbitmq-server")
        self._epmd_binary = str(epmd)
        self.ports = [free_port() for _ in range(hosts)]
        self._folder = server_folder("rabbitmq")
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._epmd_port, node_port, dist_port = free_port(), free_port(), free_port()
        (self._folder / "plugins").write_text("[rabbitmq_mqtt].\n")
        (self._folder / "env.conf").write_text("")
        (self._folder / "definitions.json").write_text(json.dumps(_definitions(self.ports)))
        listeners = "".join(
            f"mqtt.listeners.tcp.{n} = 127.0.0.1:{port}\n" for n, port in enumerate(self.ports, 1)
        )
        (self._folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{node_port}\n{listeners}"
            f"load_definitions = {self._folder}/definitions.json\n"
            "mqtt.allow_anonymous = false\n"
            "mqtt.prefetch = 1000\n"  # 10 by default: how many it sends before it wants a PUBACK
        )
        env = {
            RUN_FOLDER: os.environ.get(RUN_FOLDER, ""),
            "PATH": os.environ["PATH"],
            "HOME": str(self._folder),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"duly-{self.ports[0]}@localhost",
            "RABBITMQ_NODE_PORT": str(node_port),
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_CONFIG_FILE": str(self._folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(self._folder / "env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self._folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self._folder / "log"),
            "RABBITMQ_PID_FILE": str(self._folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none",
            # Every call of rabbitmqctl starts an Erlang machine: one thread starts sooner than sixteen.
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +SDcpu 1:1 +SDio 1 +sbwt none -mode interactive",
        }
        super().__init__(self.ports[0], env)

    def start(self) -> None:
        self._epmd = subprocess.Popen(
            [self._epmd_binary, "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(self._epmd_port, self._epmd, "epmd")
        said = self._folder / "out"
        with said.open("wb") as out:
            self._process = subprocess.Popen(
                [RABBITMQ], env=self._env, stdout=out, stderr=out, start_new_session=True
            )
        # Its ports are open before it knows its users and virtual hosts.
        deadline = time.monotonic() + GUARD
        while b"completed with" not in said.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"rabbitmq did not start: {said.read_text()[-2000:]}")
            time.sleep(0.05)

    def describe(self) -> dict[str, object]:
        """Leaves it running after this process, and returns how to use and to remove it."""
        assert self._process is not None
        assert self._epmd is not None
        pids = [int((self._folder / "pid").read_text()), self._epmd.pid]
        for process in (self._process, self._epmd):
            process.returncode = 0  # so that nothing warns of a child that is not waited for
        return {"ports": self.ports, "env": self._env, "folder": str(self._folder), "pids": pids}

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """The server is the child of a script, which ends with it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int((self._folder / "pid").read_text()), how)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(GUARD)
            self._epmd = None

    def remove(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def shared_rabbitmq(folder: Path) -> RabbitMqHost:
    """The RabbitMQ of the whole run, which the first worker that needs it starts: that takes seven seconds of
    a processor. Each worker has a virtual host of its own there. `folder` is the run's."""
    folder.mkdir(exist_ok=True)
    told = folder / "rabbitmq.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            server = RabbitMq(HOSTS)
            try:
                server.start()
            except BaseException:
                server.remove()
                raise
            told.write_text(json.dumps(server.describe()))
    there = json.loads(told.read_text())
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    at = worker % HOSTS
    return RabbitMqHost(there["ports"][at], there["env"], f"host{at}" if at else "/")


def remove_shared_rabbitmq(folder: Path) -> None:
    """At the end of the run, when no worker uses it any more."""
    told = folder / "rabbitmq.json"
    if told.exists():
        there = json.loads(told.read_text())
        for pid in there["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(there["folder"], ignore_errors=True)
        told.unlink()


def _definitions(ports: list[int]) -> dict[str, object]:
    """What it is to know when it starts: its user, and a virtual host for each port."""
    salt = b"salt"
    hashed = b64encode(salt + sha256(salt + b"guest").digest()).decode()
    hosts = ["/", *(f"host{n}" for n in range(1, len(ports)))]
    return {
        "users": [{"name": "guest", "password_hash": hashed, "tags": "administrator",
                   "hashing_algorithm": "rabbit_password_hashing_sha256"}],
        "vhosts": [{"name": host} for host in hosts],
        "permissions": [{"user": "guest", "vhost": host, "configure": ".*", "write": ".*", "read": ".*"}
                        for host in hosts],
        "global_parameters": [{"name": "mqtt_port_to_vhost_mapping",
                               "value": {str(port): host for port, host in zip(ports, hosts, strict=True)}}],
    }  # fmt: skip


class Nats(OneProcess):
    """A nats-server that is not duly's, with this text in its configuration."""

    def __init__(self, folder: Path, included: str) -> None:
        super().__init__(folder)
        (folder / "included.conf").write_text(included)
        (folder / "nats.conf").write_text(
            f'server_name: s\nlisten: "127.0.0.1:{free_port()}"\n'
            f'jetstream {{ store_dir: "{folder}/store" }}\n'
            f'mqtt {{ host: "127.0.0.1", port: {self.port} }}\ninclude included.conf\n'
        )

    def start(self) -> None:
        self._start(nats_server(), "-c", self.folder / "nats.conf")


class Embedded:
    """duly's own broker, on an event loop in a thread, so that it outlives a test's loop."""

    def __init__(self) -> None:
        self._folder = server_folder("nats")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="embedded broker", daemon=True)
        self._thread.start()
        self.port = free_port()
        self.broker: EmbeddedBroker | None = None

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def url(self, name: str) -> str:
        return f"mqtt://anybody:secret@127.0.0.1:{self.port}?client_id={quote(name).replace('.', '_')}"

    def start(self) -> None:
        async def begin() -> None:
            self.broker = EmbeddedBroker(self._folder, self.port, ack_wait=2.0)
            await self.broker.set_users([BrokerUser("anybody", "secret", ["#"], ["#"])])
            await self.broker.start()

        self._do(begin())

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.broker is not None:
            if how is signal.SIGKILL and self.broker.pid is not None:
                os.kill(self.broker.pid, how)
            self._do(self.broker.stop())
            self.broker = None

    def remove(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GUARD)
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)
