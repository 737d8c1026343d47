"""Accepts alerts from Prometheus Alertmanager and Grafana by webhook.

The law: 2xx means that every alert of the webhook is stored. If one of them could not be stored for a
temporary reason, the answer is 503, and the sender sends the whole webhook again: stored alerts are then
repeats. An alert that will never be accepted is answered with 400 and the reason, which Alertmanager logs.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

from aiohttp import web

from duly.core.messages import key_of
from duly.core.units import SECOND
from duly.errors import DulyError, NotAllowed
from duly.identity.accounts import Principal, Role
from duly.transports.http import bodies, messages
from duly.transports.http.fast_path import LATER
from duly.transports.http.frame_batches import hand_over
from duly.transports.http.schemas import RefusedAlert, WebhookReport
from duly.wire.alertmanager import (
    FiringAlert,
    FiringState,
    event_frame,
    read_alert,
    resolved_frame,
    split_webhook,
)
from duly.wire.frames import ServerCode
from duly.wire.outgoing import ServerAck

T = TypeVar("T")

DEFAULT_PROFILE: Final = "default"
ALERTMANAGER: Final = "/v1/alertmanager"
GRAFANA: Final = "/v1/grafana"
TURN_ALERTS: Final = 200
"""How many alerts of a webhook are handled in one turn of the event loop."""
_CONFLICT: Final = "id_conflict"
_PASSING: Final = (ServerCode.INTERNAL, ServerCode.OFFLINE)


def routes(server: messages.MessagesBackend) -> list[web.RouteDef]:
    """Return the routes of the webhooks. Grafana sends them by POST or by PUT, as its contact point says."""
    serve = AlertWebhooks(server).serve
    return [web.post(ALERTMANAGER, serve), web.post(GRAFANA, serve), web.put(GRAFANA, serve)]


class AlertWebhooks:
    """Takes the webhooks of one hub; the account that authenticates is the sentinel that reports."""

    def __init__(self, server: messages.MessagesBackend) -> None:
        self._server = server

    async def serve(self, request: web.Request) -> web.Response:
        """Take one webhook, and answer when its alerts are stored."""
        try:
            who = await messages.entered(self._server, request, _token(request))
            if who.role not in (Role.SENTINEL, Role.ADMIN):
                raise NotAllowed(
                    f"{who.name} is {who.role.with_article} and may not report alerts; use the token of "
                    "'duly add sentinel NAME'"
                )
            parts = split_webhook(await bodies.read(request))
            alerts = [
                read_alert(part, f"alert {n} of {len(parts)}")
                async for n, part in _in_turns(enumerate(parts, 1))
            ]
            profile = request.query.get("profile") or DEFAULT_PROFILE
            return await self._take(who, alerts, profile)
        except DulyError as trouble:
            return messages.problem(trouble)

    async def _take(self, who: Principal, alerts: list[FiringAlert], profile: str) -> web.Response:
        ledger, counts = self._server.ledger, Counter[str]()
        now = ledger.clock.now()
        frames: list[bytes] = []
        named: list[FiringAlert] = []
        async for alert in _in_turns(alerts):
            known = await ledger.find(key_of(who.name, alert.id))
            fires = alert.status is FiringState.FIRING
            if (known is not None) is fires:
                counts["repeated" if fires else "ignored"] += 1
                continue
            frames.append(event_frame(alert, profile, now) if fires else resolved_frame(alert))
            named.append(alert)
        refused: list[RefusedAlert] = []
        passing: ServerAck | None = None
        if frames:
            batch = await hand_over(self._server, who, frames)
            for alert, waiter in zip(named, batch.waiters, strict=True):
                said = waiter.answer
                if said.code == ServerCode.ACCEPTED:
                    counts["accepted" if alert.status is FiringState.FIRING else "resolved"] += 1
                elif said.code == ServerCode.DUPLICATE or said.error == _CONFLICT:
                    counts["repeated"] += 1  # it came twice at once, maybe with other annotations
                else:
                    passing = said if said.code in _PASSING else passing
                    refused.append(RefusedAlert(alert.id, said.error or "", said.detail or ""))
        if passing is not None:
            wait = round((passing.retry_after or LATER) * SECOND)
            return messages.error(503, passing.error or "internal", passing.detail or "try again", wait)
        return messages.as_json(WebhookReport(**counts, refused=refused), 400 if refused else 200)


async def _in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items of a webhook, with turns of other tasks between them."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % TURN_ALERTS:
            await asyncio.sleep(0)


def _token(request: web.Request) -> str | None:
    """Return the token in the head of a request; of Basic authentication it is the password."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return messages.token_in(request)
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2] or None
    except ValueError:  # no ASCII, no base64, or no UTF-8 in it
        return None
