"""Accepts CloudEvents by `POST /v1/cloudevents`: one in structured or binary mode, or a batch.

The law: 2xx means stored, also for an event that was stored before. 429 and 503 mean that the sender should
send the same event again, and say when; after any other answer a repeat does not help.
"""

from __future__ import annotations

from aiohttp import web

from duly.identity.accounts import Principal
from duly.transports.http import bodies, messages
from duly.transports.http.fast_path import LATER, FastAnswer
from duly.transports.http.frame_batches import FrameBatch, WaitingRequest, hand_over
from duly.transports.http.query_options import seconds_in
from duly.wire import outgoing
from duly.wire.cloud_events import frame_of, read_events
from duly.wire.frames import ServerCode


def routes(server: messages.MessagesBackend) -> list[web.RouteDef]:
    """Return the route of events."""
    guarded = messages.MessagesEndpoint(server).guarded
    return [web.post("/v1/cloudevents", guarded(CloudEventsEndpoint(server).post))]


class CloudEventsEndpoint:
    """Accepts the events of one hub; permissions are those of any frame."""

    def __init__(self, server: messages.MessagesBackend) -> None:
        self._server = server

    async def post(self, request: web.Request, who: Principal) -> web.Response:
        """Take an event or a batch, and answer with a `server_ack` for each."""
        wait = seconds_in(request.query.get("wait"))
        headers = {name.lower(): value for name, value in request.headers.items()}
        batch = await self._take(who, headers, await bodies.read(request), wait)
        bodies.give_back(request)
        if wait:
            await batch.ended(wait)
        if batch.single:
            return messages.response(_said(batch.waiters[0]))
        answers = [_said(waiter) for waiter in batch.waiters] or [FastAnswer(200, b"")]
        worst = max(answers, key=lambda said: said.status)
        body = b"[" + b",".join(outgoing.encode(waiter.answer) for waiter in batch.waiters) + b"]"
        return messages.response(FastAnswer(worst.status, body, worst.later))

    async def _take(self, who: Principal, headers: dict[str, str], raw: bytes, wait: float) -> FrameBatch:
        """Hand the events of a body to the hub. When this returns the body is no longer kept."""
        events = read_events(headers, raw)
        if not isinstance(events, list):
            return await hand_over(self._server, who, [frame_of(events)], wait)
        frames = [frame_of(event) for event in events]
        return await hand_over(self._server, who, frames, wait, single=False)


def _said(waiter: WaitingRequest) -> FastAnswer:
    """Return the answer to one event."""
    said = messages.answer_to(waiter, wait=1.0)
    if waiter.answer.code == ServerCode.OFFLINE:
        return FastAnswer(503, said.body, said.later or LATER)
    return said
