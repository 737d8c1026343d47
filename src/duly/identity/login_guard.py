"""Slows guessing down: how often an account, an address and a pair of them may try to log in.

The laws. A try is counted before it is judged, and given back if it succeeds: a burst of guesses cannot
outrun the count. A pair (account, network) that guesses is stopped; an account that strangers guess at is
slowed down for strangers alone, so nobody can lock its owner out: a network from which the account has logged
in before is counted for itself. Memory is bounded, and a flood of addresses does not reset a count
(`duly.core.quota`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from duly.core.quota import Quota, Rate
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
LOOK: Final = Rate(20)
"""Unknown tokens that are looked up in the ledger for one network whose wrong tokens are used up."""
REMEMBERED: Final = 50_000
"""Accounts, networks and pairs of them that are counted each for itself, and pairs that logged in. Only a try
whose hash was worked out stays counted, and hashes take their time: no flood comes near this number."""


class Rates(Struct, frozen=True):
    """What a guard allows."""

    pair: Rate = PAIR
    account: Rate = ACCOUNT
    network: Rate = NETWORK
    register: Rate = REGISTER
    token: Rate = TOKEN


class LoginGuard:
    """One hub's. Times are arguments, in microseconds; a network is what `network_of` says.

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
        self._pairs = Quota(rates.pair, remembered)
        self._known_pairs = Quota(rates.pair, remembered)
        self._accounts = Quota(rates.account, remembered)
        self._networks = Quota(rates.network, remembered)
        self._registering = Quota(rates.register)
        self._tokens = Quota(rates.token)
        self._looks = Quota(LOOK)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._remembered = remembered

    # ── by password ──────────────────────────────────────────────────────────────────────────────

    def begin(self, account: str, network: str, now: int, *, known: bool = False) -> Callable[[], None]:
        """Count one try to log in; returns how to give it back, for a try that succeeds. Raises
        `TooManyLogins` if it may not be made now: then look at nothing. `known` says that the account has
        logged in from this network before."""
        pair = pair_of(account, network)
        if known:
            counted = [(self._known_pairs, pair)]
        else:
            counted = [(self._networks, network), (self._pairs, pair), (self._accounts, _short(account))]
        taken: list[tuple[Quota, str]] = []
        for quota, name in counted:
            wait = quota.take(name, now)
            if wait:
                _give_back(taken)
                raise TooManyLogins(f"too many tries; try again in {_seconds(wait)} s", wait)
            taken.append((quota, name))
        return lambda: _give_back(taken)

    def learn(self, account: str, network: str) -> None:
        """The account has logged in from this network."""
        pair = pair_of(account, network)
        self._known[pair] = None
        self._known.move_to_end(pair)
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)

    def knows(self, account: str, network: str) -> bool:
        """Whether the account has logged in from this network, as far as this guard remembers."""
        return pair_of(account, network) in self._known

    def register(self, network: str, now: int) -> None:
        """Count one account that a stranger makes; each one counts, since the disk is not endless."""
        wait = self._registering.take(network, now)
        if wait:
            raise TooManyLogins(f"too many accounts from here; try again in {_seconds(wait)} s", wait)

    # ── by token ─────────────────────────────────────────────────────────────────────────────────

    def look(self, network: str, now: int) -> Callable[[], None] | None:
        """Count one token that is not known and is to be looked up in the ledger; None if it may not be. A
        network that has shown too many wrong ones gets so many looks a second. Returns how to give the look
        back, for one that finds an account."""
        if not self._tokens.wait(network, now):
            return lambda: None
        if self._looks.take(network, now):
            return None
        return lambda: self._looks.give_back(network)

    def wrong_token(self, network: str, now: int) -> int:
        """Count a token that is nobody's; how long to wait before the next, 0 if it need not wait."""
        return self._tokens.take(network, now)


def pair_of(account: str, network: str) -> str:
    """A pair of account and network, of fixed length, whatever strangers call themselves."""
    return _short(f"{network}\0{account}")


def _short(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def _give_back(taken: list[tuple[Quota, str]]) -> None:
    while taken:
        quota, name = taken.pop()
        quota.give_back(name)


def _seconds(wait: int) -> int:
    return -(-wait // SECOND)
