"""The protocol of channels, which notify a person or a program outside.

A channel reports exactly how an attempt went: `send` returns if the recipient has accepted the notification,
raises `NotSent` or `Declined` if it certainly has not, and `InDoubt` if that is not known. What follows an
attempt in doubt is declared by the address (`duly.apps.alerts.channels.declared`). A channel never shows or
logs its address, which may hold a password: only its label is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct


class Notification(Struct, frozen=True):
    """The content of one notification."""

    id: str
    """the id of the delivery, the same in every attempt, so that a receiver recognises a repeat"""
    title: str
    text: str
    body: Mapping[str, object]
    """the content for programs"""
    urgent: bool = False


class Channel(Protocol):
    """Sends notifications to one address."""

    async def send(self, notification: Notification) -> None:
        """Send a notification; raises a `ChannelError` that says whether it may have arrived."""
        ...

    async def close(self) -> None:
        """Close connections that the channel keeps."""
