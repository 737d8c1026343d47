"""Requests to `/v1/admin/{verb}` with arguments that are missing or invalid, by curl."""

from __future__ import annotations

import pytest

from duly.identity.accounts import Role
from tests.end_to_end.raw import curl
from tests.local_hub import LocalHub


async def detail_of(local: LocalHub, verb: str, body: object) -> str:
    """The detail of the answer 400 to a request."""
    if "root" not in local.tokens:
        await local.add(Role.ADMIN, "root")
    answer = await curl(f"{local.url}/v1/admin/{verb}", local.tokens["root"], body=body)
    assert (answer.status, answer.json["error"]) == (400, "malformed"), answer.body
    return str(answer.json["detail"])


@pytest.mark.parametrize(
    ("verb", "missing"),
    [
        ("add", "role"),
        ("temporary_token", "name"),
        ("login", "name"),
        ("remove", "name"),
        ("grant", "app"),
        ("revoke", "app"),
        ("alert.show", "event"),
        ("alert.ack", "event"),
        ("alert.unsilence", "silence"),
        ("deliveries.retry", "event"),
        ("profile.set", "draft"),
        ("profile.show", "name"),
        ("dashboard.password", "name"),
        ("dashboard.remove", "name"),
    ],
)
async def test_a_missing_argument_is_named(local: LocalHub, verb: str, missing: str) -> None:
    said = await detail_of(local, verb, {})
    assert said == f"{missing!r} is missing; add it to the JSON object in the body"


@pytest.mark.parametrize(
    ("verb", "body", "words"),
    [
        ("add", {"role": "bogus", "name": "x"}, "'bogus' is not a role; use one of "),
        ("alert.list", {"limit": "x"}, "limit is a number from 1 to 10000, not 'x'"),
        ("alert.list", {"limit": "-5"}, "limit is a number from 1 to 10000"),
        ("deliveries.list", {"limit": "9" * 5_000}, "limit is a number from 1 to 10000"),
        ("alert.silence", {"device": "d", "lasts": "inf"}, "lasts is a number of seconds, at most"),
        ("alert.silence", {"device": "d", "lasts": "nan"}, "lasts is a number of seconds, at most"),
        (
            "alert.silence",
            {"device": "d", "lasts": "1e300"},
            "lasts is a number of seconds, at most",
        ),
        ("alert.silence", {"device": "d", "lasts": "-4"}, "lasts is a number of seconds, at most"),
        ("alert.silence", {"device": "d", "lasts": "x"}, "lasts is a number of seconds, at most"),
        ("profile.set", {"name": "p", "draft": "{"}, "the draft of a profile is not JSON: "),
        ("add", [], "the body is not a JSON object of texts, such as "),
        ("add", {"role": 1}, "the body is not a JSON object of texts, such as "),
    ],
)
async def test_an_invalid_argument_is_explained(local: LocalHub, verb: str, body: object, words: str) -> None:
    assert (await detail_of(local, verb, body)).startswith(words)
