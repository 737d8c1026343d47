"""The status of this node, and the will that reports that it is gone.

The law: a will names the session of its connection, since its timestamp is from the start of that connection.
"""

from __future__ import annotations

import secrets
from zlib import crc32

import msgspec

from duly.core.units import seconds
from duly.runtime.clock import Clock
from duly.transports.mqtt.session import Will
from duly.wire.fd import FdStatus
from duly.wire.fd_signatures import FdSignatures


class OwnStatus:
    """The status that this node publishes on `topic`. `identity` names the ledger behind it: a session of the
    same identity is one of this node, in this process or an earlier one."""

    def __init__(
        self, topic: str, clock: Clock, signatures: FdSignatures, identity: str, heartbeat: float
    ) -> None:
        self.topic = topic
        self.about = FdStatus()
        """what the status contains besides that the node is online"""
        self.session = ""
        """the id of the present connection; empty before the first"""
        self._clock, self._signatures = clock, signatures
        self._identity, self._heartbeat = identity, heartbeat
        self._began = clock.now()
        self.jitter = crc32(identity.encode()) % 1_000 / 1_000
        """seconds, different for each ledger: by how much this process waits longer than others"""

    def encode(self, *, online: bool) -> bytes:
        """Return the present status, encoded."""
        now = self._clock.now()
        status = msgspec.structs.replace(
            self.about,
            time=now,
            online=online,
            uptime=(now - self._began) if online else 0,
            session=self.session,
            heartbeat=seconds(self._heartbeat) if online else 0,
        )
        return self._signatures.encode(status)

    def new_will(self) -> Will:
        """Return the will of the next connection, which is a session of its own."""
        self.session = f"{self._identity}.{secrets.token_hex(4)}"
        return Will(self.topic, self.encode(online=False))

    def is_ours(self, status: FdStatus) -> bool:
        """Return whether a status is from this process, or from an earlier one with the same identity."""
        return status.session.partition(".")[0] == self._identity
