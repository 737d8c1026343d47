"""The network that an address counts as for rate limits.

The law: an IPv6 subscriber has 2^64 addresses, so a /64 counts as one address. An IPv4 address counts on its
own, even if it is written as an IPv6 address.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address


@lru_cache(maxsize=4_096)
def network_of(address: str) -> str:
    """Return the network that an address counts as; text that is not an address is returned unchanged.

    >>> network_of("2001:db8:1:2:aaaa::1"), network_of("::ffff:192.0.2.7"), network_of("?")
    ('2001:db8:1:2::/64', '192.0.2.7', '?')
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return f"{IPv6Address(int(found) >> 64 << 64)}/64"
    return str(found)
