"""The proxies whose `X-Forwarded-For` header the hub trusts, and the client's address in that header.

The law: only listed proxies are trusted. Each proxy appends its peer's address to `X-Forwarded-For`, so the
list is read from the right: the first address that is not a listed proxy is the client's. The client may have
written everything to the left of it, so the rest is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from duly.errors import Malformed

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class TrustedProxies:
    """The proxies in front of a hub, by their networks: `10.0.0.0/8`, `192.0.2.7`, `2001:db8::/32`."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = [_network(text) for text in networks]
        self._known = lru_cache(maxsize=1_024)(self._is_listed)

    def trusts(self, address: str) -> bool:
        """Return whether this is the address of a listed proxy."""
        return bool(self._networks) and self._known(address)

    def client(self, peer: str, forwarded: Iterable[str]) -> str:
        """Return the address of a request's client, from its `peer` and its `X-Forwarded-For` headers.

        >>> proxies = TrustedProxies(["10.0.0.0/8"])
        >>> proxies.client("10.0.0.1", ["203.0.113.9, 198.51.100.7, 10.0.0.2"])
        '198.51.100.7'
        >>> proxies.client("198.51.100.7", ["203.0.113.9"])
        '198.51.100.7'
        """
        if not self.trusts(peer):
            return peer
        hops = [hop.strip() for header in forwarded for hop in header.split(",")]
        for hop in reversed(hops):
            found = _address(hop)
            if found is None:
                return peer
            peer = str(found)
            if not self.trusts(peer):
                return peer
        return peer

    def _is_listed(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)


def _network(text: str) -> Network:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise Malformed(
            f"a trusted proxy is an address or a network, like 192.0.2.7 or 10.0.0.0/8, not {text!r}"
        ) from None
    if not network.prefixlen:
        raise Malformed(
            f"{text} stands for every address, so any client could claim to be another; list the proxies"
        )
    return network


def _address(text: str) -> Address | None:
    """Parse an address as proxies write it: some add a port, with brackets around an IPv6 address.

    >>> [str(_address(text)) for text in ("192.0.2.7:4711", "[2001:db8::1]:80", "::ffff:192.0.2.7", "no")]
    ['192.0.2.7', '2001:db8::1', '192.0.2.7', 'None']
    """
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found
