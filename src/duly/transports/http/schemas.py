"""The JSON bodies of requests and answers that are no frames, as types.

They decode and encode, and the OpenAPI document is made from them.
"""

from __future__ import annotations

from msgspec import Struct


class Credentials(Struct, frozen=True):
    """Who registers or logs in; `device` names the login."""

    name: str
    password: str
    device: str = ""


class LogoutRequest(Struct, frozen=True):
    """Which logins end: this one, or all of the person's."""

    everywhere: bool = False


class PasswordChange(Struct, frozen=True):
    """The password as it is, and as it is to be."""

    old: str
    new: str


class ErrorAnswer(Struct, frozen=True, omit_defaults=True):
    """Why a request was refused: a word for programs, a sentence for people."""

    error: str
    detail: str
    code: int | None = None
    retry_after: float | None = None
    """seconds to wait before the next try"""


class RefusedAlert(Struct, frozen=True):
    """An alert of a webhook that was not taken, and why."""

    alert: str
    error: str
    detail: str


class WebhookReport(Struct, frozen=True):
    """What became of the alerts of one webhook, counted."""

    accepted: int = 0
    resolved: int = 0
    repeated: int = 0
    """known already, in the state that the webhook says"""
    ignored: int = 0
    """resolved, and never reported here"""
    refused: list[RefusedAlert] = []
