"""The channel for all other services, by Apprise: DingTalk, Feishu, WeCom, ntfy, Telegram … (`apprise
--help` lists them).

Apprise reports whether a service accepted a notification, and no more. Its failures count as not sent; an
answer that does not come in time is in doubt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from functools import cache
from typing import Any, Final

from duly.apps.alerts.channels.address_guard import (
    PRIVATE,
    AddressGuard,
    PrivateAddress,
    check_written,
    public_only,
)
from duly.apps.alerts.channels.channel import Channel, Notification
from duly.core.fanout.plan import DoubtPolicy
from duly.errors import Declined, InDoubt, Malformed, NotSent
from duly.extras import needed_for

SECONDS: Final = 30.0


def check_service(url: str, *, private: bool = True) -> None:
    """Raise `Malformed` for an address that Apprise does not know; without `private`, also for one whose
    text shows that it is in a private network. Names and redirects are judged at every connection."""
    apprise = _apprise()
    service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    if service is None:
        raise Malformed("no service is known for this address; see the list of Apprise")
    _check_template(service)
    if not private and isinstance(getattr(service, "host", None), str):
        check_written(service.host)


def _check_template(service: object) -> None:
    """Raise `Malformed` for a template that is a file of this machine: profiles are set from afar, and such a
    file would be sent to the service that the same address names."""
    apprise, template = _apprise(), getattr(service, "template", None)
    if isinstance(template, apprise.AppriseAttachment) and any(
        one.location is apprise.ContentLocation.LOCAL for one in template
    ):
        raise Malformed(
            "template= may not be a file of the hub's machine; leave it out, or name an https address"
        )


class AppriseChannel(Channel):
    """Sends to one address of an Apprise service."""

    def __init__(self, url: str, doubt: DoubtPolicy, *, private: bool = False) -> None:
        apprise = _apprise()
        self._private = private
        self.doubt = doubt
        self._kinds = apprise.NotifyType
        self._service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        _check_template(self._service)

    async def send(self, notification: Notification) -> None:
        """Sends by Apprise in a thread; if the service does not answer in time, the sending is in doubt."""
        if self._service is None:
            raise NotSent("Apprise does not know this kind of address")
        kind = self._kinds.FAILURE if notification.urgent else self._kinds.WARNING
        try:
            async with asyncio.timeout(SECONDS):
                sent = await asyncio.to_thread(self._notify, notification, kind)
        except TimeoutError:
            raise InDoubt(f"the service did not answer within {SECONDS:.0f} s") from None
        if not sent:
            raise NotSent("the service did not accept it")

    def _notify(self, notification: Notification, kind: Any) -> bool:
        with contextlib.nullcontext(AddressGuard()) if self._private else public_only() as guard:
            # Called directly, not by Apprise's pool of threads: the guard holds for this thread.
            try:
                sent = bool(
                    self._service.notify(body=notification.text, title=notification.title, notify_type=kind)
                )
            except PrivateAddress:  # some services pass it on
                sent = False
        if not sent and guard.refused:
            raise Declined(PRIVATE)
        return sent

    async def close(self) -> None:
        """Does nothing: Apprise opens a connection for each notification."""
        pass


@cache
def _apprise() -> Any:
    """The apprise module. It is loaded only when it is needed, since that takes a while, and its log is
    silenced, since it contains addresses, which are secrets."""
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with needed_for("an address of this kind"):
            import apprise
        apprise.Apprise.instantiate("json://localhost")  # loads the services, too
    return apprise
