"""Sends notifications about alerts through channels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from duly.apps.alerts.ack_links import AckLinks
from duly.apps.alerts.channels import open_channel
from duly.apps.alerts.channels.channel import Channel
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.apps.alerts.model import NAMED, AlertStatus
from duly.apps.alerts.notifications import NotificationContext, notification
from duly.apps.alerts.profiles import ChannelAddress, Profiles
from duly.core.fanout.plan import NOT_WANTED, AttemptResult, StartAttempt
from duly.errors import Declined, DulyError, InDoubt, Malformed, NotSent
from duly.storage.ledger import Ledger

ATTEMPT_SECONDS: Final = 50.0
"""The longest attempt, whatever a channel allows; shorter than the lease of a delivery."""
TIMES_KEPT: Final = 1_000
"""Alerts whose time of receipt is remembered."""


class SendResult(NamedTuple):
    """The result of an attempt: how it went, why, and how long the recipient wants no further attempt
    (µs)."""

    result: AttemptResult
    reason: str = ""
    rest: int = 0


class NotificationSender:
    """The channels of one hub. `statuses` are those of alerts that were changed after they were reported;
    `wanted` returns whether an attempt is still to be made."""

    def __init__(
        self,
        ledger: Ledger,
        profiles: Profiles,
        statuses: Mapping[bytes, AlertStatus],
        wanted: Callable[[StartAttempt], Awaitable[bool]],
        *,
        private: bool,
        folder: Path | None,
    ) -> None:
        self.links: AckLinks | None = None
        """makes the links by which recipients acknowledge; None: notifications carry no links"""
        self._ledger = ledger
        self._profiles = profiles
        self._statuses = statuses
        self._wanted = wanted
        self._private = private
        self._folder = folder
        self._received: dict[bytes, int] = {}
        """when alerts were received according to the ledger, so that every attempt at every hub shows the
        same time"""
        self._threads = ChannelThreads()
        self._channels: dict[str, tuple[ChannelAddress, Channel]] = {}

    async def send(self, attempt: StartAttempt) -> SendResult:
        """Make one attempt; every failure becomes a result."""
        try:
            if self.links is not None:
                await self.links.reachable()
            channel = await self._channel(attempt.recipient)
            if not await self._wanted(attempt):
                return SendResult(AttemptResult.CALLED_OFF, NOT_WANTED)
            context = await self._context(attempt)
            # Text about thousands of alerts takes a while, and must not block the event loop.
            many = len(attempt.items) > NAMED
            content = (
                await asyncio.to_thread(notification, attempt, context)
                if many
                else notification(attempt, context)
            )
            async with asyncio.timeout(ATTEMPT_SECONDS):
                await channel.send(content)
        except NotSent as problem:
            return SendResult(AttemptResult.NOT_SENT, str(problem), problem.rest)
        except (Declined, Malformed) as problem:
            return SendResult(AttemptResult.REFUSED, str(problem))
        except InDoubt as problem:
            return SendResult(AttemptResult.IN_DOUBT, str(problem))
        except TimeoutError:
            return SendResult(AttemptResult.IN_DOUBT, f"no answer within {ATTEMPT_SECONDS:.0f} s")
        except Exception as problem:  # a bug of a channel must not stop the others; its text may hold secrets
            return SendResult(AttemptResult.IN_DOUBT, f"the channel failed: {type(problem).__name__}")
        return SendResult(AttemptResult.ARRIVED)

    async def close(self) -> None:
        """Close all channels."""
        for _, channel in self._channels.values():
            await channel.close()

    async def _context(self, attempt: StartAttempt) -> NotificationContext:
        """Return the context of a notification. The time of receipt is read from the ledger for a few alerts
        only."""
        if len(attempt.items) <= NAMED:
            if len(self._received) >= TIMES_KEPT:
                self._received.clear()
            for item in attempt.items:
                key = item.message.key
                if key not in self._received:
                    with contextlib.suppress(DulyError):
                        record = await self._ledger.find(key)
                        if record is not None:
                            self._received[key] = record.accepted_at
        keys = [item.message.key for item in attempt.items]
        names = {item.message.recipient for item in attempt.items}
        profiles = {name: self._profiles.get(name) for name in names}
        return NotificationContext(
            self._ledger.clock.now(),
            {key: self._statuses[key] for key in keys if key in self._statuses},
            {key: self._received[key] for key in keys if key in self._received},
            {name: profile.zone for name, profile in profiles.items() if profile is not None},
            self._links_of(attempt),
        )

    def _links_of(self, attempt: StartAttempt) -> dict[bytes, str]:
        """Return the links of the alerts that a notification names one by one."""
        links, now = self.links, self._ledger.clock.now()
        if links is None:
            return {}
        keys = [item.message.key for item in attempt.items[:NAMED]]
        return {key: links.make(key, attempt.recipient, self._received.get(key, now)) for key in keys}

    async def _channel(self, label: str) -> Channel:
        address = await self._profiles.find_address(label)
        if address is None:
            raise Declined("its address is not known any more; 'duly deliveries edit' gives it another")
        known = self._channels.get(label)
        if known is not None and known[0] == address:
            return known[1]
        channel = await asyncio.to_thread(
            open_channel, address.url, address.secret, folder=self._folder, private=self._private,
            threads=self._threads,
        )  # fmt: skip
        others = self._channels.get(label)
        if others is not known and others is not None and others[0] == address:
            return others[1]  # another attempt has opened it meanwhile
        self._channels[label] = (address, channel)
        if known is not None:
            await known[1].close()
        return channel
