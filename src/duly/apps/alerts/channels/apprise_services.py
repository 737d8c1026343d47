"""Everything else, by Apprise: DingTalk, Feishu, WeCom, ntfy, Telegram … (`apprise --help` lists addresses).

Apprise says whether a service took a notice, and no more. What it calls a failure is taken as such; an answer
that does not come in time is in doubt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from functools import cache
from typing import Any, Final

from duly.apps.alerts.channels.address_guard import PRIVATE, AddressGuard, check_written, public_only
from duly.apps.alerts.channels.channel import Notification
from duly.core.fanout.plan import DoubtPolicy
from duly.errors import Declined, InDoubt, Malformed, NotSent

SECONDS: Final = 30.0


def check_service(url: str, *, private: bool = True) -> None:
    """Refuse an address that Apprise does not know; without `private`, also one whose text shows that it
    leads into our own network. What a name or a redirect leads to is judged when it is connected to."""
    apprise = _apprise()
    service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    if service is None:
        raise Malformed("no service is known that this address could belong to; see Apprise's list of them")
    if not private and isinstance(getattr(service, "host", None), str):
        check_written(service.host)


class AppriseChannel:
    """One address."""

    def __init__(self, url: str, doubt: DoubtPolicy, *, private: bool = False) -> None:
        apprise = _apprise()
        self._private = private
        self.doubt = doubt
        self._kinds = apprise.NotifyType
        self._service = apprise.Apprise.instantiate(url, suppress_exceptions=True)

    async def send(self, notice: Notification) -> None:
        if self._service is None:
            raise NotSent("Apprise does not know this kind of address")
        kind = self._kinds.FAILURE if notice.urgent else self._kinds.WARNING
        try:
            async with asyncio.timeout(SECONDS):
                told = await asyncio.to_thread(self._notify, notice, kind)
        except TimeoutError:
            raise InDoubt(f"the service did not answer within {SECONDS:.0f} s") from None
        if not told:
            raise NotSent("the service did not take it")

    def _notify(self, notice: Notification, kind: Any) -> bool:
        with contextlib.nullcontext(AddressGuard()) if self._private else public_only() as guard:
            # The service itself, not Apprise's pool of threads: what is guarded is this thread.
            told = bool(self._service.notify(body=notice.text, title=notice.title, notify_type=kind))
        if not told and guard.refused:
            raise Declined(PRIVATE)
        return told

    async def close(self) -> None:
        pass


@cache
def _apprise() -> Any:
    """Apprise, loaded only by those who need it, which takes a while; and silent: it logs addresses, and
    addresses are secrets."""
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import apprise

        apprise.Apprise.instantiate("json://localhost")  # loads the services, too
    return apprise
