"""duly's own programs as processes that can be killed: by us, or by themselves at a named point (`fused`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from duly.apps.alerts.profiles import ProfileDraft, Profiles
from duly.identity.accounts import Accounts, Role
from duly.storage import open_ledger
from tests.guard import GUARD
from tests.proof import count
from tests.servers import free_port

ROOT = Path(__file__).parents[2]


async def end(process: asyncio.subprocess.Process, how: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process and wait until it has ended. `Process.kill` and `send_signal` first ask the operating
    system whether it has; if so, they take its exit code away from the event loop, which then warns of an
    "unknown child process" and calls it 255 (CPython before 3.12.9: gh-127049)."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, how)
        await process.wait()


def resident(pid: int) -> int:
    """The resident bytes of a process."""
    if (statm := Path(f"/proc/{pid}/statm")).exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) * 1024  # as on macOS


class Killable:
    """Starts, kills and starts again one program; what it complains about is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self.preload: dict[str, str] = {}
        """more of its environment: a library that is loaded into it"""
        self.under: list[str] = []
        """a program that it is started by, such as strace"""

    async def _start(self, point: str, *args: str, stdout: int, **env: str) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode == -signal.SIGKILL:
            count("kills", 1)  # from which it now comes back
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        with (self.folder / "errors").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *self.under, sys.executable, "-m", "tests.end_to_end.fused", point, *args,
                stdout=stdout, stderr=errors, cwd=ROOT, env=clean | env | self.preload,
            )  # fmt: skip
        return self._process

    async def died(self) -> None:
        """Until it is dead, by kill -9 and not by a bug."""
        assert self._process is not None
        async with asyncio.timeout(GUARD):
            assert await self._process.wait() == -signal.SIGKILL, self.errors

    async def kill(self) -> None:
        if self._process is not None:
            await end(self._process)

    async def ended(self) -> None:
        """Until it has ended, as it was told to."""
        assert self._process is not None
        async with asyncio.timeout(GUARD):
            await self._process.wait()

    def suspend(self) -> None:
        """It says nothing more, not even goodbye, until it is killed or woken up."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def errors(self) -> str:
        """What it has complained about."""
        return (self.folder / "errors").read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return resident(self.pid)


class HubProcess(Killable):
    """The hub of one data folder; settings as `DULY_…` would say them. `mqtt_port` gives it a broker of its
    own, `mqtt` an outside one."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = {"data": folder, "port": port, "log_level": "warning"} | settings
        if not settings.keys() & {"mqtt", "mqtt_port"}:
            settings["no_mqtt"] = "true"
        self.ledger_url = str(settings.get("ledger", f"sqlite:///{folder}/ledger.db"))
        self._env = {f"DULY_{name.upper()}": str(value) for name, value in settings.items()}

    async def prepare(
        self, apps: list[str], devices: list[str], sentinels: list[str] | None = None, *tell: str
    ) -> dict[str, str]:
        """Accounts for everybody, every app allowed every device, and a profile `home` that tells these
        addresses of every alert for itself; their tokens."""
        self.folder.mkdir(parents=True, mode=0o700)
        async with await open_ledger(self.ledger_url) as ledger:
            accounts = Accounts(ledger)
            tokens = {name: await accounts.add(Role.APP, name) for name in apps}
            tokens |= {name: await accounts.add(Role.DEVICE, name) for name in devices}
            tokens |= {name: await accounts.add(Role.SENTINEL, name) for name in sentinels or []}
            for app in apps:
                for device in devices:
                    await accounts.grant(app, device)
            if sentinels:
                await Profiles(ledger).set("home", ProfileDraft(send=tell, most=0, nobody=not tell))
        return tokens

    async def start(self, point: str = "") -> None:
        process = await self._start(point, "up", stdout=subprocess.PIPE, **self._env)
        assert process.stdout is not None
        async with asyncio.timeout(GUARD):
            line = (await process.stdout.readline()).decode()
        if line or not point:  # else it got to its point while it was still starting
            assert line.startswith(f"ready {self.url}"), f"the hub did not start: {self.errors}"

    async def kill_broker(self) -> None:
        """The embedded one, as soon as there is one; the hub brings it back."""
        async with asyncio.timeout(GUARD):
            while not self._kill_broker():
                await asyncio.sleep(0.01)

    def _kill_broker(self) -> bool:
        """False while it is dead from before, and just coming back."""
        try:
            os.kill(int((self.folder / "broker" / "nats.pid").read_text()), signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError, ValueError):  # its file is missing, or being written
            return False
        return True


class DeviceProcess(Killable):
    """A simulated lock, with its memory and its effects in its folder."""

    def __init__(self, folder: Path, name: str, url: str, token: str = "") -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, mode=0o700)
        self._args = ["device", name, "--url", url, "--store", f"{folder}/memory.db"]
        self._args += ["--effects", f"{folder}/effects", *(["--token", token] if token else [])]

    @property
    def did(self) -> list[tuple[str, str]]:
        """What it did, in order, by its own file, which is read without any code of duly's: (app, id)."""
        path = self.folder / "effects"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        parts = [line.decode().split(" ", 4) for line in lines if line.endswith(b"\n")]
        return [(each[2], unquote(each[1])) for each in parts if len(each) == 5]

    async def start(self, point: str = "") -> None:
        """It goes on trying until its hub is there."""
        await self._start(point, *self._args, stdout=subprocess.DEVNULL)


def tracebacks(log: str) -> str:
    """The tracebacks in a log, each with the line before it, which says where it was caught; empty: there are
    none. A judge shows these alone: of a long log only the end may be kept."""
    lines = log.splitlines()
    found: list[str] = []
    for n, line in enumerate(lines):
        if "Traceback" in line:
            end = next((m for m in range(n + 1, len(lines)) if not lines[m].startswith((" ", "\t"))), n)
            found += ["", *lines[max(0, n - 1) : end + 1]]
    return "\n".join(found)
