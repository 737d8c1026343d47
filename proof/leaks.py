"""What a process holds, and whether that has grown: memory, and descriptors.

The law: whatever was tried, the process holds afterwards what it held before. Three figures are compared,
since each misses what another shows: the blocks that Python has allocated (exact, one object in a hundred
cases shows; a block that grows does not), the resident memory (coarse; what a library in C has allocated as
well), and the open descriptors. Caches of a bounded size are emptied first; an unbounded one is a leak.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path
from typing import Final

from msgspec import Struct

BLOCKS: Final = 1_500
"""Allocated blocks by which a process may grow: msgspec keeps the last thousand short names of JSON, and
Python lists of free objects."""
BYTES: Final = 4 * 1024 * 1024
"""Resident bytes by which it may grow: memory is returned in pieces."""


class Held(Struct, frozen=True):
    """What a process holds."""

    blocks: int
    resident: int
    descriptors: int


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


def held() -> Held:
    """Return what this process holds, without what it may forget."""
    for cache in gc.get_objects():
        # Not isinstance: that asks the object for its class, and a lazy one of a library may raise.
        if type(cache) is functools._lru_cache_wrapper and cache.cache_info().maxsize is not None:
            cache.cache_clear()
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(sys.getallocatedblocks(), resident, descriptors())


def leaked(before: Held, *, blocks: int = BLOCKS, resident: int = BYTES) -> str:
    """Return what this process holds more than before; nothing if it leaks nothing."""
    now = held()
    grown = {
        "blocks": (now.blocks - before.blocks, blocks),
        "resident bytes": (now.resident - before.resident, resident),
        "descriptors": (now.descriptors - before.descriptors, 0),
    }
    return ", ".join(f"{many:,} {what} more" for what, (many, allowed) in grown.items() if many > allowed)
