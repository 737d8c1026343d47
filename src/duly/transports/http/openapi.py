"""The OpenAPI document: what the hub takes over HTTP, and what it answers."""

from __future__ import annotations

from typing import Any, Final

from duly.wire import frames
from duly.wire.frames import ServerCode

WAIT_LIMIT: Final = 300.0
"""Seconds that a request may wait for the final answer."""
ALERTS: Final = frozenset({"alert_event", "alert_update", "alert_cancel"})
_FRAME_SCHEMA: Final = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9_]{0,63}$",
            "examples": sorted(frames.COMMANDS | ALERTS),
        },
        "seq_id": {
            "type": "string",
            "description": "{milliseconds}_{counter}, minted by the sender, the same in every resend",
        },
        "to": {"type": "string", "description": "the device; of a command"},
        "data": {"description": "anything; passed on untouched"},
        "exp": {
            "type": "integer",
            "description": "milliseconds since 1970; after this it must not take effect",
        },
        "queue": {"type": "boolean", "description": "keep it for an offline device until exp"},
        "timeout": {
            "type": "integer",
            "description": "milliseconds that the device may take, instead of the hub's patience",
        },
        "order": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "mode": {"enum": ["replay", "latest"]}},
        },
    },
    "additionalProperties": {"description": "passed on untouched; part of what the id stands for"},
}
_ACK_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "type": {"const": "server_ack"},
        "seq_id": {"type": ["string", "integer"]},
        "code": {"type": "integer", "enum": [code.value for code in ServerCode]},
        "state": {"type": "string"},
        "error": {"type": "string"},
        "detail": {"type": "string"},
        "retry_after": {"type": "number", "description": "seconds to wait before the next try"},
        "ack": {"type": "object"},
    },
}


def _answers(*statuses: int) -> dict[str, Any]:
    words = {
        200: "ended; the ack is in the body", 202: "accepted and stored", 400: "malformed, stale or expired",
        401: "not authenticated", 403: "not allowed", 404: "not known", 409: "the first run is still going",
        413: "too large", 422: "the same id with other content", 429: "too much: wait as long as it says",
        503: "try again",
    }  # fmt: skip
    schema = {"application/json": {"schema": _ACK_SCHEMA}}
    return {str(s): {"description": words[s], "content": schema} for s in statuses}


def _account(summary: str, status: int, *fields: str) -> dict[str, Any]:
    properties = {name: {"type": "boolean" if name == "everywhere" else "string"} for name in fields}
    schema = {"application/json": {"schema": {"type": "object", "properties": properties}}}
    answers = {str(status): {"description": "done"}} | _answers(400, 401, 403)
    return {"summary": summary, "requestBody": {"content": schema}, "responses": answers}


OPENAPI: Final[dict[str, Any]] = {
    "openapi": "3.1.0",
    "info": {"title": "duly", "version": "1", "description": "Commands that take effect once."},
    "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    "security": [{"token": []}],
    "paths": {
        "/v1/messages": {
            "post": {
                "summary": "Send one frame, or an array of frames",
                "parameters": [
                    {"name": "wait", "in": "query", "schema": {"type": "number", "maximum": WAIT_LIMIT}},
                    {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}},
                ],
                "requestBody": {"required": True, "content": {"application/json": {"schema": _FRAME_SCHEMA}}},
                "responses": _answers(200, 202, 400, 401, 403, 409, 413, 422, 429, 503),
            },
            "get": {
                "summary": "Messages, newest first, by page; or those with one id",
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
            "get": {"summary": "Why nothing happened, newest first", "responses": _answers(200, 401)}
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
        "/v1/people": {"post": _account("Register a person", 201, "name", "password")},
        "/v1/login": {"post": _account("A token for one more device", 200, "name", "password", "device")},
        "/v1/logout": {"post": _account("End this login, or all of yours", 200, "everywhere")},
        "/v1/password": {"post": _account("Another password; all logins end", 200, "old", "new")},
        "/v1/state": {"get": {"summary": "How the hub is doing", "responses": _answers(200, 401, 403)}},
        "/v1/health": {
            "get": {"summary": "Whether anything can be accepted", "responses": _answers(200, 503)}
        },
    },
}
