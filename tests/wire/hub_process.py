"""A hub as a process of its own, that can be killed: by us, or by itself at a named point.

Run as a script it serves, and says `ready URL` when it does. A point is a name and a count: `after commit:30`
kills it, as kill -9 would, the thirtieth time it has just committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from duly.apps.gateway import Gateway
from duly.apps.profiles import Draft, Profiles
from duly.auth import Accounts, Role
from duly.channel import Notice
from duly.channels.webhook import Webhook
from duly.core.steps import Effect, Reply, Report, Transmit
from duly.hub import Hub
from duly.ledgers import open_ledger
from duly.ledgers.sqlite import SqliteLedger
from duly.settings import Settings

EFFECTS: dict[str, type[Effect]] = {"server_ack": Reply, "passing on": Transmit, "ack": Report}
POINTS = [
    "before commit",
    "after commit",
    *(f"{when} {what}" for what in EFFECTS for when in ("before", "after")),
]
ALERT_POINTS = ["before commit", "after commit", "before telling", "after telling"]


def quiet_port() -> int:
    """A free port that no outgoing connection is given: clients that knock while the hub is down would
    sooner or later connect to themselves there, and the hub could not have it back."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


class HubProcess:
    """Starts, kills and starts again the hub of one data folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._settings = Settings(data=str(folder), port=quiet_port(), no_mqtt=True, **settings)
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def prepare(
        self, apps: list[str], devices: list[str], sentinels: list[str] | None = None, *tell: str
    ) -> dict[str, str]:
        """Accounts for everybody, every app allowed every device; a profile `home` that tells these addresses
        one by one. Their tokens."""
        self.folder.mkdir(parents=True)
        async with await open_ledger(self._settings.ledger_url) as ledger:
            accounts = Accounts(ledger)
            tokens = {name: await accounts.add(Role.APP, name) for name in apps}
            tokens |= {name: await accounts.add(Role.DEVICE, name) for name in devices}
            tokens |= {name: await accounts.add(Role.SENTINEL, name) for name in sentinels or []}
            for app in apps:
                for device in devices:
                    await accounts.grant(app, device)
            await Profiles(ledger).set("home", Draft(send=tell, most=0))
        return tokens

    async def start(self, point: str = "") -> None:
        settings = msgspec.json.encode(self._settings).decode()
        with (self.folder / "errors").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.wire.hub_process", settings, point,
                stdout=subprocess.PIPE, stderr=errors, cwd=Path(__file__).parents[2],
            )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(15):
            line = (await self._process.stdout.readline()).decode()
        assert line.startswith("ready "), f"the hub did not start: {self.errors}"
        self.url = line.split()[1]

    async def died(self) -> None:
        """Until it is dead, by kill -9 and not by a bug."""
        assert self._process is not None
        assert await self._process.wait() == -signal.SIGKILL, self.errors

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def errors(self) -> str:
        """What it has complained about."""
        return (self.folder / "errors").read_text()

    @property
    def memory(self) -> int:
        """Resident bytes."""
        assert self._process is not None
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")


# ── in the process ───────────────────────────────────────────────────────────────────────────────


class Fuse:
    """Kills this process when it has burned down."""

    def __init__(self, point: str) -> None:
        self._name, _, count = point.partition(":")
        self._left = int(count or 0)

    def __call__(self, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def wire(fuse: Fuse) -> None:
    """Put the fuse at every point."""
    commit, perform = SqliteLedger.commit, Gateway._perform

    async def deadly_commit(self: SqliteLedger, groups: Any) -> Any:
        fuse("before commit")
        results = await commit(self, groups)
        fuse("after commit")
        return results

    def deadly_perform(self: Gateway, effect: Effect) -> None:
        name = next(name for name, kind in EFFECTS.items() if isinstance(effect, kind))
        fuse(f"before {name}")
        perform(self, effect)
        fuse(f"after {name}")

    send = Webhook.send

    async def deadly_send(self: Webhook, notice: Notice) -> None:
        fuse("before telling")
        await send(self, notice)
        fuse("after telling")

    Webhook.send = deadly_send  # type: ignore[method-assign]
    SqliteLedger.commit = deadly_commit  # type: ignore[method-assign]
    Gateway._perform = deadly_perform  # type: ignore[method-assign]


async def serve(settings: Settings) -> None:
    hub = Hub(settings)
    await hub.start()
    sys.stdout.write(f"ready {hub.url}\n")
    sys.stdout.flush()
    await hub.run()


def main() -> None:
    import uvloop

    wire(Fuse(sys.argv[2]))
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Settings)))


if __name__ == "__main__":
    main()
