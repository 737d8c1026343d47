"""The embedded MQTT broker: a nats-server that runs as a child process of the hub.

Messages that it has acknowledged always survive its own kill -9. A power cut takes those of the last
seconds: a flush for every message would cost too much (700 a second instead of 20,000). duly's own nodes
lose nothing by that: an outbox resends until the other *node* has answered, since a broker's PUBACK proves
nothing. What it retains survives as well, but one subscription in a hundred that is made
in its first moments after a kill is not told of it; the hub keeps the last known status of its devices
itself.

The broker never outlives the hub: the kernel ends it, and one that is left over by accident is recognised
by the pid file and ended before the next one starts. When it dies it is started again, on the same port
and with the same sessions. It is also restarted when it could not write, since its store never writes
again after the disk was full.

The broker asks the hub for every client whether it may connect, publish and subscribe (`duly.broker.clients`,
docs/adr/0015). A user whose lists are empty may do nothing.

The broker writes its log to the hub through a pipe. From it the hub learns that the broker is ready, that
a port is taken, and what a client was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from duly import extras
from duly.broker.acl_dialects import DEVICES, NODES, BrokerUser, check_users
from duly.broker.broker_folder import STOP_WITHIN, BrokerFolder
from duly.broker.broker_log import refused_client
from duly.broker.clients import BrokerClients, BrokerRefusal, UserList, Users
from duly.broker.nats_config import NatsServing, configuration
from duly.core.rate_limits import Rate, RateLimits
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND, seconds
from duly.errors import BrokerError, DulyError, PortTaken
from duly.runtime.backoff import Backoff
from duly.runtime.files import write_private
from duly.runtime.tasks import SupervisedTask, Supervisor
from duly.transports.mqtt.address import PATH

RESTART: Final = RetryPolicy.exponential(50 * MS, 10 * SECOND, jitter=0.0)
"""The pause before a broker that died is started again."""

STABLE: Final = 10.0
"""Seconds of running after which the pause before the next restart is the shortest again."""

READY_WITHIN: Final = 10.0
"""Seconds within which the broker has to be ready. It takes 0.05; recovering a large store takes longer."""

PORT_TRIES: Final = 5
"""Ports that are tried where any free one will do."""

ACK_WAIT: Final = 3.0
"""Seconds after which an unacknowledged message is sent again. This happens on a live connection too, so
it is longer than a commit takes; and never earlier, even to a client that has reconnected, so it is short."""

LOGGED: Final = Rate(200, SECOND)
"""Lines about refused clients that are written to the log file."""

WATCH_EVERY: Final = 1.0
"""Seconds between two checks of how much each client publishes."""
HURRY_EVERY: Final = 0.1
"""The same while there is a flood."""

_HANDSHAKE: Final = re.compile(r"(\S+) - .*websocket handshake error: (.*)")
"""A line of the broker's log about a client whose WebSocket was refused."""

_OWN_PORT: Final = "Listening for client connections on "

_STUCK: Final = "ritical write error"
"""Text in the broker's log when it could not write; it then goes on without storing anything."""

