"""The page behind the link of a notification: it shows the alert, and a button that acknowledges it.

The link itself authenticates the caller, so the page needs no session, cookie or script. Opening it changes
nothing, since mail programs open links for previews; only the button does. The stored name is the recipient
that the link was made for.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from aiohttp import web

from duly.apps.alerts.ack_links import PATH, AckClaim
from duly.apps.alerts.alert_queries import AlertRecord, show
from duly.apps.alerts.model import AlertState
from duly.apps.alerts.notifications import moment
from duly.core.messages import names_in
from duly.errors import DulyError, Malformed, NotAllowed
from duly.server.dashboard.requests import FRESH
from duly.transports.http import bodies

if TYPE_CHECKING:
    from duly.server.audit_chain import AuditChain
    from duly.server.hub import Hub

_HEADS: Final = FRESH | {"Referrer-Policy": "same-origin"}
"""Without a referrer a browser sends a form with the origin `null`, which is refused."""
_ENGLISH: Final = {
    "lang": "en",
    "title": "Alert",
    "happened": "Happened",
    "sentinel": "Sentinel",
    "device": "Device",
    "severity": "Severity",
    "recipient": "Sent to",
    "ack": "Acknowledge",
    "done": "Acknowledged. Thank you.",
    "again": "This alert was acknowledged already (by {by}).",
    "over": "This alert is over; nothing is left to do.",
    "hint": "Acknowledging tells everyone concerned that you take care of it, and stops further escalation.",
    "sorry": "This did not work",
}
_CHINESE: Final = {
    "lang": "zh",
    "title": "告警",
    "happened": "发生时间",
    "sentinel": "哨兵",
    "device": "设备",
    "severity": "级别",
    "recipient": "发送给",
    "ack": "确认",
    "done": "已确认，谢谢。",
    "again": "这条告警此前已经确认过（操作者 {by}）。",
    "over": "这条告警已经结束，无需再处理。",
    "hint": "确认表示由您负责处理，相关人员会看到，后续升级通知也会停止。",
    "sorry": "操作未能完成",
    "info": "提示",
    "warning": "警告",
    "critical": "严重",
    "this link is incomplete; copy the whole link from the notification": "链接不完整；请从通知中完整复制",
    "this link is not valid; copy the whole link from the notification": "链接无效；请从通知中完整复制",
    "this link has expired; acknowledge the alert on the dashboard": "链接已过期；请在页面上确认这条告警",
    "this hub does not make such links; use the dashboard": "这个中枢不提供这种链接；请使用页面",
    "this alert is no longer known; it was forgotten": "这条告警已无记录",
}
"""The Chinese texts: words, severities, and the sentences that refuse a link. English needs no table."""


class AckPage:
    """Serves the links of one hub's notifications."""

    def __init__(self, hub: Hub, audit: AuditChain) -> None:
        self._hub = hub
        self._audit = audit

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the links."""
        return [web.get(PATH, self._show), web.post(PATH, self._acknowledge)]

    async def _show(self, request: web.Request) -> web.Response:
        words = _words(request)
        try:
            claim, alert = await self._asked(request.query.get("t", ""))
        except DulyError as problem:
            return _problem(words, problem)
        if alert.status.standing.over:
            return _page(words, alert, claim, words["over"])
        if alert.status.standing is AlertState.ACKNOWLEDGED:
            return _page(words, alert, claim, words["again"].format(by=alert.status.by))
        return _page(words, alert, claim, "", request.query["t"])

    async def _acknowledge(self, request: web.Request) -> web.Response:
        words = _words(request)
        try:
            raw = await bodies.read(request, guest=True)
            field, _, token = raw.decode("ascii", errors="replace").partition("=")
            if field != "t":
                raise Malformed("the form has no link; open the link from the notification again")
            claim, alert = await self._asked(token.strip())
            if alert.status.standing.over:
                return _page(words, alert, claim, words["over"])
            if alert.status.standing is AlertState.ACKNOWLEDGED:
                return _page(words, alert, claim, words["again"].format(by=alert.status.by))
            operations = self._hub.alerts.operations
            status = await operations.say(alert, AlertState.ACKNOWLEDGED, claim.recipient, "by the link")
            scope, id_ = names_in(claim.key)
            await self._audit.add(claim.recipient, "recipient", "alert.ack", f"{scope} {id_}", "by the link")
        except DulyError as problem:
            return _problem(words, problem)
        done = status.by == claim.recipient
        said = words["done"] if done else words["again"].format(by=status.by)
        return _page(words, await operations.get(claim.key) or alert, claim, said)

    async def _asked(self, token: str) -> tuple[AckClaim, AlertRecord]:
        links = self._hub.alerts.links
        if links is None:
            raise NotAllowed("this hub does not make such links; use the dashboard")
        claim = links.read(token, self._hub.ledger.clock.now())
        alert = await self._hub.alerts.operations.get(claim.key)
        if alert is None:
            raise Malformed("this alert is no longer known; it was forgotten")
        return claim, alert


def _words(request: web.Request) -> dict[str, str]:
    return _CHINESE if request.headers.get("Accept-Language", "").lower().startswith("zh") else _ENGLISH


def _said(words: dict[str, str], text: str) -> str:
    """Return a word or sentence of the hub in the language of the page, if there is a translation."""
    return words.get(text, text)


def _page(
    words: dict[str, str], alert: AlertRecord, claim: AckClaim, said: str, token: str = ""
) -> web.Response:
    seen = show(alert)
    message = alert.record.message
    rows = {
        words["happened"]: moment(message.time, "UTC"),
        words["severity"]: _said(words, str(seen["severity"])),
        words["sentinel"]: message.scope,
        words["device"]: str(seen["device"] or "–"),
        words["recipient"]: claim.recipient,
    }
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    form = (
        f'<p class="muted">{escape(words["hint"])}</p><form method="post" action="{PATH}">'
        f'<input type="hidden" name="t" value="{escape(token)}">'
        f'<button class="button primary large" type="submit">{escape(words["ack"])}</button></form>'
        if token
        else f'<p class="notice" role="status">{escape(said)}</p>'
    )
    return _html(words, str(seen["reason"]), f'<dl class="facts">{facts}</dl>{form}')


def _problem(words: dict[str, str], problem: DulyError) -> web.Response:
    text = f'<p class="notice bad" role="alert">{escape(_said(words, str(problem)))}</p>'
    return _html(words, words["sorry"], text, 403 if isinstance(problem, NotAllowed) else 404)


def _html(words: dict[str, str], heading: str, body: str, status: int = 200) -> web.Response:
    text = (
        f'<!doctype html><html lang="{words["lang"]}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(words['title'])} · duly</title>"
        '<link rel="stylesheet" href="/static/app.css"><link rel="icon" href="/static/icon.svg"></head>'
        f'<body class="card-page"><main class="card"><p class="eyebrow">{escape(words["title"])}</p>'
        f"<h1>{escape(heading)}</h1>{body}</main></body></html>"
    )
    return web.Response(text=text, status=status, content_type="text/html", headers=_HEADS)
