"""The hub is killed as it enters its n-th write, flush or send, by strace: no moment between two of them is
left out by chance or by what a test thinks of.

`DULY_INJECTIONS` says how many deaths there are, and `DULY_KILL_SEED` makes them others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.end_to_end.pressing import Lock, Remote, judge, pressed
from tests.end_to_end.processes import HubProcess
from tests.guard import LIMIT
from tests.servers import unable

INJECTIONS = int(os.environ.get("DULY_INJECTIONS", "0"))
CALLS = {"fdatasync": 60, "pwrite64": 200, "write": 120, "futex": 600}
"""What a hub does under load, and at the how manieth of each it dies at the latest. It sends by `write`: a
call that it does not make, such as `sendto`, never kills it."""
DEVICES = ("lock", "lamp")
WAIT = 60.0
"""Seconds within which a hub under load makes a system call so often."""


@pytest.mark.proof
@pytest.mark.skipif(not INJECTIONS, reason="the long proof says how many deaths there are: DULY_INJECTIONS")
@pytest.mark.timeout(3 * LIMIT + 10 * INJECTIONS)
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
    late = 0
    await hub.start()
    try:
        async with pressed(remotes, *devices) as load:
            await load.more(1)
            await hub.kill()
            for call, n in plan:
                hub.under = strace(call, f"signal=SIGKILL:when={n}")
                await hub.start("by strace")  # it may die before it is ready
                if not await died(hub):
                    late += 1
                    await hub.kill()
            hub.under = []
            await hub.start()
            assert late <= len(plan) // 4, f"{late} of {len(plan)} never came to their system call"
        await judge(hub, [*devices], remotes, ledger=tmp_path / "hub" / "ledger.db")
    finally:
        await hub.kill()


async def died(hub: HubProcess) -> bool:
    """Whether it has died at its system call; one that none of its threads makes so often does not."""
    try:
        async with asyncio.timeout(WAIT):
            await hub.died()
    except TimeoutError:
        return False
    return True


def strace(calls: str, fault: str) -> list[str]:
    """What injects a fault into system calls of a program, counted in each of its threads.

    With `-D` the tracer is a grandchild and the program itself is our child: we wait for its death, and a
    kill is a kill of the program. Without, our child is the tracer; when a test gives up and kills that, the
    program goes on without it, holds its ledger, and the next one cannot start."""
    return ["strace", "-D", "-f", "-qq", "-o", "/dev/null", f"--trace={calls}", f"--inject={calls}:{fault}"]
