"""Ends the subscriptions that another client has planted in the hub's MQTT sessions.

The law: when a message arrives on a topic that the hub did not subscribe to, the hub unsubscribes every
filter that could match it. If the connection breaks meanwhile, the next message on that topic starts this
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import product
from typing import Final

from duly.apps.gateway.mqtt_device import DeviceLink
from duly.errors import DulyError
from duly.runtime.tasks import Supervisor

AT_ONCE: Final = 100
"""The most topics that are unsubscribed at the same time."""


class ForeignSubscriptions:
    """The foreign subscriptions in the sessions of these links; `ours` are the filters to keep."""

    def __init__(
        self, links: Callable[[], Collection[DeviceLink]], ours: Collection[str], tasks: Supervisor
    ) -> None:
        self._links = links
        self._ours = ours
        self._tasks = tasks
        self._ending: set[str] = set()

    def end(self, topic: str) -> None:
        """Start to end the subscriptions that this topic arrived by."""
        if topic not in self._ending and len(self._ending) < AT_ONCE:
            self._ending.add(topic)
            self._tasks.do("mqtt unsubscription", self._unsubscribe(topic))

    async def _unsubscribe(self, topic: str) -> None:
        filters = [each for each in _filters(topic) if each not in self._ours]
        try:
            for link in self._links():
                with suppress(DulyError):
                    await link.unsubscribe(*filters)
        finally:
            self._ending.discard(topic)


def _filters(topic: str) -> list[str]:
    """Return the filters that may have matched a topic.

    >>> _filters("a/b")
    ['a/b', 'a/+', '+/b', '+/+', '#', 'a/#', '+/#', 'a/b/#', 'a/+/#', '+/b/#', '+/+/#']
    """
    levels = topic.split("/")
    if len(levels) > 4:
        return [topic, "#"]
    whole = ["/".join(each) for each in product(*((level, "+") for level in levels))]
    below = [
        "/".join([*each, "#"])
        for n in range(len(levels) + 1)
        for each in product(*((level, "+") for level in levels[:n]))
    ]
    return [*whole, *below]
