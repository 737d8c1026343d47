"""Checks how a node sends tasks of its own.

Its action `relay` sends `count` to the node `peer`, and its result says how that ended:
`{"state": "done", "value": {"count": N}}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from duly.testing.conform.frame_server import now_ms
from duly.testing.conform.mqtt_server import MqttMessage, MqttServer
from duly.testing.conform.receiver import ConformTask, HeardAnswer
from duly.testing.conform.rules import BrokenRule, NotChecked
from duly.wire.fd import FdKind

RELAY: Final = "relay"
PEER: Final = "peer"
SENT_WITHIN: Final = 3.0
SENT_AGAIN_WITHIN: Final = 15.0
ENDED_WITHIN: Final = 10.0
QUIET: Final = 0.5


class RelayedTasks:
    """Asks a node to relay tasks, and plays the peer that they are for. `deliver` sends the node a task,
    `answer` returns its next answer, and `published` is where its own tasks are put."""

    def __init__(
        self,
        server: MqttServer,
        node: str,
        deliver: Callable[[ConformTask], None],
        answer: Callable[[float], Awaitable[HeardAnswer | None]],
    ) -> None:
        self._server = server
        self._node = node
        self._deliver = deliver
        self._answer = answer
        self._asked: ConformTask | None = None
        self.published: list[dict[str, object]] = []

    def take(self, message: MqttMessage) -> None:
        """Take a task that the node has sent."""
        try:
            task = msgspec.json.decode(message.payload, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as problem:
            raise BrokenRule("resends", f"{message.topic} cannot be read: {problem}") from None
        if not isinstance(task.get("msg_id"), str):
            raise BrokenRule("resends", f"a task needs a `msg_id`: {task}")
        self.published.append(task)

    async def check_resends(self, rule: str) -> None:
        """Prove that an unanswered task is sent again, unchanged."""
        first = await self._relayed()
        again = await self._next(SENT_AGAIN_WITHIN)
        if again is None:
            raise BrokenRule(
                rule, f"{first['msg_id']} was not answered, and not sent again in {SENT_AGAIN_WITHIN:g} s"
            )
        different = [
            name for name in ("msg_id", "action", "payload", "exp") if first.get(name) != again.get(name)
        ]
        if different:
            raise BrokenRule(
                rule, f"another {', '.join(different)} was sent than before: {again}, before {first}"
            )
        self._say(FdKind.ACK, first)
        self._say(FdKind.COMPLETE, first, value={"count": 1})
        await self._ended(rule, "done", first)

    async def check_first_end(self, rule: str) -> None:
        """Prove that an answer to another task ends nothing, that a result may come without `ack`, and that
        the first result stands."""
        task = await self._relayed()
        self._say(FdKind.COMPLETE, {"msg_id": "no-such-task"}, value={"count": 7})
        if await self._outcome(QUIET) is not None:
            raise BrokenRule(rule, f"the answer to another task ended {task['msg_id']}")
        self._say(FdKind.COMPLETE, task, value={"count": 1})
        self._say(FdKind.FAILED, task, error={"code": 3})
        await self._ended(rule, "done", task)
        task = await self._relayed()
        self._say(FdKind.ACK, task)
        self._say(FdKind.FAILED, task, error={"code": 3})
        self._say(FdKind.COMPLETE, task, value={"count": 1})
        await self._ended(rule, "failed", task)

    async def _relayed(self) -> dict[str, object]:
        """Return a task that the node has sent because it was asked to."""
        self._asked = ConformTask("asker", f"relay-{now_ms()}", RELAY, {"to": PEER}, now_ms() + 120_000)
        self.published.clear()
        self._deliver(self._asked)
        found = await self._next(SENT_WITHIN)
        if found is None:
            raise NotChecked(f"the node has no action `{RELAY}` that sends a task to `{PEER}`")
        return found

    async def _next(self, seconds: float) -> dict[str, object] | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self.published and loop.time() < until:
            await self._answer(min(0.05, max(0.0, until - loop.time())))
        return self.published.pop(0) if self.published else None

    def _say(self, kind: FdKind, task: dict[str, object], **more: object) -> None:
        message = msgspec.json.encode({"msg_id": task["msg_id"], **more})
        self._server.publish(f"nodes/{self._node}/{kind}", message)

    async def _outcome(self, seconds: float) -> HeardAnswer | None:
        """Return how the task that the node was asked to relay has ended."""
        asked = self._asked
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while asked is not None and (left := until - loop.time()) > 0:
            answer = await self._answer(left)
            if answer is not None and answer.code is not None and (answer.sender, answer.id) == asked.key:
                return answer
        return None

    async def _ended(self, rule: str, state: str, task: dict[str, object]) -> None:
        answer = await self._outcome(ENDED_WITHIN)
        if answer is None:
            raise BrokenRule(rule, f"the node does not say how {task['msg_id']} ended")
        said = answer.data.get("state") if isinstance(answer.data, dict) else None
        if said != state:
            raise BrokenRule(rule, f"the node says that {task['msg_id']} ended as {said!r}, not {state!r}")
