"""A function that runs once per key: repeats get the stored answer, also after a restart.

Run it twice: python examples/once.py
"""

import asyncio

import duly


async def main() -> None:
    async with await duly.open_ledger("sqlite:///payments.db") as ledger:

        @duly.once(ledger, scope="payments", key=lambda order: order["id"])
        async def charge(order: dict[str, object]) -> str:
            print(f"charging {order['amount']}")  # printed once, however often this program is run
            return f"receipt for {order['id']}"

        order = {"id": "order-7", "amount": 12}
        print(await asyncio.gather(charge(order), charge(order)))
        try:
            await charge({"id": "order-7", "amount": 99})
        except duly.Conflict as problem:
            print(f"refused: {problem}")


asyncio.run(main())
