"""Everything else, by Apprise: DingTalk, Feishu, WeCom, ntfy, Telegram … (`apprise --help` lists addresses).

Apprise says whether a service took a notice, and no more. What it calls a failure is taken as such; an answer
that does not come in time is in doubt.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from functools import cache
from typing import Any, Final

from duly.channel import Notice
from duly.core.parcels import Doubt
from duly.errors import InDoubt, Malformed, NotSent

SECONDS: Final = 30.0


def check_service(url: str) -> None:
    apprise = _apprise()
    if apprise.Apprise.instantiate(url, suppress_exceptions=True) is None:
        raise Malformed("no service is known that this address could belong to; see Apprise's list of them")


class Service:
    """One address."""

    def __init__(self, url: str, doubt: Doubt) -> None:
        apprise = _apprise()
        self.doubt = doubt
        self._kinds = apprise.NotifyType
        self._apprise = apprise.Apprise()
        self._usable = self._apprise.add(url)

    async def send(self, notice: Notice) -> None:
        if not self._usable:
            raise NotSent("Apprise does not know this kind of address")
        kind = self._kinds.FAILURE if notice.urgent else self._kinds.WARNING
        try:
            async with asyncio.timeout(SECONDS):
                told = await asyncio.to_thread(
                    self._apprise.notify, body=notice.text, title=notice.title, notify_type=kind
                )
        except TimeoutError:
            raise InDoubt(f"the service did not answer within {SECONDS:.0f} s") from None
        if not told:
            raise NotSent("the service did not take it")

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
