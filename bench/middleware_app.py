"""The endpoint that `bench.middleware` measures, behind the middleware that `BENCH_KIND` names."""

from __future__ import annotations

import os

from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class BenchOrder(BaseModel):
    """The payload."""

    id: str
    amount: int


@app.post("/orders")
async def order(order: BenchOrder) -> dict[str, str]:
    """Answer at once."""
    return {"paid": order.id}


match os.environ["BENCH_KIND"]:
    case "duly":
        from duly.integrations.asgi import IdempotencyMiddleware

        app.add_middleware(IdempotencyMiddleware, ledger=os.environ["BENCH_STORE"])
    case "asgi-idempotency-header":
        from idempotency_header_middleware import IdempotencyHeaderMiddleware
        from idempotency_header_middleware.backends import RedisBackend
        from redis.asyncio import Redis

        backend = RedisBackend(redis=Redis.from_url(os.environ["BENCH_STORE"]))
        app.add_middleware(IdempotencyHeaderMiddleware, backend=backend)
    case "fastapi-idempotency":
        from fastapi_idempotency import IdempotencyMiddleware as TheirMiddleware

        app.add_middleware(TheirMiddleware)
