"""The limit of what a sentinel may report, and what becomes of critical alerts beyond it.

The law: no rate refuses a critical alert without a person being told. A critical alert beyond the limit uses
a reserve that other alerts cannot use up. When that is used up, too, the recipients of its profile are told
that critical alerts of this sentinel are refused, at most once an hour by each hub; that is stored before the
refusal is answered. The sentinel keeps what was refused and sends it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from duly.core.account_limits import AccountLimit
from duly.core.ids import event_id
from duly.core.messages import Message
from duly.core.monitor.signals import EVENT, REFUSED, EventData, Severity, encode, raw
from duly.core.quota import Quota, Rate
from duly.core.units import HOUR, MINUTE, MS
from duly.errors import RateLimited
from duly.runtime.limited_repeats import LimitedRepeats

RESERVE: Final = Rate(600, MINUTE)
"""The critical alerts of one sentinel, and changes of alerts, that are taken beyond its limit."""
RESERVE_BITS: Final = 14
"""A large one counts as several: one for each 16 KiB."""


class LimitedAlerts:
    """Counts what sentinels report to one hub. `worker` is the hub's name in the ledger; `store` stores an
    alert of the tower's own, and returns when that is committed; `repeats` knows what was taken."""

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
        self._reserve = Quota(RESERVE)
        self._told: dict[tuple[str, str], int] = {}
        """the hour in which the recipients of a profile were last told of refusals, by sentinel"""

    def take(self, sentinel: str, size: int, now: int) -> None:
        """Count what a sentinel sends; raises `RateLimited` if that is too much."""
        self._limit.take(sentinel, size, now)

    def excess(self, sentinel: str, size: int, now: int) -> RateLimited | None:
        """Count what a sentinel sends, or return why that is too much."""
        return self._limit.excess(sentinel, size, now)

    async def is_refused(self, sentinel: str, id_: str | None, refusal: RateLimited) -> bool:
        """Count the refusal of what is too much; False if it is a repeat of what was taken."""
        if await self._repeats.is_repeat(sentinel, id_):
            return False
        self._limit.refuse(sentinel, refusal)
        return True

    def take_reserve(self, sentinel: str, size: int, now: int, refusal: RateLimited) -> None:
        """Count what the limit has refused against the reserve; raises the refusal, with the longer wait, if
        that is used up."""
        wait = self._reserve.take(sentinel, now, 1 + (size >> RESERVE_BITS))
        if wait:
            raise RateLimited(str(refusal), max(wait, refusal.wait))

    async def tell(self, sentinel: str, profile: str, why: str, now: int) -> None:
        """Tell the recipients of a profile that critical alerts are refused, unless they know it already."""
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
