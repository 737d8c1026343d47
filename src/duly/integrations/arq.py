"""arq jobs that run once per job id, also when a job is queued again or its worker died.

    @once_per_job("postgresql://…")
    async def charge(ctx, order: str) -> str: ...

The law: the job's id is the key. An exception frees it, so that arq's own retries run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from duly.idempotency.ledgers import LedgerSource
from duly.idempotency.runs import DeclaredEffect
from duly.integrations.task_queues import KEEP, LEASE, F, per_message


def once_per_job(
    ledger: LedgerSource, *, effect: DeclaredEffect = "at_most_once", keep: float = KEEP, lease: float = LEASE
) -> Callable[[F], F]:
    """Run an arq job once per job id. A repeat gets the result of the first."""
    return per_message("arq", _message_id, ledger, effect, keep, lease)


def _message_id(ctx: object = None, *_: object, **__: object) -> str | None:
    found = ctx.get("job_id") if isinstance(ctx, Mapping) else None
    return None if found is None else str(found)
