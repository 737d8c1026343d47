"""`duly floor`: what it says of a floor in the future, with and without a hub, and that it mends it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from urllib.request import Request, urlopen

from duly.core.operations import RaiseMark
from duly.storage import open_ledger
from duly.storage.sqlite.file import connect
from tests.cli.conftest import CommandLine
from tests.guard import GUARD

TWO_DAYS = 2 * 86_400_000_000


def poison(ledger: Path) -> None:
    """A floor as a clock has left it that was two days ahead for hours."""
    db = connect(ledger)
    try:
        db.execute("UPDATE floor SET until = ?1, trusted = ?1", (time.time_ns() // 1_000 + TWO_DAYS,))
    finally:
        db.close()


def lead_ahead(ledger: Path) -> None:
    """A lane as a sender and a hub have left it whose clocks were two days ahead."""

    async def raise_it() -> None:
        async with await open_ledger(f"sqlite:///{ledger}") as book:
            ahead = (book.clock.now() + TWO_DAYS) // 1_000
            await book.write(RaiseMark('["lock","","phone"]', 5, ahead))

    asyncio.run(raise_it())


def floor_of(ledger: Path) -> int:
    """Read by a program that shares no code with duly, in seconds."""
    db = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    try:
        return int(db.execute("SELECT until FROM floor").fetchone()[0]) // 1_000_000
    finally:
        db.close()


def test_a_floor_in_the_future_is_told_by_doctor_and_mended_without_a_hub(cli: CommandLine) -> None:
    assert cli.duly("add", "app", "phone").returncode == 0
    ledger = cli.folder / "duly-data" / "ledger.db"
    poison(ledger)
    sick = cli.duly("doctor")
    assert sick.returncode == 1
    assert "✗ floor" in sick.stdout
    assert "in the future: a clock was wrong" in cli.duly("floor").stderr
    done = cli.duly("floor", "--mend")
    assert done.returncode == 0, done.stderr
    assert "what was made before is stale until" in done.stderr
    assert floor_of(ledger) <= time.time()
    assert cli.ask("floor")["ahead"] == 0
    assert "in the future" not in cli.duly("doctor").stdout


def test_a_lane_in_the_future_is_told_by_doctor_and_mended_without_a_hub(cli: CommandLine) -> None:
    """Everything that its sender said was superseded for two days, and doctor found nothing wrong."""
    assert cli.duly("add", "app", "phone").returncode == 0
    lead_ahead(cli.folder / "duly-data" / "ledger.db")
    sick = cli.duly("doctor")
    assert sick.returncode == 1
    assert "✗ lanes" in sick.stdout
    assert "1 lane is in the future, since a clock was wrong" in cli.duly("floor").stdout
    assert "set back to now" in cli.duly("floor", "--mend").stdout
    assert "in the future" not in cli.duly("doctor").stdout


def test_a_new_ledger_has_forgotten_nothing(cli: CommandLine) -> None:
    cli.up()
    found = cli.duly("floor")
    assert found.stdout == "the floor has not risen yet: this ledger is new and has forgotten nothing\n"
    assert found.stderr == "it rises when the clock has been right for an hour\n"


def test_a_running_hub_is_asked(cli: CommandLine) -> None:
    assert cli.duly("add", "app", "phone").returncode == 0
    poison(cli.folder / "duly-data" / "ledger.db")
    cli.up()
    assert cli.ask("floor")["ahead"] > 0
    assert cli.ask("floor", "--mend", "--all") | {"now": 0} == cli.ask("floor") | {"now": 0}
    found = cli.ask("floor")
    assert (found["ahead"], found["barrier"]) == (0, None)


def test_all_goes_with_mend(cli: CommandLine) -> None:
    assert cli.duly("floor", "--all").returncode == 2


def test_a_new_ledger_is_not_said_to_be_years_behind(cli: CommandLine) -> None:
    """Its trusted time is counted from zero until a clock has been right for an hour."""
    cli.up()
    found = cli.ask("floor")
    assert (found["trusted"], found["ahead"]) == (None, 0)
    assert "has not risen yet" in cli.duly("floor").stdout
    run_file = json.loads((cli.folder / "duly-data" / "hub.json").read_text())
    asked = Request(f"{run_file['url']}/v1/state", headers={"Authorization": f"Bearer {run_file['token']}"})
    with urlopen(asked, timeout=GUARD) as answer:
        assert json.load(answer)["floor"] == {"ahead": 0.0, "tolerated": 900.0, "behind": None}
