"""Outages: what a hub depends on and cannot use now. Each begins and ends with one line in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from msgspec import Struct

LOG: Final = logging.getLogger("duly.outage")


class Outage(Struct, frozen=True):
    """A part that does not work: why, and since when (monotonic seconds)."""

    reason: str
    since: float


class Outages:
    """The outages of one hub."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self.current: dict[str, Outage] = {}

    def see(self, problems: Mapping[str, str | None]) -> None:
        """Note the present state of parts: the reason why one does not work, or None."""
        for part, reason in problems.items():
            known = self.current.get(part)
            if reason and known is None:
                self.current[part] = Outage(reason, self._now())
                LOG.warning("%s does not work: %s", part, reason, extra={"part": part})
            elif not reason and known is not None:
                del self.current[part]
                lasted = round(self._now() - known.since, 1)
                LOG.warning(
                    "%s works again, after %s s", part, lasted, extra={"part": part, "seconds": lasted}
                )
