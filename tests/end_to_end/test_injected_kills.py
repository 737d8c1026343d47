"""The hub is killed as it enters its n-th write, flush or send, by strace: no moment between two of them is
left out by chance or by what a test thinks of.

`DULY_INJECTIONS` says how many deaths there are, and `DULY_KILL_SEED` makes them others.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import HubProcess
from tests.servers import GUARD, unable

INJECTIONS = int(os.environ.get("DULY_INJECTIONS", "0"))
CALLS = {"fdatasync": 60, "pwrite64": 200, "sendto": 120, "write": 120, "futex": 600}
"""What a hub does under load, and at the how manieth of each it dies at the latest."""
DEVICES = ("lock", "lamp")


@pytest.mark.proof
@pytest.mark.skipif(not INJECTIONS, reason="the long proof says how many deaths there are: DULY_INJECTIONS")
@pytest.mark.timeout(3 * GUARD + 10 * INJECTIONS)
async def test_the_hub_dies_at_any_system_call(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        unable("there is no strace: make servers installs it")
    hub = HubProcess(tmp_path / "hub")
    tokens = await hub.prepare(["phone", "tablet"], list(DEVICES))
    devices = [Lock(hub, tokens[name], tmp_path / name) for name in DEVICES]
    remotes = [
        Remote(hub, "phone", tokens["phone"], ordered=True),
        Remote(hub, "tablet", tokens["tablet"], ordered=False),
    ]
    rng = Random(os.environ.get("DULY_KILL_SEED", "30"))
    plan = [(call, rng.randint(1, CALLS[call])) for call in (list(CALLS) * INJECTIONS)[:INJECTIONS]]
    await hub.start()
    try:
        async with pressed(remotes, *devices) as load:
            await load.more(1)
            await hub.kill()
            for call, n in plan:
                hub.under = strace(call, n)
                await hub.start("by strace")  # it may die before it is ready
                await hub.died()
            hub.under = []
            await hub.start()
        await judge(hub, [*devices], remotes, ledger=tmp_path / "hub" / "ledger.db")
    finally:
        await hub.kill()


def strace(call: str, n: int) -> list[str]:
    """What kills a program as it enters a system call for the n-th time in one of its threads."""
    return [
        "strace", "-f", "-qq", "-o", "/dev/null", f"--trace={call}",
        f"--inject={call}:signal=SIGKILL:when={n}",
    ]  # fmt: skip
