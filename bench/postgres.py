"""Admission on PostgreSQL, for information: the same callers as on SQLite, a server with its default settings
(it flushes before it answers) on the same machine, so that the two share its cores."""

from __future__ import annotations

import duly
from bench.measure import Figure, Report, batches, messages, rounds, spread
from bench.servers import postgres_url


async def run(quick: bool) -> Report:
    count = 8_000 if quick else 32_000
    title = "Admission on PostgreSQL"
    with postgres_url() as url:
        if url is None:
            return Report(title, notes=["postgresql is not installed"])
        async with await duly.open_ledger(url) as ledger:

            async def one_by_one() -> float:
                return await spread(messages(count), 200, ledger.admit)

            async def in_batches() -> float:
                return 16 * await spread(batches(messages(count), 16), 100, ledger.admit_many)

            rate = await rounds({"admit": one_by_one, "admit_many": in_batches}, 3)
    return Report(
        title,
        [
            Figure("admit, 200 callers", rate["admit"], "msg/s"),
            Figure("admit_many, 100 callers × 16", rate["admit_many"], "msg/s"),
        ],
        {"rates": rate},
    )
