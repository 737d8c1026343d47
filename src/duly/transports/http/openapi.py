"""The OpenAPI document of the hub's HTTP interface.

The law: the shapes of bodies are generated from the types that decode and encode them; paths, parameters and
statuses are written here, and a test compares the paths with the routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from duly.transports.http.schemas import (
    Credentials,
    ErrorAnswer,
    LogoutRequest,
    PasswordChange,
    WebhookReport,
)
from duly.wire.alertmanager import AlertmanagerWebhook
from duly.wire.cloud_events import BATCH, STRUCTURED, CloudEvent
from duly.wire.frames import Frame
from duly.wire.outgoing import AnsweredServerAck
from duly.wire.schemas import describable

WAIT_LIMIT: Final = 300.0
"""Seconds that a request may wait for the final answer."""
_REF: Final = "#/components/schemas/{name}"


_SCHEMAS: Final = msgspec.json.schema_components(
    [
        *(describable(one) for one in (Frame, AnsweredServerAck, CloudEvent, Credentials, LogoutRequest)),
        *(describable(one) for one in (PasswordChange, ErrorAnswer)),
        AlertmanagerWebhook,
        WebhookReport,
    ],
    ref_template=_REF,
)[1]
_SCHEMAS["Frame"]["additionalProperties"] = {
    "description": "passed on untouched; part of what the id stands for"
}

_WORDS: Final = {
    200: "done", 201: "made", 202: "accepted and stored", 400: "malformed, stale or expired",
    401: "not authenticated", 403: "not allowed", 404: "not known", 409: "the first run is still going",
    413: "too large", 422: "the same id with other content", 429: "too much: wait as long as it says",
    503: "try again",
}  # fmt: skip


def _json(schema: Mapping[str, object]) -> dict[str, object]:
    return {"application/json": {"schema": schema}}


def _ref(type_: type) -> dict[str, object]:
    return {"$ref": _REF.format(name=type_.__name__)}


_FRAMES: Final = {"anyOf": [_ref(Frame), {"type": "array", "items": _ref(Frame)}]}
_ACKS: Final = {"anyOf": [_ref(AnsweredServerAck), {"type": "array", "items": _ref(AnsweredServerAck)}]}


def _answers(*statuses: int) -> dict[str, object]:
    """Return the answers of a request that sends no frame."""
    return {
        str(status): {"description": _WORDS[status]}
        | ({"content": _json(_ref(ErrorAnswer))} if status >= 400 else {})
        for status in statuses
    }


def _said_of_frames(*statuses: int) -> dict[str, object]:
    """Return the answers to frames: a `server_ack`, with the `ack` in it if that was waited for; or an
    error."""
    either = {"anyOf": [*_ACKS["anyOf"], _ref(ErrorAnswer)]}
    return {
        str(status): {"description": _WORDS[status], "content": _json(_ACKS if status < 400 else either)}
        for status in statuses
    }


def _account(summary: str, status: int, body: type) -> dict[str, object]:
    answers = _answers(status, 400, 401, 403)
    return {"summary": summary, "requestBody": {"content": _json(_ref(body))}, "responses": answers}


def _webhook(sender: str) -> dict[str, object]:
    """Return the route of a webhook that reports alerts; Basic authentication carries the token as its
    password."""
    report = {"content": _json(_ref(WebhookReport))}
    either = {"content": _json({"anyOf": [_ref(WebhookReport), _ref(ErrorAnswer)]})}
    return {
        "summary": f"Alerts that fire or are resolved, as {sender} sends them",
        "security": [{"token": []}, {"password": []}],
        "parameters": [{"name": "profile", "in": "query", "schema": {"type": "string"}}],
        "requestBody": {"required": True, "content": _json(_ref(AlertmanagerWebhook))},
        "responses": _answers(401, 403, 413, 503)
        | {"200": {"description": "all are stored"} | report}
        | {"400": {"description": _WORDS[400]} | either},
    }


OPENAPI: Final[dict[str, object]] = {
    "openapi": "3.1.0",
    "info": {"title": "duly", "version": "1", "description": "Commands that take effect once."},
    "components": {
        "schemas": _SCHEMAS,
        "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer"},
            "password": {"type": "http", "scheme": "basic"},
        },
    },
    "security": [{"token": []}],
    "paths": {
        "/v1/messages": {
            "post": {
                "summary": "Send one frame, or an array of frames",
                "parameters": [
                    {"name": "wait", "in": "query", "schema": {"type": "number", "maximum": WAIT_LIMIT}},
                    {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}},
                ],
                "requestBody": {"required": True, "content": _json(_FRAMES)},
                "responses": _said_of_frames(200, 202, 400, 401, 403, 409, 413, 422, 429, 503),
            },
            "get": {
                "summary": "Messages, newest first by the time in their ids or, if these have none, of their "
                "acceptance, by page; or those with one id",
                "parameters": [
                    {"name": name, "in": "query", "schema": {"type": kind}}
                    for name, kind in (("limit", "integer"), ("before", "string"), ("id", "string"))
                ],
                "responses": _answers(200, 400, 401),
            },
        },
        "/v1/messages/{scope}/{id}": {
            "get": {
                "summary": "The outcome and the trace of one message",
                "parameters": [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in ("scope", "id")
                ],
                "responses": _answers(200, 401, 404),
            }
        },
        "/v1/refusals": {
            "get": {
                "summary": "Why nothing happened, newest first, by page",
                "parameters": [
                    {"name": name, "in": "query", "schema": {"type": kind}}
                    for name, kind in (("limit", "integer"), ("before", "string"))
                ],
                "responses": _answers(200, 400, 401),
            }
        },
        "/v1/devices": {
            "get": {
                "summary": "Your devices by name: online, and when each was last heard (ms), by page",
                "parameters": [
                    {"name": name, "in": "query", "schema": {"type": kind}}
                    for name, kind in (("limit", "integer"), ("after", "string"))
                ],
                "responses": _answers(200, 400, 401, 403),
            }
        },
        "/v1/alerts": {
            "get": {
                "summary": "Alerts, newest first, by page: a sentinel's own, or for an admin all",
                "parameters": [
                    {"name": name, "in": "query", "schema": {"type": kind}}
                    for name, kind in (
                        ("status", "string"),
                        ("sentinel", "string"),
                        ("limit", "integer"),
                        ("before", "string"),
                    )
                ],
                "responses": _answers(200, 400, 401, 403),
            }
        },
        "/v1/alerts/{sentinel}/{event}": {
            "get": {
                "summary": "One alert with its deliveries",
                "parameters": [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in ("sentinel", "event")
                ],
                "responses": _answers(200, 401, 403, 404),
            }
        },
        "/v1/alertmanager": {"post": _webhook("Prometheus Alertmanager")},
        "/v1/grafana": {"post": _webhook("Grafana"), "put": _webhook("Grafana")},
        "/v1/cloudevents": {
            "post": {
                "summary": "Send an event of CloudEvents 1.0, structured or binary, or a batch",
                "parameters": [
                    {"name": "wait", "in": "query", "schema": {"type": "number", "maximum": WAIT_LIMIT}},
                    {"name": "ce-specversion", "in": "header", "schema": {"type": "string"}},
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        STRUCTURED: {"schema": _ref(CloudEvent)},
                        BATCH: {"schema": {"type": "array", "items": _ref(CloudEvent)}},
                        "application/json": {"schema": {"description": "the data, in binary mode"}},
                    },
                },
                "responses": _said_of_frames(200, 202, 400, 401, 403, 413, 422, 503),
            }
        },
        "/v1/people": {"post": _account("Register a person", 201, Credentials)},
        "/v1/login": {"post": _account("A token for one more device", 200, Credentials)},
        "/v1/logout": {"post": _account("End this login, or all of yours", 200, LogoutRequest)},
        "/v1/password": {"post": _account("Another password; all logins end", 200, PasswordChange)},
        "/v1/state": {"get": {"summary": "How the hub is doing", "responses": _answers(200, 401, 403)}},
        "/v1/health": {
            "get": {"summary": "Whether anything can be accepted", "responses": _answers(200, 503)}
        },
        "/readyz": {"get": {"summary": "The same, for orchestrators", "responses": _answers(200, 503)}},
        "/healthz": {"get": {"summary": "Whether the process works", "responses": _answers(200)}},
        "/metrics": {
            "get": {
                "summary": "Metrics for Prometheus, as text; without a token on the same machine",
                "responses": _answers(200, 401, 403),
            }
        },
        "/v1/metrics": {
            "get": {
                "summary": "Metrics of this hub, totals of all hubs, and for admins the state",
                "responses": _answers(200, 401, 403),
            }
        },
        "/v1/metrics/{step}": {
            "get": {
                "summary": "Columns for a chart: points of a second, a minute or an hour",
                "parameters": [
                    {
                        "name": "step",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "enum": ["second", "minute", "hour"]},
                    }
                ],
                "responses": _answers(200, 400, 401, 403),
            }
        },
    },
}
