"""The progress of commands whose app and device are at different hubs.

The law: progress is not stored. It travels within the hint, as typing does in chat, and is lost with it; the
outcome of a command is in the ledger and does not depend on it. Progress that is too long for a hint is left
out, and the app learns only that the device is working.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec

from duly.apps.gateway.sessions import GatewaySessions
from duly.cluster.notifier import HintSender
from duly.core.messages import key_of, names_in
from duly.errors import Malformed
from duly.wire.fields import NOTHING, Fields

PROGRESS: Final = "progress"
"""The hint with the progress of a command: [scope, id, device, [progress] or [], fields]."""
PASSING_BYTES: Final = 3_000
"""The bytes that fit into a hint, with every character escaped."""

ShowProgress: TypeAlias = Callable[[bytes, str, msgspec.Raw, Fields], None]
"""(key of the command, device, progress, its own fields)"""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(tuple[str, str, str, list[msgspec.Raw], Fields]).decode


class SharedProgress:
    """Passes the progress of commands from hub to hub."""

    def __init__(self, notifier: HintSender, sessions: GatewaySessions) -> None:
        self._notifier = notifier
        self._sessions = sessions
        self.show: ShowProgress = _show_nothing
        """reports progress to the apps here"""
        notifier.listen(PROGRESS, self._heard)

    def hint(self, key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
        """Pass the progress of a device here on to the other hubs."""
        scope, id_ = names_in(key)
        what = _encode((scope, id_, device, [progress] if bytes(progress) else [], more))
        if len(what) > PASSING_BYTES:
            what = _encode((scope, id_, device, [], {}))
        self._notifier.hint(PROGRESS, what.decode())

    def _heard(self, what: str) -> None:
        with suppress(msgspec.DecodeError, Malformed):
            scope, id_, device, said, more = _decode(what)
            if scope in self._sessions.apps:
                self.show(key_of(scope, id_), device, said[0] if said else NOTHING, more)


def _show_nothing(key: bytes, device: str, progress: msgspec.Raw, more: Fields) -> None:
    """Do nothing: the hub has not started yet."""
