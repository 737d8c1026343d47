"""The rate limit of sentinels, and what happens to critical alerts beyond it.

The law: no critical alert is refused for its rate without a person being notified. A critical alert beyond
the limit uses a reserve that other alerts cannot use up. When the reserve is used up as well, the recipients
of its profile are notified that critical alerts of this sentinel are refused, at most once an hour by each
hub; that is stored before the refusal is answered. The sentinel keeps refused alerts and sends them again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from duly.core.account_limits import AccountLimit
from duly.core.ids import event_id
from duly.core.messages import Message
from duly.core.monitor.signals import EVENT, REFUSED, EventData, Severity, encode, raw
from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import HOUR, MINUTE, MS
from duly.errors import RateLimited
from duly.runtime.limited_repeats import LimitedRepeats

RESERVE: Final = Rate(600, MINUTE)
"""The critical alerts of one sentinel, and changes of alerts, that are accepted beyond its limit."""
RESERVE_BITS: Final = 14
"""A large alert counts as several: one for each 16 KiB."""


class LimitedAlerts:
    """Counts what sentinels report to one hub. `worker` is the hub's name in the ledger; `store` stores an
    alert of the tower itself and returns when it is committed; `repeats` recognises accepted alerts."""

    def __init__(
        self,
        limit: AccountLimit,
        worker: str,
        store: Callable[[Message], Awaitable[None]],
        repeats: LimitedRepeats,
    ) -> None:
        self._limit = limit
        self._repeats = repeats
        self._worker = worker
        self._store = store
        self._reserve = RateLimits(RESERVE)
        self._told: dict[tuple[str, str], int] = {}
        """by sentinel: the hour in which the recipients of a profile were last notified of refusals"""

    def take(self, sentinel: str, size: int, now: int) -> None:
        """Count what a sentinel sends; raises `RateLimited` if it exceeds the limit."""
        self._limit.take(sentinel, size, now)

    def excess(self, sentinel: str, size: int, now: int) -> RateLimited | None:
        """Count what a sentinel sends, or return why it exceeds the limit."""
        return self._limit.excess(sentinel, size, now)

    def give_back(self, sentinel: str, size: int) -> None:
        """Give back the bytes of an alert that was counted and is not stored."""
        self._limit.give_back(sentinel, size)

    async def is_refused(self, sentinel: str, id_: str | None, refusal: RateLimited) -> bool:
        """Count a refusal; returns False if it is a repeat of an accepted alert."""
        if await self._repeats.is_repeat(sentinel, id_):
            return False
        self._limit.refuse(sentinel, refusal)
        return True

    def take_reserve(self, sentinel: str, size: int, now: int, refusal: RateLimited) -> None:
        """Count a refused alert against the reserve; raises the refusal, with the longer wait, if that is
        used up."""
        wait = self._reserve.take(sentinel, now, 1 + (size >> RESERVE_BITS))
        if wait:
            raise RateLimited(str(refusal), max(wait, refusal.wait))

    async def tell(self, sentinel: str, profile: str, why: str, now: int) -> None:
        """Notify the recipients of a profile that critical alerts are refused, unless they were notified
        already."""
        hour = now // HOUR
        if self._told.get((sentinel, profile)) == hour:
            return
        id_ = event_id(
            sentinel=sentinel, tower="", profile=profile, reason=REFUSED, session=self._worker, device="",
            window_start=hour * HOUR,
        )  # fmt: skip
        meta = encode({"refused": f"critical alerts of {sentinel} beyond the limit: {why}"})
        data = EventData(
            profile, REFUSED, "", self._worker, now // MS, Severity.CRITICAL, 0, device_meta=raw(meta)
        )
        await self._store(Message(sentinel, id_, EVENT, profile, encode(data), now // MS * MS))
        self._told[sentinel, profile] = hour
