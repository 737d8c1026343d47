"""The OpenAPI document says what the program does: its shapes are the types', its paths are the routes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from duly.transports.http import alertmanager, alerts, cloud_events, devices, logins, messages, metrics
from duly.transports.http.openapi import OPENAPI
from duly.transports.http.schemas import Credentials, ErrorAnswer, LogoutRequest, PasswordChange
from duly.wire.frames import Frame, FrameOrder
from duly.wire.outgoing import AnsweredServerAck

API: dict[str, Any] = OPENAPI
SCHEMAS: dict[str, Any] = API["components"]["schemas"]


@pytest.mark.parametrize(
    "type_",
    [Frame, FrameOrder, AnsweredServerAck, Credentials, LogoutRequest, PasswordChange, ErrorAnswer],
)
def test_a_shape_has_the_fields_of_its_type(type_: Any) -> None:
    fields = set(type_.__struct_encode_fields__)
    if (tag := type_.__struct_config__.tag_field) is not None:
        fields.add(tag)
    assert set(SCHEMAS[type_.__name__]["properties"]) == fields


def test_a_frame_may_have_fields_of_its_own() -> None:
    assert SCHEMAS["Frame"]["additionalProperties"] is not False
    assert SCHEMAS["Frame"]["required"] == ["type"]


def test_every_shape_that_is_named_is_described_and_used() -> None:
    named: set[str] = set()

    def walk(part: object) -> None:
        if isinstance(part, dict):
            if "$ref" in part:
                named.add(part["$ref"].rpartition("/")[2])
            for one in part.values():
                walk(one)
        elif isinstance(part, list):
            for one in part:
                walk(one)

    walk(OPENAPI)
    assert named == set(SCHEMAS)


def test_the_paths_are_the_routes() -> None:
    hub = cast("Any", None)
    routes = [
        *messages.routes(messages.MessagesEndpoint(hub)),
        *devices.routes(hub),
        *logins.routes(hub),
        *alerts.routes(hub),
        *alertmanager.routes(hub),
        *cloud_events.routes(hub),
        *metrics.routes(hub),
    ]
    served = {(route.path, route.method.lower()) for route in routes} - {("/v1/openapi.json", "get")}
    described = {(path, method) for path, methods in API["paths"].items() for method in methods}
    assert described == served
