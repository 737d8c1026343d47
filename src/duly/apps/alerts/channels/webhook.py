"""The channel for webhooks, signed after the Standard Webhooks convention.

`webhook-id` is the id of the delivery, the same in every attempt, so that the receiver recognises a
repeat; together with `webhook-timestamp` and the body it is signed with the endpoint's secret (`whsec_…`,
HMAC-SHA256). Redirects are not followed. An address in a private network is refused unless the operator
allows it; the address that is connected to decides (see `address_guard`).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import io
import secrets
import socket
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import sha256
from typing import Final, cast
from urllib.parse import SplitResult, quote, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from duly.apps.alerts.channels.address_guard import PRIVATE, PrivateAddress, check_address, check_written
from duly.apps.alerts.channels.channel import Channel, Notification
from duly.apps.alerts.channels.threads import ChannelThreads
from duly.core.units import HOUR, seconds
from duly.errors import Declined, InDoubt, Malformed, NotSent
from duly.wire.cloud_events import OutgoingEvent, binary, structured

SECONDS: Final = 15.0
"""The limit for the whole attempt: connecting, sending and the answer."""
CONNECT_SECONDS: Final = 5.0
ANSWER_LIMIT: Final = 4_096
"""The most bytes of an answer that are read; none are kept."""
LONGEST_REST: Final = HOUR

AGAIN: Final = frozenset({408, 409, 423, 425, 429})
"""The 4xx statuses after which another attempt may succeed."""

PREFIX: Final = "whsec_"


def new_secret() -> str:
    """Make a secret for an endpoint."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """Return the bytes of a secret; raises `Malformed` if it is invalid."""
    try:
        if not secret.startswith(PREFIX):
            raise ValueError
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (ValueError, binascii.Error):
        raise Malformed(
            "a webhook's secret is whsec_ followed by base64; leave it out to have one made"
        ) from None
    if not 24 <= len(key) <= 64:
        raise Malformed("a webhook's secret has 24 to 64 bytes, in base64; leave it out to have one made")
    return key


def signature(secret: str, id_: str, timestamp: int, body: bytes) -> str:
    """Return the `webhook-signature` header.

    >>> signature("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330,
    ...           b'{"test": 2432232314}')
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    signed = hmac.digest(key_of(secret), b"%b.%d.%b" % (id_.encode(), timestamp, body), sha256)
    return f"v1,{base64.b64encode(signed).decode()}"


def check_host(parts: SplitResult, *, private: bool) -> None:
    """Raise `Malformed` for an address without a host; without `private`, also for one that is clearly
    private."""
    if not parts.hostname:
        raise Malformed("a webhook's address needs a host: https://host/path")
    if not private:
        check_written(parts.hostname)


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket for a public address: this address is connected to, whatever text or name it came
    from."""
    family, kind, proto, _, where = info
    check_address(where)
    return socket.socket(family, kind, proto)


def _plain(notification: Notification) -> tuple[bytes, dict[str, str]]:
    return msgspec.json.encode(notification.body), {"Content-Type": "application/json"}


def _event(notification: Notification) -> OutgoingEvent:
    """Return a notification as a CloudEvent; its id is that of the delivery in every attempt."""
    body = notification.body
    data = cast("dict[str, object]", body["data"])
    return OutgoingEvent(
        id=notification.id,
        source=f"/duly/alerts/{quote(str(data['sentinel']))}" if "sentinel" in data else "/duly/alerts",
        type=f"duly.{body['type']}",
        subject=str(data.get("event", notification.id)),
        time=str(body["timestamp"]),
        data=data,
    )


_FORMS: Final[dict[str, Callable[[Notification], tuple[bytes, dict[str, str]]]]] = {
    "cloudevents": lambda notification: structured(_event(notification)),
    "cloudevents-binary": lambda notification: binary(_event(notification)),
}
"""The form of the body, by the prefix before the `+` of an address."""


class _Resolver(AbstractResolver):
    """Resolves names in threads of the channels, as aiohttp's own does in those of the whole program."""

    def __init__(self, threads: ChannelThreads) -> None:
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a name."""
        flags = socket.AI_ADDRCONFIG
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, flags)
        return [
            ResolveResult(
                hostname=host,
                host=str(where[0]) + (f"%{where[3]}" if len(where) > 3 and where[3] else ""),
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, proto, _, where in await self._threads.run(host, SECONDS, look_up)
        ]

    async def close(self) -> None:
        """Do nothing: each look-up has its own thread."""


class WebhookChannel(Channel):
    """Sends to one webhook in the form given by its address."""

    def __init__(self, url: str, secret: str, threads: ChannelThreads, *, private: bool) -> None:
        check_host(urlsplit(url), private=private)
        form, _, plain = url.partition("+")
        self._render = _FORMS.get(form, _plain)
        self._url = url if self._render is _plain else plain
        self._secret = secret
        self._private = private
        self._threads = threads
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            judged = None if self._private else _socket
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    socket_factory=judged, limit=64, use_dns_cache=False, resolver=_Resolver(self._threads)
                ),
                timeout=aiohttp.ClientTimeout(total=SECONDS, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def send(self, notification: Notification) -> None:
        """Post the notification with its id and, if there is a secret, a signature."""
        body, headers = self._render(notification)
        timestamp = int(time.time())
        headers |= {
            "User-Agent": "duly",
            "webhook-id": notification.id,
            "webhook-timestamp": str(timestamp),
            "Idempotency-Key": notification.id,
        }
        if self._secret:
            headers["webhook-signature"] = signature(self._secret, notification.id, timestamp, body)
        try:
            async with self._open().post(
                self._url, data=io.BytesIO(body), headers=headers, allow_redirects=False
            ) as answer:
                await answer.content.read(ANSWER_LIMIT)
                status, rest = answer.status, _rest(answer.headers.get("Retry-After"))
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, PrivateAddress) as problem:
            if _private(problem):
                raise Declined(PRIVATE) from None
            if isinstance(problem, aiohttp.SocketTimeoutError):
                raise InDoubt(f"no answer within {SECONDS:.0f} s") from None
            raise NotSent("it cannot be reached") from None
        except TimeoutError:
            raise InDoubt(f"no answer within {SECONDS:.0f} s") from None
        except aiohttp.InvalidURL:
            raise Declined("its address is invalid") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise InDoubt(f"the connection broke: {type(problem).__name__}") from None
        if 200 <= status < 300:
            return
        if status >= 500 or status in AGAIN:
            raise NotSent(f"it answered with HTTP status {status}", rest)
        raise Declined(f"it answered with HTTP status {status}")

    async def close(self) -> None:
        """Close the HTTP connections that are kept open."""
        if self._session is not None:
            await self._session.close()


def _private(problem: BaseException | None) -> bool:
    """Return whether a connection was refused because its address is private."""
    while problem is not None:
        if isinstance(problem, PrivateAddress):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _rest(text: str | None) -> int:
    """Return the pause that a `Retry-After` header asks for, in seconds or as a date.

    >>> _rest("120"), _rest(None), _rest("soon")
    (120000000, 0, 0)
    """
    if not text:
        return 0
    if text.isdecimal() and len(text) < 10:
        return min(seconds(int(text)), LONGEST_REST)
    try:
        until = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        return 0
    return max(0, min(seconds(until - time.time()), LONGEST_REST))