_LAUNCHER: Final = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("our parent is gone")
os.umask(0o077)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""A program that asks the kernel to end the broker with the hub, keeps the broker's files private and then
becomes the broker. It is a program of its own, since code between fork and exec may deadlock in a process
with threads."""


class EmbeddedBroker:
    """A nats-server as a child process.

    `port` 0 takes a free port and keeps it, and so does `websocket_port`, where the same clients with the
    same permissions use MQTT over WebSocket, among them pages of these `origins`. With a certificate the
    broker speaks TLS only. `users` are
    asked about every client, unless `set_users` names the users. `on_restart` is called after every
    restart of a broker that died, `on_problem` when it has died and when it runs again, `on_refused` for
    every refused attempt: brokers acknowledge a forbidden publish and drop it, so this is the only trace of
    it.
    """

    def __init__(
        self,
        folder: str | Path,
        port: int = 0,
        listen: str = "127.0.0.1",
        *,
        tls_cert: str = "",
        tls_key: str = "",
        ack_wait: float = ACK_WAIT,
        on_restart: Callable[[int], None] | None = None,
        on_refused: Callable[[BrokerRefusal], None] | None = None,
        users: Users | None = None,
        tasks: Supervisor | None = None,
        websocket_port: int | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self.port = port
        self.websocket_port = websocket_port
        """where it also serves MQTT over WebSocket; None: nowhere"""
        self._origins = origins
        self.listen = listen
        self.restarts = 0
        self._problem: BrokerError | None = None
        self.on_problem: Callable[[], None] | None = None
        self._folder = BrokerFolder(Path(folder) / "broker")
        self._tls = (tls_cert, tls_key)
        self._ack_wait = ack_wait
        self._on_restart = on_restart
        self._tasks = tasks or Supervisor()
        self.clients = BrokerClients(users or UserList(), on_refused, self._tasks)
        self._logged = RateLimits(LOGGED)
        self._own_port = 0
        self._soon: SupervisedTask | None = None
        """a check of the rates that does not wait for the next regular one"""
        self._checking = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stopping = asyncio.Event()
        self._watching: SupervisedTask | None = None
        self._counting: SupervisedTask | None = None
        self._reading: SupervisedTask | None = None

    # ── starting, stopping, users ────────────────────────────────────────────────────────────────

    @property
    def problem(self) -> BrokerError | None:
        """Why the broker is not running; None while it runs."""
        return self._problem

    @problem.setter
    def problem(self, problem: BrokerError | None) -> None:
        """Set the reason, and report it."""
        self._problem = problem
        if self.on_problem is not None:
            self.on_problem()

    @property
    def url(self) -> str:
        """The address at which clients of this machine connect."""
        host = f"[{self.listen}]" if ":" in self.listen else self.listen
        host = "127.0.0.1" if self.listen in ("0.0.0.0", "::") else host
        return f"mqtt{'s' * bool(self._tls[0])}://{host}:{self.port}"

    @property
    def websocket_url(self) -> str:
        """The same for MQTT over WebSocket; empty if the broker does not serve it."""
        if self.websocket_port is None:
            return ""
        return f"{self.url.replace('mqtt', 'ws', 1).rpartition(':')[0]}:{self.websocket_port}{PATH}"

    @property
    def pid(self) -> int | None:
        """The process id of the running broker; None while it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the broker and wait until it accepts connections; raises `BrokerError` if it does not."""
        if self._watching is not None:
            raise BrokerError("this broker is running already")
        self._folder.claim()
        try:
            await self._folder.end_leftover()
            self.clients.restore(self._folder.client_ids)
            self._folder.open_log()
            await self._launch_on_free_ports()
        except BaseException:
            await self._end_child()
            self._folder.release()
            raise
        self._stopping.clear()
        self._watching = self._tasks.spawn("broker", self._supervise)
        self._counting = self._tasks.every("broker rates", WATCH_EVERY, self._check)

    async def stop(self) -> None:
        """Stop the broker and wait until it has closed its files. A stop that is cancelled kills it."""
        self._stopping.set()
        try:
            if self._watching is not None:
                await self._watching.finish()
                self._watching = None
            for work in (self._counting, self._soon):
                if work is not None:
                    await work.stop()
            self._counting = self._soon = None
        finally:
            try:
                await self._end_child()
            finally:
                self.clients.keep(self._folder.client_ids)
                self._folder.release()

    @property
    def refused(self) -> Counter[str]:
        """Refused attempts, by kind: publish, subscribe, connect, flood."""
        return self.clients.refused

    async def set_users(self, users: Iterable[BrokerUser]) -> None:
        """Use these users and no others from now on. Connected users that were removed or changed are
        disconnected."""
        for name in self.clients.replace(UserList(check_users(users))):
            await self.dismiss(name)

    async def dismiss(self, name: str) -> None:
        """Disconnect a user that was removed or changed, and end the sessions of one that is gone."""
        self.clients.note_gone(name)
        if self.pid is not None:
            await self.clients.dismiss(name)

    def hurry(self) -> None:
        """Check soon how much each client publishes, since there is more to read than usual."""
        if self._soon is None and self._counting is not None:
            self._soon = self._tasks.after("broker rates", HURRY_EVERY, self._check_soon)

    async def _check_soon(self) -> None:
        await self._check()
        self._soon = None

    async def _check(self) -> None:
        """Disconnect clients that publish too fast, and store which account each client id belongs to."""
        async with self._checking:
            if self.pid is not None:
                with contextlib.suppress(DulyError, msgspec.DecodeError):  # the broker is restarting
                    await self.clients.check_rates()
                    await self.clients.limit_stored()
                    await self.clients.clear()
            self.clients.keep(self._folder.client_ids)

    # ── the child ────────────────────────────────────────────────────────────────────────────────

    async def _launch_on_free_ports(self) -> None:
        """Launch it, with a free port for each that is 0; another program may take such a port first."""
        given = self.port, self.websocket_port
        for tries_left in reversed(range(PORT_TRIES)):
            self.port = self.port or _free_port(self.listen)
            if self.websocket_port == 0:
                self.websocket_port = _free_port(self.listen, self.port)
            self._write_config()
            try:
                await self._launch()
                return
            except PortTaken:
                if 0 not in given or not tries_left:
                    raise
                await self._end_child()
                self.port, self.websocket_port = given

    async def _launch(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        started = [str(nats_server()), "-c", str(self._folder.configuration)]
        null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *started,
            stdin=null, stdout=null, stderr=pipe,
        )  # fmt: skip
        self._folder.note_pid(self._process.pid)
        process = self._process
        self._reading = self._tasks.spawn("broker log", lambda: self._read_log(process))
        try:
            async with asyncio.timeout(READY_WITHIN):
                await self._ready
        except TimeoutError:
            raise BrokerError(f"the broker was not ready within {READY_WITHIN:g} s; see nats.log") from None
        self.clients.not_limited = {DEVICES, NODES}
        await self.clients.callout.start(self._own_port)
        self.problem = None

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        backoff, started = Backoff(RESTART), loop.time()
        while True:
            code = await self._died()
            if code is None:
                return
            self.problem = BrokerError(f"the broker died ({code}); it is being started again")
            if loop.time() - started > STABLE:
                backoff.worked()
            while True:
                await backoff.wait(self._stopping)
                if self._stopping.is_set():
                    return
                try:
                    await self._launch()
                    break
                except (BrokerError, OSError) as problem:
                    self.problem = problem if isinstance(problem, BrokerError) else BrokerError(str(problem))
                    await self._end_child()
            started = loop.time()
            self.restarts += 1
            if self._on_restart is not None:
                self._on_restart(self.restarts)

    async def _died(self) -> str | None:
        """Wait until the child has ended and return how; None if `stop` is called first."""
        if self._process is None:  # a start was interrupted
            return "it was not started"
        loop = asyncio.get_running_loop()
        died = loop.create_task(self._process.wait())
        stop = loop.create_task(self._stopping.wait())
        try:
            await asyncio.wait({died, stop}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._stopping.is_set() else _how(died.result())
        finally:
            stop.cancel()
            died.cancel()

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        log, last = self._folder.log, ""
        while True:
            try:
                read = await process.stderr.readline()
            except ValueError:  # longer than the reader's limit: a client uses a very long topic
                continue
            if not read:
                break
            line = read.decode(errors="replace").rstrip("\n")
            last = line
            refused = self._handle_line(line)
            now = seconds(asyncio.get_running_loop().time())
            if log is not None and not (refused and self._logged.take("", now)):
                log.info(line)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._explain(last))

    def _handle_line(self, line: str) -> bool:
        """Act on a line of the log; returns whether it is about a refused client."""
        if _OWN_PORT in line:
            self._own_port = int(line.rpartition(":")[2])
        elif "Server is ready" in line and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        elif "address already in use" in line and self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._explain(line))
        if _STUCK in line and self._process is not None:
            _signal(self._process, signal.SIGTERM)  # the next process can write, as soon as there is room
        found = refused_client(line)
        if found is not None:
            self.clients.violated(found)
            if self.refused.total() % LOGGED.amount == 0:
                self.hurry()
        opening = _HANDSHAKE.search(line)
        if opening is not None:
            self.clients.no_websocket(opening[1], opening[2])
        return found is not None or opening is not None or "authentication error" in line

    def _explain(self, line: str) -> BrokerError:
        if "address already in use" in line:
            port, what, option = self.port, "MQTT", "--mqtt-port"
            if "websocket" in line:
                port, what, option = self.websocket_port or 0, "MQTT over WebSocket", "--mqtt-ws-port"
            return PortTaken(
                f"port {port} on {self.listen}, for {what}, is taken; stop the other program, or use "
                f"another port, {option} {port % 65_535 + 1} or {option} 0 for any free one"
            )
        return BrokerError(f"the broker ended while starting: {line or 'without a message'}; see nats.log")

    async def _end_child(self) -> None:
        """End the child. If this is cancelled, the child is killed and not waited for any longer."""
        await self.clients.callout.stop()
        process, self._process = self._process, None
        try:
            if process is not None and process.returncode is None:
                _signal(process, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_WITHIN):
                        await process.wait()
        finally:
            if process is not None:
                if process.returncode is None:
                    _signal(process, signal.SIGKILL)
                    await process.wait()
                if self._reading is not None:
                    await self._reading.finish()
            self._folder.forget_pid()

    def _write_config(self) -> None:
        serving = NatsServing(
            listen=self.listen,
            mqtt_port=self.port,
            websocket_port=self.websocket_port,
            origins=self._origins,
            tls_cert=self._tls[0],
            tls_key=self._tls[1],
        )
        text = configuration(
            self._folder.path / "store",
            serving,
            ack_wait=self._ack_wait,
            password=self.clients.callout.password,
            issuer=self.clients.callout.issuer.name,
        )
        (self._folder.path / "users.conf").unlink(missing_ok=True)  # a file of an older duly
        write_private(self._folder.configuration, text)


def nats_server() -> Path:
    """Return the nats-server that the wheel installed beside the Python interpreter, or else the one on the
    PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = beside if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise BrokerError(
            f"{extras.sentence('the embedded broker', 'hub')}; or use a broker of your own (--mqtt)"
        )
    return Path(found)


def _free_port(listen: str, taken: int = 0) -> int:
    """Return a free port, and another one than the port that is taken in a moment."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family) as s:
        try:
            s.bind((listen, 0))
        except OSError as problem:
            if problem.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise BrokerError(f"{listen} is not an address of this machine") from None
            raise BrokerError(f"cannot listen on {listen}: {problem}") from None
        port = int(s.getsockname()[1])
        return _free_port(listen, taken) if port == taken else port


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _signal(process: asyncio.subprocess.Process, how: signal.Signals) -> None:
    """Signal a process that may have ended just now. `process.terminate()` first asks the operating system,
    and so takes the exit code of a dead one away from the event loop, which then warns of an "unknown child
    process" and reports 255 (CPython before 3.12.9, gh-127049)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, how)
