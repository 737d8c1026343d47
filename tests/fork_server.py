"""Starts duly's own programs without importing everything anew for each of them.

The tests start about a thousand processes of `python -m duly …`, and each spends up to a second of processor
time on imports before it does a hundredth of a second's work: half of a test run. So each test process keeps
a *fork server*: a Python that has imported what duly imports, and splits a copy off for each program; and one
more for each library that is preloaded into programs. What a test gets is a process like any other, with its
own pid, signals, memory, folder, environment and streams, and it is a child of the test process itself
(`CLONE_PARENT`), so that `subprocess` and `asyncio` wait for it as for any other child.

`install` replaces `subprocess.Popen`: calls that this cannot serve (another program, other settings of the
interpreter itself, options that only exec has) start an ordinary process. `DULY_TEST_FORK=0` makes all of
them ordinary, which `make proof` does for kills at named points and for the command line, and so does a
system that is not Linux on x86-64 or ARM64.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, TextIO

import typer.main

ROOT: Final = Path(__file__).parents[1]
MODULES: Final = {
    "duly", "tests.clients.sentinel_process", "tests.end_to_end.fused", "tests.end_to_end.node_process",
    "tests.once_process",
}  # fmt: skip
"""What it starts: `python -m` one of these."""
IMPORTED: Final = (
    "asyncpg",
    "importlib.metadata",
    "redis.asyncio",
    "rich.table",
    "tests.end_to_end.processes",
    "typer._adapters",
    "uvloop",
)
"""What duly imports only when a program needs it, and so does not come with its own modules; and what the
programs of tests import, pytest among it."""
CLONE_NUMBER: Final = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT: Final = 0x8000
PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PLAIN: Final = {
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "gid": None,
    "gids": None, "uid": None, "umask": -1, "process_group": -1,
}  # fmt: skip
"""The options of `Popen` that have to be as they are when nobody names them."""
FROM_START: Final = ("PYTHON", "LC_", "LANG", "TZ", "LD_")
"""Variables that an interpreter reads when it starts: with others than ours, it must be a new one."""
PRELOADED: Final = "LD_PRELOAD"
"""The one of them for which there are fork servers of their own."""


def available() -> bool:
    """Whether this machine can do it, and nobody has forbidden it."""
    wanted = os.environ.get("DULY_TEST_FORK", "1") != "0"
    return wanted and sys.platform == "linux" and platform.machine() in CLONE_NUMBER


# ── in the test process ──────────────────────────────────────────────────────────────────────────


class ForkServer:
    """A fork server of this test process, started when it is first needed."""

    def __init__(self, preloaded: str = "") -> None:
        self._preloaded = {PRELOADED: preloaded} if preloaded else {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """Start a program with these three streams; the pid of the new child of this process."""
        with self._lock:
            there = self._connected()
            told = json.dumps(request).encode()
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
            there.sendmsg([len(told).to_bytes(4, "big") + told], passed)
            return int.from_bytes(there.recv(4, socket.MSG_WAITALL), "big")

    def _connected(self) -> socket.socket:
        if self._socket is None:
            here, there = socket.socketpair()
            with there:
                self._process = _Ordinary(
                    [sys.executable, "-m", "tests.fork_server", str(there.fileno())],
                    cwd=ROOT, pass_fds=[there.fileno()], env=_clean(os.environ) | self._preloaded,
                )  # fmt: skip
            self._socket = here
            atexit.register(self.stop)
        return self._socket

    def stop(self) -> None:
        """It ends when nobody can ask it any more."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
            self._socket = None


def _clean(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("DULY_")}


def _from_start(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(FROM_START) and name != PRELOADED}


