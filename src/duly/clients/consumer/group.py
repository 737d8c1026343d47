"""The consumers of one name on one ledger: which of them runs which messages.

The laws. Lanes are divided into a fixed number of partitions, and a partition is held by one consumer at a
time, so that a lane's messages run one after the other. A message for another consumer is stored, and that
consumer finds it in the ledger: at once by a hint, or within a second without one. Messages without a lane
run where they arrive. A consumer with more than its share gives up partitions, each when no message of it is
under way. The partitions of a dead consumer are claimed by the live ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

import msgspec

from duly.clients.consumer.queue_message import PARTITIONS, partition_of
from duly.cluster.notifier import Notifier
from duly.cluster.registry import HubRegistry
from duly.cluster.remote import CoalescedTask, PolledRemoteHubs
from duly.core.inbox import Inbox
from duly.core.operations import OpenDelivery
from duly.core.steps import DeliveriesFound, Event, Reachable, Unreachable
from duly.errors import LedgerError, Stopped
from duly.runtime.engine import Engine
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import Ledger


class ConsumerGroup(PolledRemoteHubs):
    """One consumer's part in its group."""

    def __init__(self, name: str, ledger: Ledger, notifier: Notifier, inbox: Inbox) -> None:
        super().__init__()
        self._ledger = ledger
        self._notifier = notifier
        self._inbox = inbox
        self._engine: Engine | None = None
        self._registry = HubRegistry(ledger, notifier, f"consumer {name} ")
        self._everywhere = partition_of(name, None)
        self._partitions = [f"{name}.{n}" for n in range(PARTITIONS)]
        self._held: set[str] = set()
        """the partitions that this consumer serves"""
        self._leaving: set[str] = set()
        """partitions that it gives up as soon as no message of them is under way"""
        self._claiming = asyncio.Lock()
        self.tasks = Supervisor()
        self._stored = f"consumer {name} to"
        self._hinted: CoalescedTask[str] = CoalescedTask(self._fetch, self.tasks)
        self._moves: CoalescedTask[str] = CoalescedTask(self._moved, self.tasks)
        notifier.listen(self._stored, self._hinted.want)
        notifier.listen(self._registry.held, self._moves.want)

    @property
    def living(self) -> frozenset[str]:
        """The live consumers of this name, including this one."""
        return self._registry.living

    @property
    def held(self) -> frozenset[str]:
        """The partitions that this consumer serves."""
        return frozenset(self._held)

    async def ours(self) -> list[OpenDelivery]:
        """Return the open deliveries that the engine resumes when it starts."""
        return await self._strays([*self._held, self._everywhere], "-")

    async def start(self, engine: Engine) -> None:
        """Announce this consumer, and claim partitions that no other one has."""
        self._engine = engine
        await self._notifier.start()
        await self._put(Reachable(self._everywhere))
        await self.refresh()
        self.poll(self.tasks, "the other consumers", self.refresh)

    async def leave(self) -> None:
        """Give up everything, so that the other consumers need not wait for a missing heartbeat."""
        await self.tasks.stop()
        with suppress(LedgerError, Stopped):
            for partition in [*self._held, *self._leaving]:
                await self._registry.unregister(partition)
            await self._registry.leave()
        await self._notifier.stop()

    def left(self, partition: str) -> None:
        """Hint that a message was stored for the consumer that holds this partition."""
        self._notifier.hint(self._stored, partition)

    # ── once a second, and when a hint says so ───────────────────────────────────────────────────

    async def _refresh(self) -> None:
        await self._registry.refresh()
        for partition in list(self._held):
            if self._registry.may_be_lost(partition) and not await self._registry.confirm(partition):
                await self._lose(partition)
        await self._balance()
        found = await self._strays([*self._held, self._everywhere], self._registry.me)
        if found:
            await self._put(DeliveriesFound(tuple(found)))

    async def _balance(self) -> None:
        """Give up partitions beyond a fair share, and claim free ones."""
        for partition in list(self._leaving):
            if not self._inbox.outbox.transmissions.to(partition):
                self._leaving.discard(partition)
                await self._registry.unregister(partition)
        share = self._share
        for partition in sorted(self._held)[share:]:
            await self._lose(partition)
            self._leaving.add(partition)
        await self._claim(share)

    @property
    def _share(self) -> int:
        return -(-PARTITIONS // len(self._registry.living))

    async def _claim(self, share: int) -> None:
        async with self._claiming:
            for partition in self._partitions:
                if len(self._held) >= share:
                    return
                if partition in self._held or partition in self._leaving:
                    continue
                taken = self._registry.is_at_another(partition)
                if taken or not await self._registry.claim(partition):
                    continue
                await self._take(partition)
                self._registry.end_claim(partition)

    async def _take(self, partition: str) -> None:
        """Serve a partition: its waiting messages go first, and the positions of its lanes are known."""
        marks = await self._ledger.marks(f"[{msgspec.json.encode(partition).decode()},")
        found = await self._strays([partition], self._registry.me)
        self._held.add(partition)
        await self._put(DeliveriesFound(tuple(found), marks))
        await self._put(Reachable(partition))

    async def _lose(self, partition: str) -> None:
        self._held.discard(partition)
        await self._put(Unreachable(partition))

    async def _moved(self, partitions: Collection[str]) -> None:
        for partition in partitions:
            if partition:
                await self._registry.look_up(partition)
        await self._claim(self._share)

    async def _fetch(self, partitions: Collection[str]) -> None:
        """Find what was just stored for these partitions."""
        here = self._held.intersection(partitions)
        found = await self._ledger.booked(self._inbox.channel, here) if here else []
        if found:
            await self._put(DeliveriesFound(tuple(found)))

    async def _strays(self, partitions: Collection[str], me: str) -> list[OpenDelivery]:
        """Return the open deliveries in these partitions that are not under way at a live consumer: a run
        must not be taken away from a handler that is working."""
        living = self._registry.living
        found = await self._ledger.strays(
            self._inbox.channel, here=partitions, worker=me, living=living, now=0
        )
        free = {"", self._registry.me}
        return [
            item for item in found
            if item.message.recipient in partitions
            and (item.delivery.worker in free or item.delivery.worker not in living)
        ]  # fmt: skip

    async def _put(self, event: Event) -> None:
        assert self._engine is not None
        await self._engine.put(event)
