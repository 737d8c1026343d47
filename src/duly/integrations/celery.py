"""Celery tasks that run once per message, however often the broker delivers it.

    @app.task(acks_late=True)
    @once_per_task("postgresql://…")
    def charge(order: str) -> str: ...

The law: a task's id is the key. With `acks_late` the broker delivers a task again whose worker died; without
it such a task is lost before duly can know. `self.retry()` and exceptions free the id: a retry runs.
"""

from __future__ import annotations

from collections.abc import Callable

from celery import current_task

from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import DeclaredEffect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message


def once_per_task(
    ledger: LedgerSource, *, effect: DeclaredEffect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run a Celery task once per task id; put it below `@app.task`. A repeat gets the result of the first
    run. `effect` declares what the death of a worker in the middle means, as for `duly.once`."""
    return per_message("celery", _message_id, ledger, effect, keep, lease)


def _message_id(*_: object, **__: object) -> str | None:
    request = current_task.request if current_task else None
    return str(request.id) if request is not None and request.id else None