_Ordinary = subprocess.Popen
_servers: dict[str, ForkServer] = {}
"""by the libraries that are loaded into their programs"""


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]  # text or bytes, as the caller asks
    """A `Popen` that asks the fork server for the programs it can start."""

    def _execute_child(self, *given: Any) -> None:
        execute = _Ordinary._execute_child  # type: ignore[attr-defined]  # private, and so in no stub
        options = inspect.signature(execute).bind(self, *given).arguments
        request = _request(options)
        if request is None:
            super()._execute_child(*given)  # type: ignore[misc]  # private, and so in no stub
            return
        streams = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
        preloaded = request["env"].get(PRELOADED, "")
        server = _servers.setdefault(preloaded, ForkServer(preloaded))
        self.pid = server.start(request, [own if fd == -1 else fd for own, fd in enumerate(streams)])
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in PIPES))  # type: ignore[attr-defined]  # private


def _request(options: dict[str, Any]) -> dict[str, Any] | None:
    """What to ask the fork server for; None if only an ordinary process will do."""
    if not isinstance(options["args"], list | tuple):
        return None
    argv = [os.fsdecode(arg) for arg in options["args"]]
    env = dict(os.environ if options["env"] is None else options["env"])
    if argv[:2] != [sys.executable, "-m"] or argv[2] not in MODULES:
        return None
    if any(options[name] != value for name, value in PLAIN.items()) or _from_start(env) != _from_start(
        os.environ
    ):
        return None
    cwd = Path.cwd() if options["cwd"] is None else options["cwd"]
    return {
        "module": argv[2], "args": argv[3:], "env": env, "cwd": os.fspath(cwd),
        "session": options["start_new_session"],
    }  # fmt: skip


def install() -> None:
    """From now on `subprocess` and `asyncio` start duly's programs in this way."""
    if available():
        subprocess.Popen = ForkedPopen  # type: ignore[misc]  # replaces the class


# ── in the fork server ───────────────────────────────────────────────────────────────────────────


def _sibling() -> int:
    """Like `os.fork`, but the new process is the child of this one's parent; 0 in it."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE_NUMBER[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _stream(fd: int, old: TextIO, mode: str) -> TextIO:
    """A standard stream as a new interpreter would have it."""
    raw = open(fd, mode + "b", buffering=-1, closefd=False)  # noqa: SIM115
    lines = raw.isatty() or fd == 2
    made = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, line_buffering=lines)
    made.mode = mode  # type: ignore[misc]  # as the interpreter does
    return made


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """In the new process: take on what was asked for, instead of the server's own."""
    for fd, given in enumerate(streams):
        os.dup2(given, fd)
    for given in streams:
        os.close(given)
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = sys.__stdin__ = _stream(0, sys.stdin, "r")  # type: ignore[assignment, misc]  # Final in the stubs
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout, "w")  # type: ignore[assignment, misc]  # Final in the stubs
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr, "w")  # type: ignore[assignment, misc]  # Final in the stubs
    sys.argv = ["-m", *request["args"]]
    sys.path[0] = request["cwd"]


def _serve(asked: socket.socket) -> dict[str, Any]:
    """Split off a process for each request; return in each of those, with what it asked for."""
    while True:
        head, given, _, _ = asked.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not head:
            sys.exit()
        request = json.loads(asked.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        streams = array.array("i", given[0][2]).tolist()
        if pid := _sibling():
            for fd in streams:
                os.close(fd)
            asked.sendall(pid.to_bytes(4, "big"))
        else:
            asked.close()
            _become(request, streams)
            return dict(request)


def _prepare() -> None:
    """Import everything, and build the command line with all its verbs once: Typer does so anew in each
    process."""
    import duly
    import duly.cli

    for module in pkgutil.walk_packages(duly.__path__, "duly."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    command_line: Any = typer.main.get_command(duly.cli.app)
    dict(command_line.commands)


def _run(module: str) -> int:
    """What the interpreter does with `-m`: the exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main() -> None:
    _prepare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run(request["module"])
    # The end of an interpreter, without taking apart what the server has imported: that would write to all
    # the memory that the two share, and take as long as everything else.
    threading._shutdown()  # type: ignore[attr-defined]  # private, and so in no stub
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as the interpreter says that what was printed could not be written
    os._exit(code)


if __name__ == "__main__":
    main()
