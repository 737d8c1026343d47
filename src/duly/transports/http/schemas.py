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
