"""Does a command cost the same, however many the hub remembers?

Ledgers are filled through the public verb, with ids over the last hours as they come in reality, and then
given the ends and deliveries that such commands leave behind. A hub runs on each; they take turns.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import apsw

import duly
from bench.gateway import accounts, measure
from bench.growth import fill
from bench.load import Pair
from bench.measure import BODY, Contender, Figure, Report, folder, rounds
from bench.servers import hub
from duly.core.lifecycle import State
from duly.core.messages import Answer, pack_answer

SIZES = [1_000, 100_000, 1_000_000]
QUICK = [1_000, 100_000]


def end_all(path: Path) -> None:
    """As if all of them had been delivered and done."""
    db = apsw.Connection(str(path))
    with db:
        db.execute(
            "INSERT INTO deliveries SELECT key, 'device', recipient, 0, ?, 1, accepted_at, expires, '', '' "
            "FROM messages",
            (int(State.DONE),),
        )
        db.execute("UPDATE messages SET state = ?, answer = ?", (int(State.DONE), pack_answer(Answer())))
    db.close()


async def remembering(place: Path, size: int) -> list[Pair]:
    """A hub's folder with so many ended commands."""
    talking, _ = await accounts(place, 1)
    path = place / "ledger.db"
    async with await duly.open_ledger(f"sqlite:///{path}") as ledger:
        await fill(ledger, 0, size, size, BODY)
    end_all(path)
    return talking


async def run(quick: bool) -> Report:
    sizes, turns, seconds = (QUICK, 5, 1.0) if quick else (SIZES, 7, 1.5)
    with folder() as place, contextlib.ExitStack() as running:

        def measured(url: str, talking: list[Pair]) -> Contender:
            async def cost() -> float:
                return 1e6 / (await measure(url, talking, 100, seconds)).rate

            return cost

        contenders: dict[str, Contender] = {}
        for size in sizes:
            talking = await remembering(place / str(size), size)
            url = running.enter_context(hub("duly", place / str(size))).url
            contenders[str(size)] = measured(url, talking)
        cost = await rounds(contenders, turns)
    least = str(sizes[0])
    figures = []
    for size in sizes:
        ratio = None if str(size) == least else cost[str(size)] / cost[least]
        bound = None if str(size) == least else 1.3
        figures.append(
            Figure(
                f"{size:,} remembered", cost[str(size)], "µs/cmd", ratio, f"at {sizes[0]:,}", at_most=bound
            )
        )
    return Report("Remembered commands: cost of one more, c=100", figures)
