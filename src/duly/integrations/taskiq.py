"""Taskiq tasks that run once per task id, however often the broker delivers it.

    broker = RedisStreamBroker(url).with_middlewares(CurrentTask())

    @broker.task
    @once_per_task("postgresql://…")
    async def charge(order: str) -> str: ...

The law: the task's id is the key. An exception frees it, so that Taskiq's own retries run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from taskiq import TaskiqMessage, TaskiqMiddleware

from duly.errors import ProgramError
from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import DeclaredEffect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message

_CURRENT: Final = ContextVar[str | None]("duly_taskiq_task", default=None)
_WORKER: Final = "taskiq.cli.worker.run"
"""The module that only the processes of `taskiq worker` import."""


class CurrentTask(TaskiqMiddleware):  # type: ignore[misc] # mypy does not read taskiq
    """Notes which task is being worked on, for `once_per_task`."""

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Note the task's id."""
        _CURRENT.set(message.task_id)
        return message


def once_per_task(
    ledger: LedgerSource, *, effect: DeclaredEffect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run a Taskiq task once per task id; put it below `@broker.task`, and `CurrentTask()` into the broker's
    middlewares. A repeat gets the result of the first."""
    return per_message("taskiq", _message_id, ledger, effect, keep, lease)


def _message_id(*_: object, **__: object) -> str | None:
    current = _CURRENT.get()
    if current is None and _WORKER in sys.modules:
        raise ProgramError(
            "the id of this task is not known; add duly.integrations.taskiq.CurrentTask() to the broker: "
            "broker.with_middlewares(CurrentTask())"
        )
    return current
