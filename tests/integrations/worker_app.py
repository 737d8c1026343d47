"""A FastAPI application for `uvicorn --workers`: each payment appends a line with its worker's pid to a file,
and one that is asked to hangs until it is killed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel

from duly.integrations.asgi import IdempotencyMiddleware
from duly.integrations.idempotency_key import IdempotencyPolicy

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    ledger=os.environ["SHOP_LEDGER"],
    routes={
        "/charge": IdempotencyPolicy(effect="at_most_once", lease=1.0),
        "/mail": IdempotencyPolicy(effect="at_least_once", lease=1.0),
    },
)


class WorkerPayment(BaseModel):
    """What is paid, and whether the worker hangs in the middle."""

    order: str
    hang: str = ""


def _note(line: str) -> None:
    with Path(os.environ["SHOP_LOG"]).open("a") as log:
        log.write(line)


@app.get("/ready")
async def ready() -> int:
    return os.getpid()


@app.post("/charge")
@app.post("/mail")
async def pay(payment: WorkerPayment) -> dict[str, str]:
    _note(f"{payment.order} {os.getpid()}\n")
    if payment.hang and not Path(payment.hang).exists():
        await asyncio.Event().wait()
    return {"paid": payment.order}
