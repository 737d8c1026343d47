"""What counts as one address."""

from __future__ import annotations

import pytest

from duly.core.networks import network_of


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("no address", "no address"),
        ("x" * 100, "x" * 64),
    ],
)
def test_an_address_belongs_to_one_network(address: str, network: str) -> None:
    assert network_of(address) == network
