"""duly with a fuse: `python -m tests.end_to_end.fused POINT up …` is `duly up …`, until it gets to that
point.

A point is a name and a count: `after commit:30` kills the process, as kill -9 would, the thirtieth time it
has just committed. Without a name it is `duly` and nothing more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from duly.apps.alerts.channels.channel import Notification
from duly.apps.alerts.channels.webhook import WebhookChannel
from duly.apps.chat.service import ChatService
from duly.apps.gateway.command_effects import CommandEffects
from duly.cli import device
from duly.cli.device import Effects
from duly.clients.device import Command, Device
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.core.retry import RetryPolicy
from duly.core.steps import Effect, Reply
from duly.core.units import MS, SECOND
from duly.runtime.clock import SystemClock
from duly.server import hub
from duly.server.policies import fanout_policy
from duly.storage.ledger import Ledger
from duly.storage.sqlite.ledger import SqliteLedger
from duly.storage.sqlite.writer import SqliteWriter

RETRY = RetryPolicy.exponential(200 * MS, 2 * SECOND)
HUB_EFFECTS = {"server_ack": "reply", "passing on": "transmit", "ack": "report"}
"""What a hub does for a command, and the method of `CommandEffects` that does it."""


BUG = "TEST_BUG"
"""The variable that names a bug to plant: `never flush` is a ledger that does not wait for its disk."""

CLOCK = "TEST_CLOCK"
"""The variable that names a file: by so many seconds this process's clock is wrong. It looks there when it
starts and at each SIGUSR1."""

TASKS = "TEST_TASKS"
"""The variable that names a file: at each SIGUSR2 this process writes there how many asyncio tasks it has."""

TRUST = "TEST_TRUST"
"""The variable that says after how many seconds this process trusts its clock, instead of an hour."""


def around(*names: str) -> list[str]:
    return [f"{when} {name}" for name in names for when in ("before", "after")]


HUB_POINTS = around("commit", *HUB_EFFECTS)
TOWER_POINTS = CHAT_POINTS = around("commit", "telling")
DEVICE_POINTS = around("commit", "effect", "answer")


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
    commit, add, say = SqliteLedger.commit, Effects.add, Device._answer
    tell, notify = ChatService._reply, WebhookChannel.send

    def deadly_tell(self: ChatService, effect: Reply) -> None:
        fuse("before telling")
        tell(self, effect)
        fuse("after telling")

    async def deadly_commit(self: SqliteLedger, groups: Any) -> Any:
        fuse("before commit")
        results = await commit(self, groups)
        fuse("after commit")
        return results

    def deadly(name: str, perform: Callable[..., None]) -> Callable[..., None]:
        def performing(self: CommandEffects, effect: Effect) -> None:
            fuse(f"before {name}")
            perform(self, effect)
            fuse(f"after {name}")

        return performing

    def deadly_effect(self: Effects, command: Command) -> None:
        fuse("before effect")
        add(self, command)
        fuse("after effect")

    def deadly_say(self: Device, app: str, seq_id: str, answer: Answer, state: State = State.FAILED) -> None:
        fuse("before answer")
        say(self, app, seq_id, answer, state)
        fuse("after answer")

    async def deadly_notify(self: WebhookChannel, notification: Notification) -> None:
        fuse("before telling")
        await notify(self, notification)
        fuse("after telling")

    WebhookChannel.send = deadly_notify  # type: ignore[method-assign]  # a fuse
    SqliteLedger.commit = deadly_commit  # type: ignore[method-assign, assignment]  # a fuse
    for name, perform in HUB_EFFECTS.items():
        setattr(CommandEffects, perform, deadly(name, getattr(CommandEffects, perform)))
    ChatService._reply = deadly_tell  # type: ignore[method-assign]  # a fuse
    Effects.add = deadly_effect  # type: ignore[method-assign]  # a fuse
    Device._answer = deadly_say  # type: ignore[method-assign]  # a fuse


def never_flush() -> None:
    """Take every flush away from the journal: SQLite writes, and leaves the rest to the operating system."""
    add = SqliteWriter.add_to_journal

    def hasty(self: SqliteWriter, bodies: Sequence[bytes]) -> None:
        self.db.execute("PRAGMA synchronous = OFF")
        add(self, bodies)

    SqliteWriter.add_to_journal = hasty  # type: ignore[method-assign]  # a bug


def set_clock(path: Path) -> None:
    """Have the clock of this process set by others, as an operating system's is. No time passes by that: what
    counts elapsed time goes on."""
    now, wrong = SystemClock.now, 0

    def look(*_: object) -> None:
        nonlocal wrong
        wrong = int(path.read_text()) * SECOND

    SystemClock.now = lambda self: now(self) + wrong  # type: ignore[method-assign]  # a clock that is set
    look()
    signal.signal(signal.SIGUSR1, look)


def show_tasks(path: Path) -> None:
    """Have others ask how many tasks there are."""

    def write(*_: object) -> None:
        path.with_suffix(".new").write_text(str(len(asyncio.all_tasks())))
        path.with_suffix(".new").rename(path)

    signal.signal(signal.SIGUSR2, write)


def main() -> None:
    from duly.cli import main as duly

    device.FIRST_SECONDS = 86_400.0  # a person is told soon that there is no hub; here it is being killed
    # After five deaths over the same notification the next attempt would come in a minute or more.
    vars(hub)["fanout_policy"] = lambda settings: replace(fanout_policy(settings), retry=RETRY)
    point = sys.argv.pop(1)
    if os.environ.get(BUG) == "never flush":
        never_flush()
    if clock := os.environ.get(CLOCK):
        set_clock(Path(clock))
    if tasks := os.environ.get(TASKS):
        show_tasks(Path(tasks))
    if trust := os.environ.get(TRUST):
        Ledger.confirm = int(trust) * SECOND
    if point:
        wire(Fuse(point))
    duly()


if __name__ == "__main__":
    main()
