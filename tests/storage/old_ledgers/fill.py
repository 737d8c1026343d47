"""Fills a ledger with whatever duly is on the path: run by `make.py` with the program of an earlier commit.

python fill.py URL [kill]
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from typing import Any

import duly

MS = 1_700_000_000_000
NOW = MS * 1000
UNTIL = NOW + 86_400_000_000


class Clock:
    """A clock that stands still."""

    def now(self) -> int:
        """The time, in microseconds."""
        return NOW

    def steady(self) -> int:
        """The monotonic time."""
        return 0


def module(*names: str) -> Any:
    """Returns the first of these modules that this version has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"none of {names} is here")


def one_of(where: Any, *names: str) -> Any:
    """Returns the first of these names that a module has; None if it has none."""
    return next((getattr(where, name) for name in names if hasattr(where, name)), None)


async def main(url: str, kill: bool) -> None:
    """Write to every table that this version has."""
    w, m = module("duly.core.operations", "duly.core.writes"), module("duly.core.messages")
    state = module("duly.core.lifecycle").State
    ref, append = one_of(w, "DeliveryRef", "Ref"), one_of(w, "AppendEntry", "Append")
    rise, refuse = one_of(w, "RaiseMark", "Raise"), one_of(w, "RecordRefusal", "Refuse")
    put = one_of(w, "PutItem", "PutItems", "Put", "Keep")
    ledger = await duly.open_ledger(url, clock=Clock())
    done = m.Message("app-1", f"{MS}_1", "lock_control", "lock-1", b'{"open":true}')
    waiting = m.Message("app-1", f"{MS + 1}_2", "lock_control", "lock-1", b'{"open":false}')
    alert = m.Message("gate", "event-1", "alert_event", "home", b'{"severity":"critical"}', time=NOW)
    first = ref(done.key, "device", "lock-1")
    listed = {"listed": True} if "listed" in w.Admit.__struct_fields__ else {}
    await ledger.write(*(w.Admit(each, UNTIL, NOW) for each in (done, waiting)))
    await ledger.write(w.Admit(alert, UNTIL, NOW, **listed))
    await ledger.write(
        w.Deliver(first, NOW, 0, 1, "w"),
        w.Deliver(ref(waiting.key, "device", "lock-1"), NOW),
        w.Deliver(ref(alert.key, "alert", "mail", 101), NOW),
    )
    await ledger.write(w.Advance(done.key, state.DONE, NOW, m.Answer(0, b"7", "opened")))
    await ledger.write(w.Finish(first, 1, state.DONE))
    await ledger.write(
        append("conv", b"hello", NOW),
        append("conv", b"bye", NOW),
        w.MoveCursor("conv", "ann", 1),
        rise('["lock-1","","app-1"]', 2, MS + 1),
        refuse("app-1", "x", "stale", "too old", NOW),
    )
    if put is not None:
        await ledger.write(put("notes", "a", b"b"))
    if kill:
        os._exit(9)
    await ledger.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], "kill" in sys.argv))
