"""Bugs to plant in windows, pushes and presence. The checkers must find every one of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from duly.apps.gateway import pushes as hub_pushes
from duly.apps.gateway.presence import ONLINE, DevicePresence
from duly.clients import push_outbox as device_pushes
from duly.clients.app import App
from duly.core.flow_control import Outstanding
from duly.core.inbox import Inbox
from duly.core.messages import FRESH, Verdict
from duly.core.ordering import Lanes
from duly.core.steps import Effect, Transmit
from duly.wire.frames import DEVICE_STATUS, Frame, ServerCode
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("done_without_faults")
def a_window_never_opens_again(patch: Patch) -> None:
    """What was acknowledged still takes its place in the window."""
    patch.setattr(Outstanding, "release", lambda self, recipient, key: False)


@breaks("settled")
def nothing_follows_an_acknowledgement(patch: Patch) -> None:
    """The window has room again, and what waits for it is not looked at."""
    finished = Lanes.finished

    def idle(self: Lanes, message: Any) -> list[Any]:
        moves = finished(self, message)
        for move in moves:
            if self._outstanding is not None:
                self._outstanding.release(move.message.recipient, move.message.key)
        return [] if self._outstanding is not None else moves

    patch.setattr(Lanes, "finished", idle)


@breaks("pushes_kept")
def a_push_is_stored_each_time(patch: Patch) -> None:
    """The hub does not look whether it has a push already."""

    async def store(self: hub_pushes.PushService, device: str, seq_id: str, kind: str, data: Any) -> Verdict:
        from duly.core.messages import key_of
        from duly.core.operations import AppendEntry

        entry = self.entry(device, kind, data)
        await self._ledger.write(AppendEntry(entry.stream, entry.body, entry.at, key_of(device, seq_id)))
        return FRESH

    patch.setattr(hub_pushes.PushService, "store_once", store)


@breaks("pushes_kept")
def a_push_is_sent_once(patch: Patch) -> None:
    """A device takes what it has sent for stored."""
    perform = device_pushes.PushOutbox._perform

    def hasty(self: device_pushes.PushOutbox, effect: Effect) -> None:
        perform(self, effect)
        if isinstance(effect, Transmit):
            self.answered(Frame("server_ack", effect.message.id, code=ServerCode.ACCEPTED))

    patch.setattr(device_pushes.PushOutbox, "_perform", hasty)


@breaks("pushes_kept")
def pushes_overtake_one_that_failed(patch: Patch) -> None:
    """After a push that could not be stored the next ones are taken."""

    async def receive(self: hub_pushes.PushService, session: Any, device: str, frame: Any) -> Verdict:
        return await self.store_once(device, frame.seq_id, frame.type, frame.data)

    patch.setattr(hub_pushes.PushService, "receive", receive)


@breaks("pushes_kept")
def restarts_sort_by_key(patch: Patch) -> None:
    """After a restart 10 comes before 9."""
    patch.setattr("duly.core.inbox.in_senders_order", list)


@breaks("presence_reported")
def presence_is_not_remembered(patch: Patch) -> None:
    """A device that comes back after its hub died is told of again."""

    async def came_online(self: DevicePresence, device: str) -> None:
        await self._pushes.store(device, DEVICE_STATUS, ONLINE)

    patch.setattr(DevicePresence, "came_online", came_online)


@breaks("settled")
def a_waiting_command_is_forgotten_at_restart(patch: Patch) -> None:
    """What waited for its turn is not put back into its lane."""
    patch.setattr(Inbox, "_queue", lambda self, message, now: [])


@breaks("informed")
def what_was_not_confirmed_is_not_asked_for(patch: Patch) -> None:
    """An app that gave up before the hub's first word came asks only for what the hub has confirmed."""
    up = App._up

    def forgetful(self: App, welcome: Frame) -> None:
        unsettled = self._unsettled
        self._unsettled = OrderedDict((key, one) for key, one in unsettled.items() if one and one.is_accepted)
        up(self, welcome)
        self._unsettled = unsettled

    patch.setattr(App, "_up", forgetful)


PLANTED = planted(
    a_window_never_opens_again, nothing_follows_an_acknowledgement, a_push_is_stored_each_time,
    a_push_is_sent_once, pushes_overtake_one_that_failed, restarts_sort_by_key,
    presence_is_not_remembered, a_waiting_command_is_forgotten_at_restart,
    what_was_not_confirmed_is_not_asked_for,
)  # fmt: skip
