"""How long a test waits for what must happen: until its own limit ends it.

The limit of a test (tests/time_limit.py) leaves out the time for which there was no processor for it, and
tells where it stood. A shorter time-out of a test's own measures the machine: with other work beside it
everything takes many times as long. A test that is about how fast something is has a `Stopwatch`.
"""

from __future__ import annotations

from typing import Final

GUARD: Final = 600.0
"""Seconds after which a test gives up that runs without its limit."""

LIMIT: Final = 120.0
"""Seconds of the limit of a test that starts many processes; a proof takes several."""
