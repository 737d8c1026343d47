"""The types of JSON bodies that are not frames.

They decode and encode, and the OpenAPI document is made from them.
"""

from __future__ import annotations

from msgspec import Struct


class Credentials(Struct, frozen=True):
    """The credentials of a registration or login; `device` names the login."""

    name: str
    password: str
    device: str = ""


class LogoutRequest(Struct, frozen=True):
    """Which logins end: this one, or all of the person's."""

    everywhere: bool = False


class PasswordChange(Struct, frozen=True):
    """The old and the new password."""

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
    """An alert of a webhook that was refused, and why."""

    alert: str
    error: str
    detail: str


class WebhookReport(Struct, frozen=True):
    """The counts of what happened to the alerts of one webhook."""

    accepted: int = 0
    resolved: int = 0
    repeated: int = 0
    """known already, in the state that the webhook says"""
    ignored: int = 0
    """resolved, and never reported here"""
    refused: list[RefusedAlert] = []
