"""Bugs to plant in the MQTT side of a hub, most of them found by an attack. The checkers must find every one
of them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from duly.apps.gateway.device_answers import DeviceAnswers
from duly.apps.gateway.foreign_subscriptions import ForeignSubscriptions
from duly.apps.gateway.mqtt_absences import MqttAbsences
from duly.apps.gateway.mqtt_devices import MqttDevices
from duly.apps.gateway.mqtt_presence import MqttPresence
from duly.clients.mqtt_link import MqttDeviceLink
from duly.core import acl
from duly.core.acl import PENDING, AccountClass, Act, Rule, TopicOwner
from duly.core.messages import key_of
from duly.identity.accounts import Principal, Role
from duly.runtime.fair_reader import FairReader
from duly.wire.frames import Frame
from duly.wire.task_ids import TaskIds
from tests.testing.planting import breaks, planted

Patch = pytest.MonkeyPatch


@breaks("one_outcome")
def any_device_may_answer(patch: Patch) -> None:
    """The device that answered is taken from the command, and not proven by the msg_id."""
    patch.setattr(TaskIds, "known", lambda self, task: True)
    patch.setattr(TaskIds, "fits", lambda self, task, device: True)


@breaks("one_outcome")
def an_ack_is_its_commands_device(patch: Patch) -> None:
    """Over WebSocket, too: the name of the account that sends an `ack` is not looked at."""
    take = DeviceAnswers.take

    def believe(self: DeviceAnswers, who: Principal, frame: Frame) -> bool | Awaitable[bool]:
        key = key_of(frame.to or "", frame.seq_id or "")
        command = self._inbox.outbox.transmissions.message(key)
        named = who if command is None else Principal(command.recipient, Role.DEVICE)
        return take(self, named, frame)

    patch.setattr(DeviceAnswers, "take", believe)


@breaks("nothing_unwanted")
def devices_may_command(patch: Patch) -> None:
    """The broker lets a device publish tasks, as it lets a node."""
    wider = (*acl.RULES[AccountClass.DEVICE], Rule(Act.PUBLISH, TopicOwner.ANY, PENDING))
    patch.setitem(acl.RULES, AccountClass.DEVICE, wider)


@breaks("hub_still_answers")
def bad_input_ends_the_link(patch: Patch) -> None:
    """A message that cannot be read, or was not subscribed to, raises in the reader of the link."""
    patch.setattr(MqttDevices, "arrived", MqttDevices._sort)


@breaks("hub_still_answers")
def bad_input_ends_a_reader(patch: Patch) -> None:
    """The task that handles what a device says dies of it, and what the device says next waits for ever."""

    async def serve(self: FairReader[Any], sender: str) -> None:
        queue = self._queues[sender]
        while queue:
            await self._handle(queue[0])
            queue.popleft()
        del self._queues[sender]

    patch.setattr(FairReader, "_serve", serve)


@breaks("foreign_subscriptions_removed")
def foreign_subscriptions_stay(patch: Patch) -> None:
    """What others have subscribed in the hub's session is refused, message by message, and goes on."""
    patch.setattr(ForeignSubscriptions, "end", lambda self, topic: None)


@breaks("offline_reported")
def a_repeat_is_news(patch: Patch) -> None:
    """What the broker sends again after its death counts as a word of the device."""
    patch.setattr(MqttPresence, "is_repeat", lambda self, name, session: False)
    patch.setattr(MqttPresence, "has_returned", lambda self, name: True)


@breaks("offline_reported")
def what_waited_in_the_broker_is_news(patch: Patch) -> None:
    """What a device had said before the broker died, and the hub had not heard, counts as said since."""
    patch.setattr(MqttPresence, "has_returned", lambda self, name: True)


@breaks("stays_offline")
def what_the_broker_kept_is_news(patch: Patch) -> None:
    """What a device had said before it was found to be offline counts again after a start of the hub. The
    embedded broker also tells who has connected since; an outside one does not."""
    patch.setattr(MqttAbsences, "was_said_before", lambda self, name, status, payload, retained: False)
    patch.setattr(MqttPresence, "has_returned", lambda self, name: True)


@breaks("offline_reported")
def only_wills_are_heard(patch: Patch) -> None:
    """A device is gone when the broker says so, and a broker that dies says nothing."""

    async def idle(self: MqttDevices) -> None:
        return

    patch.setattr(MqttDevices, "sweep", idle)


@breaks("online_reported")
def retained_statuses_are_asked_for_once(patch: Patch) -> None:
    """What the broker answers to a subscription counts as the newest that it has."""

    async def idle(self: MqttDevices) -> None:
        return

    patch.setattr(MqttDevices, "_ask_again", idle)


@breaks("pushes_kept")
def pushes_go_out_at_once(patch: Patch) -> None:
    """A push that its timer repeats goes out before those that wait until the link is up."""
    patch.setattr(MqttDeviceLink, "connected", property(lambda self: True))


PLANTED = planted(
    any_device_may_answer, an_ack_is_its_commands_device, devices_may_command, bad_input_ends_the_link,
    bad_input_ends_a_reader, foreign_subscriptions_stay, a_repeat_is_news,
    what_waited_in_the_broker_is_news, what_the_broker_kept_is_news,
    only_wills_are_heard, retained_statuses_are_asked_for_once, pushes_go_out_at_once,
)  # fmt: skip
