"""Admission on PostgreSQL, for information: the same callers as on SQLite, a server with its default settings
(it flushes before it answers) on the same machine, so that the two share its cores."""

from __future__ import annotations

import duly
from bench.measure import Options, Report, batches, figure, messages, rounds, spread
from bench.servers import postgres_server


async def run(options: Options) -> Report:
    count = options.pick(8_000, 32_000)
    title = "Admission on PostgreSQL"
    with postgres_server() as server:
        if server is None:
            return Report(title, notes=["postgresql is not installed"])
        async with await duly.open_ledger(server.url) as ledger:

            async def one_by_one() -> float:
                return await spread(messages(count), 200, ledger.admit)

            async def in_batches() -> float:
                return 16 * await spread(batches(messages(count), 16), 100, ledger.admit_many)

            rate = await rounds({"admit": one_by_one, "admit_many": in_batches}, 3)
    return Report(
        title,
        [
            figure("admit, 200 callers", rate["admit"], "msg/s"),
            figure("admit_many, 100 callers × 16", rate["admit_many"], "msg/s"),
        ],
        dict(rate),
    )
