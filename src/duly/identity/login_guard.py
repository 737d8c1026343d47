"""Limits how often an account, a network and a pair of them may try to log in.

A try is counted before its password is checked, and given back if it succeeds: a burst of guesses cannot
outrun the count. A pair (account, network) that guesses is stopped. An account that strangers guess at is
slowed down for strangers alone, so that its owner is not locked out: a network from which the account has
logged in before is counted separately. Memory is bounded, and a flood of addresses does not reset a count
(`duly.core.rate_limits`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import MINUTE, SECOND
from duly.errors import TooManyLogins

PAIR: Final = Rate(1, MINUTE, burst=5)
"""Wrong passwords for one account from one network."""
ACCOUNT: Final = Rate(2, MINUTE, burst=10)
"""Wrong passwords for one account from all networks that it has never logged in from."""
NETWORK: Final = Rate(20, MINUTE, burst=20)
"""Wrong passwords from one network, for any account that has never logged in from there."""
REGISTER: Final = Rate(2, MINUTE, burst=10)
"""Accounts that strangers make from one network."""
TOKEN: Final = Rate(20, MINUTE, burst=10)
"""Wrong tokens from one network."""
LOOKUP: Final = Rate(20)
"""Unknown tokens that are looked up in the ledger for one network whose wrong tokens are used up."""
REMEMBERED: Final = 50_000
"""Accounts, networks and pairs of them that are counted separately, and pairs that have logged in. Only a
try whose hash was computed stays counted, and hashes are slow: no flood comes near this number."""


class Rates(Struct, frozen=True):
    """The rates that a guard allows."""

    pair: Rate = PAIR
    account: Rate = ACCOUNT
    network: Rate = NETWORK
    register: Rate = REGISTER
    token: Rate = TOKEN


class LoginGuard:
    """Counts the logins of one hub. Times are arguments, in microseconds; networks are those of `network_of`.

    >>> guard = LoginGuard()
    >>> tries = [guard.begin("eve", "192.0.2.7", now=0) for _ in range(5)]
    >>> guard.begin("eve", "192.0.2.7", now=0)
    Traceback (most recent call last):
    duly.errors.TooManyLogins: too many tries; try again in 60 s
    >>> tries[0]()
    >>> _ = guard.begin("eve", "192.0.2.7", now=0)
    """

    def __init__(self, rates: Rates | None = None, *, remembered: int = REMEMBERED) -> None:
        rates = rates or Rates()
        self._pairs = RateLimits(rates.pair, remembered)
        self._known_pairs = RateLimits(rates.pair, remembered)
        self._accounts = RateLimits(rates.account, remembered)
        self._networks = RateLimits(rates.network, remembered)
        self._registering = RateLimits(rates.register)
        self._tokens = RateLimits(rates.token)
        self._lookups = RateLimits(LOOKUP)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._remembered = remembered
        self.failures = 0
        """wrong tokens and passwords since the start"""
        self.on_failure: Callable[[str], None] = _not_recorded
        """called with a sentence about each of them"""

    # ── by password ──────────────────────────────────────────────────────────────────────────────

    def begin(self, account: str, network: str, now: int, *, known: bool = False) -> Callable[[], None]:
        """Count one try to log in; returns a function that gives it back, to be called if the try
        succeeds. Raises `TooManyLogins` if no try is allowed now: the password must not be checked then.
        `known` says that the account has logged in from this network before."""
        pair = pair_of(account, network)
        if known:
            counted = [(self._known_pairs, pair)]
        else:
            counted = [(self._networks, network), (self._pairs, pair), (self._accounts, _short(account))]
        taken: list[tuple[RateLimits, str]] = []
        for limits, name in counted:
            wait = limits.take(name, now)
            if wait:
                _give_back(taken)
                raise TooManyLogins(f"too many tries; try again in {_seconds(wait)} s", wait)
            taken.append((limits, name))
        return lambda: _give_back(taken)

    def learn(self, account: str, network: str) -> None:
        """Remember that the account has logged in from this network."""
        pair = pair_of(account, network)
        self._known[pair] = None
        self._known.move_to_end(pair)
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)

    def knows(self, account: str, network: str) -> bool:
        """Return whether the account has logged in from this network, as far as this guard remembers."""
        return pair_of(account, network) in self._known

    def register(self, network: str, now: int) -> None:
        """Count one account that a stranger makes; none is given back, since each one takes disk space."""
        wait = self._registering.take(network, now)
        if wait:
            raise TooManyLogins(f"too many accounts from here; try again in {_seconds(wait)} s", wait)

    def wrong_password(self, account: str, network: str, *, exists: bool) -> None:
        """Count a password that is wrong, or for an account that does not exist. A name that no account has
        is not shown: people type passwords into the field for the name."""
        who = f"the password of {account}" if exists else "the name of an account"
        self.failed(f"{who}, from {network}, is wrong")

    def failed(self, reason: str) -> None:
        """Count a login that failed, and report it."""
        self.failures += 1
        self.on_failure(reason)

    # ── by token ─────────────────────────────────────────────────────────────────────────────────

    def begin_lookup(self, network: str, now: int) -> Callable[[], None] | None:
        """Count one unknown token that is to be looked up in the ledger. Returns a function that gives the
        lookup back, to be called if it finds an account; None if the lookup is not allowed. Only a network
        that has shown too many wrong tokens is limited."""
        if not self._tokens.wait(network, now):
            return lambda: None
        if self._lookups.take(network, now):
            return None
        return lambda: self._lookups.give_back(network)

    def wrong_token(self, network: str, now: int) -> int:
        """Count a token that belongs to no account; returns how long to wait before the next, or 0."""
        self.failed(f"a token from {network} is not known")
        return self._tokens.take(network, now)


def pair_of(account: str, network: str) -> str:
    """Return a digest of a pair of account and network; its length is fixed, however long the names are."""
    return _short(f"{network}\0{account}")


def _short(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def _give_back(taken: list[tuple[RateLimits, str]]) -> None:
    while taken:
        limits, name = taken.pop()
        limits.give_back(name)


def _seconds(wait: int) -> int:
    return -(-wait // SECOND)


def _not_recorded(_reason: str) -> None:
    return
