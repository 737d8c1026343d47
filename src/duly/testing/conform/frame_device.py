"""Plays the hub of a device over WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from duly.testing.conform.frame_server import UNREADABLE, FrameServer, now_ms
from duly.testing.conform.heard_pushes import HeardPushes
from duly.testing.conform.receiver import OWN_FIELDS, ConformTask, HeardAnswer
from duly.testing.conform.rules import BrokenRule, NotChecked

PONG_WITHIN: Final = 10.0
_NONSENSE: Final = (
    *UNREADABLE,
    '{"type":"gap","from":"no-such-device","after":1,"first":2}',
    '{"type":"server_ack","seq_id":"1_1","code":0}',
    '{"type":"server_ack","seq_id":"1_1"}',
    '{"type":"count","seq_id":17,"from":"phone","data":{}}',
    '{"type":"count","from":"phone","data":{}}',
    '{"type":"count","seq_id":"1_2","from":"phone","exp":1,"order":{"key":"door","after":"first"}}',
    '{"type":"count","seq_id":"1_3","from":"phone","exp":"soon","data":{}}',
    '{"type":"count","seq_id":"1_4","from":"phone","exp":9999999999999',
    '{"type":"no_such_frame","data":' + "[" * 30 + "]" * 30 + "}",
)


class FrameDevicePeer:
    """Passes commands on as frames, and reads a device's `ack`s and pushes."""

    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self._pushes = HeardPushes(self.deliver, self.answer, self._acknowledge, self._cut_and_connect)

    async def connected(self) -> None:
        """Wait until the device is connected."""
        await self._server.connected()

    def deliver(self, task: ConformTask) -> None:
        """Pass a command on."""
        frame: dict[str, object] = {
            "type": task.type,
            "seq_id": task.id,
            "to": "device",
            "from": task.sender,
            "exp": task.exp,
        }
        if not task.bare:
            frame["data"] = task.data
        if task.lane is not None:
            frame["order"] = {"key": task.lane, "mode": "replay", "after": task.after}
        elif task.order is not None:
            frame["order"] = task.order
        self._server.send(frame | (OWN_FIELDS if task.own_fields else {}))

    async def answer(self, seconds: float) -> HeardAnswer | None:
        """Return the next `ack`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (frame := await self._server.hear(max(0.0, until - loop.time()))) is not None:
            seq_id = frame.get("seq_id")
            if frame.get("type") == "ack":
                return self._read(frame)
            if isinstance(seq_id, str):
                self._pushes.note(seq_id)
        return None

    def _read(self, frame: dict[str, object]) -> HeardAnswer:
        to, seq_id, code = frame.get("to"), frame.get("seq_id"), frame.get("code")
        if not isinstance(seq_id, str) or not isinstance(to, str):
            raise BrokenRule(
                "answers", f"an ack needs the command's `seq_id`, and its `from` as `to`: {frame}"
            )
        if code is None and frame.get("state") != "delivered":
            raise BrokenRule("answers", f"an ack needs a `code`, or the state `delivered`: {frame}")
        if code is not None and (not isinstance(code, int) or isinstance(code, bool)):
            raise BrokenRule("answers", f"the code of an ack is a number: {frame}")
        return HeardAnswer(to, seq_id, code, frame.get("data"), frame)

    def cut(self) -> None:
        """Break the connection."""
        self._server.cut()

    async def _cut_and_connect(self) -> None:
        self._server.cut()
        await self._server.connected()

    def _acknowledge(self, seq_id: str) -> None:
        self._server.send({"type": "server_ack", "seq_id": seq_id, "code": 0})

    def send_nonsense(self) -> None:
        """Send frames that cannot be decoded; their ids are new: a receiver passes over old ones."""
        for text in _NONSENSE:
            self._server.send_text(text.replace("1_", f"{now_ms()}_"))

    def check_kind(self, task: ConformTask, answers: Sequence[HeardAnswer]) -> None:
        """Check nothing: frames have one form only."""

    async def inspect(self, rule: str) -> None:
        """Prove `answers-pings` and `keeps-pushes`."""
        match rule:
            case "answers-pings":
                if not await self._server.answers_ping(PONG_WITHIN):
                    raise BrokenRule(rule, f"a ping was not answered within {PONG_WITHIN:g} s")
            case "keeps-pushes":
                await self._pushes.check(rule)
            case _:
                raise NotChecked("it is a rule of MQTT, and this device uses WebSocket")
