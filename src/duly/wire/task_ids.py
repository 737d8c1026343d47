"""The `msg_id` of a task that the hub gives an MQTT device: `{app}:{seq_id}:{tag}`.

The law: only the device that got a task can answer it. Every device may publish to the hub's answer topics,
and the broker does not report who did, so the tag proves it. It is computed with a secret that all hubs on
one ledger share, so the same command has the same msg_id however often, and from whichever hub, it is sent,
and a device recognises a repeat. The tag has two halves, both in base64: one binds it to the command, so that
guesses are detected without reading the ledger; the other binds it to the command and the device.
"""

from __future__ import annotations

import base64
import hmac
import re
from typing import Final

import msgspec
from msgspec import Struct

from duly.core.signing import canonical
from duly.errors import Malformed
from duly.wire import limits

SECRET_SIZE: Final = 32
_COMMAND: Final = 9
_DEVICE: Final = 9
"""The bytes of either half; 12 characters each."""
_TAG: Final = re.compile(r"[A-Za-z0-9_-]{24}")


class TaskId(Struct, frozen=True):
    """The parts of a msg_id; `tag` is empty if there is none."""

    app: str
    seq_id: str
    tag: str


class _AnswerId(Struct):
    """An answer of which only the msg_id is read."""

    msg_id: str | None = None
    message_id: str | None = None


_read_name: Final = msgspec.json.Decoder(_AnswerId).decode


def answered_id(text: bytes) -> str:
    """Return the msg_id in an answer. Nothing else of it is read: it may be long, and forged.

    >>> answered_id(b'{"msg_id": "phone:1700_4", "value": "..."}')
    'phone:1700_4'
    """
    limits.check(text, "an answer")
    try:
        named = _read_name(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as problem:
        raise Malformed(f"not an FD message: {str(problem)[:200]}") from None
    return named.msg_id or named.message_id or ""


def read_task_id(msg_id: str) -> TaskId:
    """Return the parts of a hub's msg_id, without verifying them.

    >>> read_task_id("phone:1700_4:AAAAAAAAAAAAAAAAAAAAAAAA")
    TaskId(app='phone', seq_id='1700_4', tag='AAAAAAAAAAAAAAAAAAAAAAAA')
    >>> read_task_id("phone:1700_4").tag
    ''
    """
    app, colon, rest = msg_id.partition(":")
    if not colon:
        raise Malformed(f"{msg_id[:80]!r} is not a task of a hub; answer with the msg_id of the task")
    seq_id, colon, tag = rest.rpartition(":")
    if not colon or not _TAG.fullmatch(tag):
        return TaskId(app, rest, "")
    return TaskId(app, seq_id, tag)


class TaskIds:
    """Creates and checks task ids with the hubs' secret.

    >>> ids = TaskIds(bytes(32))
    >>> task = read_task_id(ids.mint("lock", "phone", "1700_4"))
    >>> ids.known(task), ids.fits(task, "lock"), ids.fits(task, "lamp")
    (True, True, False)
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def mint(self, device: str, app: str, seq_id: str) -> str:
        """Return the msg_id under which a device gets a command."""
        return f"{app}:{seq_id}:{self._tag('', app, seq_id)}{self._tag(device, app, seq_id)}"

    def known(self, task: TaskId) -> bool:
        """Return whether a hub has given this command this tag, for any device."""
        return hmac.compare_digest(task.tag[:12], self._tag("", task.app, task.seq_id))

    def fits(self, task: TaskId, device: str) -> bool:
        """Return whether a hub has given this device this command, if it is `known`."""
        return hmac.compare_digest(task.tag[12:], self._tag(device, task.app, task.seq_id))

    def _tag(self, device: str, app: str, seq_id: str) -> str:
        text = canonical(("duly-task-1", device, app, seq_id))
        size = _DEVICE if device else _COMMAND
        return base64.urlsafe_b64encode(hmac.digest(self._secret, text, "sha256")[:size]).decode()
