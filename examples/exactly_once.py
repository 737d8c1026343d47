"""Your own SQL and the memory that it ran, committed together: a crash leaves both or neither.

Run it twice: python examples/exactly_once.py
"""

import asyncio

import duly


async def main() -> None:
    async with await duly.open_ledger("sqlite:///bookings.db") as ledger:

        @duly.once(ledger, scope="setup", key=lambda: "bookings", effect="exactly_once")
        async def create_table(transaction: duly.Transaction) -> None:
            await transaction.execute("CREATE TABLE bookings (id TEXT, seat INTEGER)")

        @duly.once(ledger, scope="bookings", key=lambda order, seat: order, effect="exactly_once")
        async def book(transaction: duly.Transaction, order: str, seat: int) -> int:
            await transaction.execute("INSERT INTO bookings VALUES (?, ?)", order, seat)
            ((booked,),) = await transaction.fetch("SELECT count(*) FROM bookings")
            return int(booked)

        await create_table()
        print(f"bookings: {await book('order-7', 12)}")
        print(f"bookings: {await book('order-7', 12)}")  # a repeat: no second row


asyncio.run(main())
