"""Whose word is taken for the address of a client: read from the right, and only from listed proxies."""

from __future__ import annotations

import pytest

from duly.core.trusted_proxies import TrustedProxies
from duly.errors import Malformed

PROXIES = TrustedProxies(["10.0.0.0/8", "192.0.2.7", "2001:db8::/32"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("198.51.100.1", ["203.0.113.9"], "198.51.100.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["1.1.1.1, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["1.1.1.1", "203.0.113.9, 192.0.2.7"], "203.0.113.9"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("10.0.0.1", ["[2a00::1]:80"], "2a00::1"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("2001:db8::5", ["2a00::1"], "2a00::1"),
        ("10.0.0.1", ["203.0.113.9, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9,"], "10.0.0.1"),
        ("?", ["203.0.113.9"], "?"),
    ],
)
def test_the_first_address_from_the_right_that_is_no_listed_proxy(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert PROXIES.client(peer, forwarded) == client


def test_without_a_list_no_header_is_believed() -> None:
    assert TrustedProxies().client("127.0.0.1", ["203.0.113.9"]) == "127.0.0.1"


@pytest.mark.parametrize("text", ["", "proxy.example", "10.0.0.0/33", "0.0.0.0/0", "::/0"])
def test_what_is_no_list_of_proxies_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        TrustedProxies([text])
