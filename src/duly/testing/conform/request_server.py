"""The frames dialect over HTTP: a `POST /v1/messages` has a frame or an array, and is answered when the
script answers.

The law: a frame that the script does not answer leaves its request open, as if the network had lost the
answer. The client's own time-out ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from aiohttp import web

from duly.testing.conform.frame_server import FrameServer, Json

_STATUS: Final = {0: 202, 1: 503, 2: 400, 3: 403, 4: 503, 5: 409}
"""The HTTP status of a hub for each code of a `server_ack`."""


class RequestServer(FrameServer):
    """A hub that its client reaches by requests: there is no lasting connection, and the hub only answers."""

    strange_answers: Sequence[str] = (
        "<html><body><h1>502 Bad Gateway</h1></body></html>",
        '{"type":"server_ack","seq_id":"no-such-event","code":0}',
    )

    def _routes(self) -> list[web.RouteDef]:
        self._open: dict[str, list[asyncio.Future[Json]]] = {}
        self._strange: deque[str] = deque()
        self._requests: list[web.Request] = []
        return [web.post("/v1/messages", self._take)]

    async def _take(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            return self._abort(request)
        text = await request.text()
        if not request.headers.get("Authorization", "").startswith("Bearer "):
            self._tried.set()
            return _response({"type": "server_ack", "code": 3, "error": "not_authenticated"}, 401)
        self._tried.set()
        self._up.set()
        self._transcript.note("<", text)
        if self._strange:
            said = self._strange.popleft()
            self._transcript.note(">", said)
            return web.Response(text=said, status=502 if said.startswith("<") else 202)
        try:
            body = msgspec.json.decode(text, type=Json | list[Json])
        except (msgspec.DecodeError, RecursionError):
            return _response({"type": "server_ack", "code": 2, "error": "malformed"}, 400)
        waiting = [self._hand_over(frame) for frame in (body if isinstance(body, list) else [body])]
        self._requests.append(request)
        try:
            answers = await asyncio.gather(*waiting)
        finally:
            self._requests.remove(request)
        if isinstance(body, list):
            return web.json_response(answers)
        code = answers[0].get("code")
        return _response(answers[0], _STATUS.get(code, 400) if isinstance(code, int) else 400)

    def _hand_over(self, frame: Json) -> asyncio.Future[Json]:
        """Pass a frame to the script; its answer comes later."""
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        seq_id = frame.get("seq_id")
        if isinstance(seq_id, str):
            self._open.setdefault(seq_id, []).append(future)
        else:
            future.set_result({"type": "server_ack", "code": 0})
        self._heard.put_nowait(frame)
        return future

    def _abort(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=503)

    def send(self, frame: Mapping[str, object]) -> None:
        """Answer the requests that wait for this id; without one it is lost."""
        waiting = self._open.pop(str(frame.get("seq_id", "")), [])
        if waiting:
            self._transcript.note(">", msgspec.json.encode(frame).decode())
        for future in waiting:
            if not future.done():
                future.set_result(dict(frame))

    def send_text(self, text: str) -> None:
        """Answer the next request with this text, whatever the request contains."""
        self._strange.append(text)

    def cut(self) -> None:
        """Break every open request without an answer."""
        self._transcript.note("!", "cut")
        self._up.clear()
        self._open.clear()
        for request in self._requests:
            self._abort(request)


def _response(frame: Mapping[str, object], status: int) -> web.Response:
    return web.Response(body=msgspec.json.encode(frame), status=status, content_type="application/json")
