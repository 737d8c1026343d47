"""The channel for all other services, by Apprise: DingTalk, Feishu, WeCom, ntfy, Telegram … (`apprise
--help` lists them).

Apprise reports whether a service accepted a notification, and no more. Its failures count as not sent; an
answer that does not come in time is in doubt.

An address must not name a file of this machine. Profiles are set remotely, and several services have
arguments that are paths: the content of a template, for example, is sent to the service in the same address.
Apprise opens all such files in one place, where channels refuse them, whatever the argument is called.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, Protocol, Self

from duly.apps.alerts.channels.address_guard import (
    PRIVATE,
    AddressGuard,
    PrivateAddress,
    check_written,
    public_only,
)
from duly.apps.alerts.channels.channel import Channel, Notification
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.errors import Declined, InDoubt, Malformed, NotSent
from duly.extras import needed_for

SECONDS: Final = 30.0
LOCAL_FILE: Final = (
    "an argument of this address, such as template= or keyfile=, may not be a file of the hub's machine; "
    "leave it out, or name an https address"
)
_READ_LATE: Final = ("keyfile", "subfile")
"""Attributes of services that are paths and are opened only when a notification is sent."""


class ServiceFiles(Protocol):
    """Records whether a service has asked for a file of this machine."""

    named_a_file: bool


class AppriseService(Protocol):
    """The parts of an Apprise service that a channel uses."""

    @property
    def asset(self) -> ServiceFiles:
        """The asset that the service was created with."""
        ...

    def notify(self, *, body: str, title: str, notify_type: object) -> bool | None:
        """Send a notification; return whether the service accepted it."""
        ...


def check_service(url: str, *, private: bool = True) -> None:
    """Raise `Malformed` for an address that Apprise does not know; without `private`, also for one whose
    text shows that it is in a private network. Names and redirects are judged at every connection."""
    service = _open_service(url)
    if service is None:
        raise Malformed("no service is known for this address; see the list of Apprise")
    host = getattr(service, "host", None)
    if not private and isinstance(host, str):
        check_written(host)


def _open_service(url: str) -> AppriseService | None:
    """Return the service of an address, or None if Apprise has none. Raises `Malformed` for an address that
    names a file of this machine."""
    apprise = _apprise()
    asset = _channel_asset()()
    service: AppriseService | None = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
    for name in _READ_LATE:
        path = getattr(service, name, None)
        if isinstance(path, str):
            apprise.AppriseAttachment(asset=asset).add(path)
    if asset.named_a_file:
        raise Malformed(LOCAL_FILE)
    return service


class AppriseChannel(Channel):
    """Sends to one address of an Apprise service."""

    def __init__(self, url: str, threads: ChannelThreads, *, private: bool = False) -> None:
        apprise = _apprise()
        self._private = private
        self._threads = threads
        self._kinds = apprise.NotifyType
        self._service = _open_service(url)
        host = getattr(self._service, "host", None)
        self._server = f"{url.partition(':')[0]}:{host}"

    async def send(self, notification: Notification) -> None:
        """Send by Apprise in a thread; if the service does not answer in time, the attempt is in doubt."""
        if self._service is None:
            raise NotSent("Apprise does not know this kind of address")
        kind = self._kinds.FAILURE if notification.urgent else self._kinds.WARNING
        try:
            sent = await self._threads.run(
                self._server, SECONDS, partial(self._notify, self._service, notification, kind)
            )
        except TimeoutError:
            raise InDoubt(f"the service did not answer within {SECONDS:.0f} s") from None
        if not sent:
            raise NotSent("the service did not accept it")

    def _notify(self, service: AppriseService, notification: Notification, kind: object) -> bool:
        with contextlib.nullcontext(AddressGuard()) if self._private else public_only() as guard:
            # Called directly, not through Apprise's thread pool: the guard is set for this thread.
            try:
                sent = bool(
                    service.notify(body=notification.text, title=notification.title, notify_type=kind)
                )
            except PrivateAddress:  # some services pass it on
                sent = False
        if not sent and guard.refused:
            raise Declined(PRIVATE)
        if not sent and service.asset.named_a_file:
            raise Declined(LOCAL_FILE)
        return sent

    async def close(self) -> None:
        """Do nothing: Apprise opens a connection for each notification."""
        pass


@cache
def _apprise() -> Any:
    """Return the apprise module. It is loaded only when needed, since that takes a while. Its log is
    silenced, since it contains addresses, which are secrets."""
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with needed_for("an address of this kind"):
            import apprise
        apprise.Apprise.instantiate("json://localhost")  # loads the services, too
    return apprise


@cache
def _channel_asset() -> Callable[[], ServiceFiles]:
    """Return the class of the assets that services of channels are created with. Apprise passes the asset to
    every file that a service opens, and asks it there. Other programs that use Apprise beside the hub have
    their own assets, and may open any file."""
    _apprise()
    from apprise import AppriseAsset, PersistentStoreMode
    from apprise.apprise_attachment import A_MGR
    from apprise.attachment.file import AttachFile

    class ChannelAsset(AppriseAsset):
        """The settings shared by a channel's services: no files."""

        pgp_autogen = False
        pem_autogen = False

        def __init__(self) -> None:
            super().__init__(storage_mode=PersistentStoreMode.MEMORY)
            self.named_a_file = False
            """whether a service has asked for a file of this machine"""

    class GuardedFile(AttachFile):
        """A file of this machine, which is refused to services of a channel."""

        def __new__(cls, *args: object, asset: object = None, **more: object) -> Self:
            if isinstance(asset, ChannelAsset):
                asset.named_a_file = True
                raise PermissionError(LOCAL_FILE)
            made: Self = super().__new__(cls)
            return made

    A_MGR.add(GuardedFile, schemas=("file",), force=True)  # type: ignore[no-untyped-call]  # Apprise's own
    return ChannelAsset
