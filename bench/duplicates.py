"""How much cheaper is a repeat than a first time?

The same verb, the same 200 callers, on one ledger, taking turns. Hot repeats are of what was admitted just
now, which memory answers. Cold ones are of messages from before the ledger was opened: its file is asked,
in a shared transaction as always. Every cold repeat is of another message, or the second would be hot.
"""

from __future__ import annotations

import asyncio

import duly
from bench.measure import Options, Report, batches, figure, folder, messages, rounds, spread
from duly import VerdictKind


async def run(options: Options) -> Report:
    count, turns = options.pick((8_000, 3), (16_000, 5))
    with folder() as root:
        url = f"sqlite:///{root}/ledger.db"
        old = messages(count * turns)
        async with await duly.open_ledger(url) as ledger:
            for some in batches(old, 1_600):
                await asyncio.gather(*map(ledger.admit_many, batches(some, 16)))
        async with await duly.open_ledger(url) as ledger:
            cold_ones = iter(batches(old, count))
            latest = messages(0)

            async def fresh() -> float:
                latest[:] = messages(count)
                return await spread(latest, 200, ledger.admit)

            async def hot() -> float:
                assert (await ledger.admit(latest[0])).kind is VerdictKind.DUPLICATE
                return await spread(latest, 200, ledger.admit)

            async def cold() -> float:
                return await spread(next(cold_ones), 200, ledger.admit)

            rate = await rounds({"fresh": fresh, "hot": hot, "cold": cold}, turns)
    return Report(
        "Repeats on SQLite, 200 callers",
        [
            figure("fresh", rate["fresh"], "msg/s"),
            figure("hot repeat", rate["hot"], "msg/s", rate["fresh"], "fresh"),
            figure("cold repeat", rate["cold"], "msg/s", rate["fresh"], "fresh"),
        ],
        dict(rate),
    )
