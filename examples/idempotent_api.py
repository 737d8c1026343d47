"""A FastAPI application whose payments run once, however often a client sends them.

Run it with: uvicorn --app-dir examples idempotent_api:app --workers 4
"""

from fastapi import FastAPI
from pydantic import BaseModel

from duly.integrations.asgi import IdempotencyMiddleware
from duly.integrations.idempotency_key import IdempotencyPolicy

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    ledger="sqlite:///payments.db",
    routes={"POST /payments": IdempotencyPolicy(effect="at_most_once", required=True)},
)


class Payment(BaseModel):
    """What a client asks for."""

    order: str
    amount: int


@app.post("/payments", status_code=201)
async def pay(payment: Payment) -> dict[str, str]:
    """Charge a card; here, print a line."""
    print(f"charging {payment.amount} for {payment.order}", flush=True)
    return {"receipt": f"receipt for {payment.order}"}
