"""The MQTT version of each broker, as far as this process has found out (docs/adr/0072).

The laws. An address that names a version is connected to with that one. Every other broker is tried with MQTT
5 first; one that refuses it, or disconnects and then accepts 3.1.1, is tried with 3.1.1 for an hour. So a
broker that does not speak MQTT 5 costs one more connection attempt, and a broker that was upgraded is
noticed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, TypeAlias

from duly.transports.mqtt.address import BrokerAddress

REMEMBERED: Final = 3_600.0
"""Seconds for which a broker counts as speaking only MQTT 3.1.1."""

BROKERS: Final = 1_024
"""How many brokers are remembered."""

_Place: TypeAlias = tuple[str, int, bool, str]


class BrokerVersions:
    """The brokers that do not speak MQTT 5."""

    def __init__(self) -> None:
        self._old: OrderedDict[_Place, float] = OrderedDict()
        """until when each broker is tried with MQTT 3.1.1, on the loop's clock"""

    def to_try(self, address: BrokerAddress) -> tuple[int, ...]:
        """Return the versions to try with a broker, in order."""
        if address.version is not None:
            return (address.version,)
        until = self._old.get(_place(address), 0.0)
        remaining = until - asyncio.get_running_loop().time()
        return (3,) if 0 < remaining <= REMEMBERED else (5, 3)

    def speaks_only_3(self, address: BrokerAddress) -> None:
        """Remember that a broker speaks only 3.1.1."""
        self._old[_place(address)] = asyncio.get_running_loop().time() + REMEMBERED
        if len(self._old) > BROKERS:
            self._old.popitem(last=False)


VERSIONS: Final = BrokerVersions()
"""The versions known to all links of this process."""


def _place(address: BrokerAddress) -> _Place:
    return (address.host, address.port, address.tls, address.path)
