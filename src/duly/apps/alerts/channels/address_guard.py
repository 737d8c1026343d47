"""Decides which addresses notifications may be sent to, by the address that a socket connects to.

Where private addresses are not allowed, no channel reaches one, however its host is spelled, whatever its
name resolves to, and wherever a redirect points. A host can be spelled in many ways (full-width digits,
ideographic full stops, `0x7f000001`); the address of a socket cannot. So the decision is made when a
socket connects; the text of an address is checked only to refuse it early.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

from duly.errors import Malformed

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

PRIVATE: Final = (
    "this address is inside a private network; a hub sends there only if it was started with "
    "'duly up --allow-private-webhooks', and 'duly channel test' only with the same option of its own"
)

_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class PrivateAddress(OSError):
    """Raised instead of connecting to a private address."""


def is_public(address: Address) -> bool:
    """Return whether an address is public. An address that contains another one counts as that one.

    >>> [is_public(ipaddress.ip_address(a)) for a in ("1.1.1.1", "10.0.0.1", "100.64.0.1")]
    [True, False, False]
    >>> [is_public(ipaddress.ip_address(a)) for a in ("2606:4700::1", "64:ff9b::7f00:1", "::ffff:7f00:1")]
    [True, False, False]
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def check_address(where: object) -> None:
    """Raise `PrivateAddress` for the address of a socket that is not public; a Unix socket is not, either."""
    host = where[0] if isinstance(where, tuple) and where else ""
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        raise PrivateAddress(PRIVATE) from None
    if not is_public(address):
        raise PrivateAddress(PRIVATE)


def check_written(host: str) -> None:
    """Raise `Malformed` for a host whose text shows that it is private: an address in any spelling, or
    localhost. Other names are judged by what they resolve to, at every connection."""
    plain = unicodedata.normalize("NFKC", host).replace("\u3002", ".").strip("[]").rstrip(".").casefold()
    if plain == "localhost" or plain.endswith(".localhost"):
        raise Malformed(PRIVATE)
    address: Address
    try:
        address = ipaddress.ip_address(plain.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(plain))  # 127.1, 0x7f.1, 2130706433
        except (OSError, UnicodeError):
            return
    if not is_public(address):
        raise Malformed(PRIVATE)


# ── libraries that connect by themselves ─────────────────────────────────────────────────────────


class AddressGuard:
    """Remembers whether a channel tried to connect to a private address."""

    def __init__(self) -> None:
        self.refused = False
        """whether a connection to a private address was tried"""


_guarded: Final[WeakKeyDictionary[threading.Thread, AddressGuard]] = WeakKeyDictionary()
_CONNECTS: Final = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})


@contextlib.contextmanager
def public_only() -> Iterator[AddressGuard]:
    """Let this thread and the threads it starts connect to public addresses only, whatever library
    connects: Python calls an audit hook before every connection."""
    _hook()
    thread = threading.current_thread()
    guard = _guarded[thread] = AddressGuard()
    try:
        yield guard
    finally:
        del _guarded[thread]


@cache
def _hook() -> None:
    """Install the hooks on sockets and threads of this process. They cannot be removed, so they are
    installed once, when they are first needed."""
    start = threading.Thread.start

    def inherit(self: threading.Thread) -> None:
        guard = _guarded.get(threading.current_thread())
        if guard is not None:
            _guarded[self] = guard
        start(self)

    threading.Thread.start = inherit  # type: ignore[method-assign]  # Python offers no hook for threads
    sys.addaudithook(_judge)


def _judge(event: str, args: tuple[object, ...]) -> None:
    if event not in _CONNECTS:
        return
    guard = _guarded.get(threading.current_thread())
    if guard is None or args[1] is None:
        return
    try:
        check_address(args[1])
    except PrivateAddress:
        guard.refused = True
        raise
