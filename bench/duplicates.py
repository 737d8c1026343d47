"""How much cheaper is a repeat than a first time?

The same verb, the same 200 callers, on one ledger, taking turns. Hot repeats are of what was admitted just
now, which memory answers. Cold ones are of older messages that have left its window: the ledger is asked,
in a shared transaction as always. Every cold repeat is of another message, or the second would be hot.
"""

from __future__ import annotations

import asyncio

import duly
from bench.measure import Figure, Report, batches, folder, messages, rounds, spread
from duly import Word
from duly.storage.ledger import HOT_IDS


async def run(quick: bool) -> Report:
    count, turns = (8_000, 3) if quick else (16_000, 5)
    with folder() as place:
        async with await duly.open_ledger(f"sqlite:///{place}/ledger.db") as ledger:
            old = messages(count * turns + HOT_IDS)
            for some in batches(old, 1_600):
                await asyncio.gather(*map(ledger.admit_many, batches(some, 16)))
            cold_ones = iter(batches(old, count)[:turns])
            latest = messages(0)

            async def fresh() -> float:
                latest[:] = messages(count)
                return await spread(latest, 200, ledger.admit)

            async def hot() -> float:
                assert (await ledger.admit(latest[0])).word is Word.DUPLICATE
                return await spread(latest, 200, ledger.admit)

            async def cold() -> float:
                chosen = next(cold_ones)
                assert ledger.recall(chosen[-1], ledger.clock.now()) is None
                return await spread(chosen, 200, ledger.admit)

            rate = await rounds({"fresh": fresh, "hot": hot, "cold": cold}, turns)
    return Report(
        "Repeats on SQLite, 200 callers",
        [
            Figure("fresh", rate["fresh"], "msg/s"),
            Figure("hot repeat", rate["hot"], "msg/s", rate["hot"] / rate["fresh"], "fresh", 3),
            Figure("cold repeat", rate["cold"], "msg/s", rate["cold"] / rate["fresh"], "fresh"),
        ],
        {"rates": rate},
    )
