"""Hashes and checks passwords with argon2id, in threads, a few at a time.

A hash costs 64 MB and a tenth of a second, so only a few are computed at once and only so many wait;
further callers are asked to come back. Callers who have logged in before have a thread and a queue of
their own, which goes first: a flood of strangers costs them neither a refusal nor a wait. One network may
have only a few hashes waiting among those of strangers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from duly.core.units import SECOND
from duly.errors import Malformed, Overloaded

AT_ONCE: Final = 3
RESERVED: Final = 1
"""The number of these threads that only callers use who have logged in before."""
WAITING: Final = 64
"""Hashes that may wait in each of the two queues."""
PER_NETWORK: Final = 4
"""Hashes of strangers from one network that may wait or be under way."""

PASSWORD_LEAST: Final = 8
PASSWORD_MOST: Final = 1_024

T = TypeVar("T")


class PasswordHashing:
    """The password hashes that one hub has to compute."""

    def __init__(
        self,
        at_once: int = AT_ONCE,
        reserved: int = RESERVED,
        waiting: int = WAITING,
        per_network: int = PER_NETWORK,
    ) -> None:
        self._hasher = PasswordHasher()
        self._decoy = ""
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="duly-argon2")
        self._free = at_once
        self._reserved = reserved
        self._most = waiting
        self._per_network = per_network
        self._first: deque[asyncio.Future[None]] = deque()
        self._strangers: deque[asyncio.Future[None]] = deque()
        self._networks: Counter[str] = Counter()

    def close(self) -> None:
        """Drop what waits; hashes under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def hash(self, password: str, network: str, *, first: bool = False) -> str:
        """Return the hash of a password, to be stored. `first`: the caller has logged in before."""
        return await self.run(lambda: self._hasher.hash(password), network, first=first)

    async def matches(self, stored: str, password: str, network: str, *, first: bool = False) -> bool:
        """Return whether this is the password of that hash. An empty hash, of a name that is unknown, takes
        as long as any: the time would reveal which names exist."""
        return await self.run(lambda: self._matches(stored, password), network, first=first)

    def _matches(self, stored: str, password: str) -> bool:
        if not self._decoy:
            self._decoy = self._hasher.hash(secrets.token_urlsafe(16))
        try:
            self._hasher.verify(stored or self._decoy, password[:PASSWORD_MOST])
            return bool(stored)
        except (VerificationError, InvalidHashError):
            return False

    async def run(self, work: Callable[[], T], network: str, *, first: bool = False) -> T:
        """Run `work` in a thread and return its result. `first`: the caller has logged in before."""
        if first:
            return await self._run(work, self._first, 0)
        if self._networks[network] >= self._per_network:
            raise _overloaded("too many logins from your address are waiting")
        self._networks[network] += 1
        try:
            return await self._run(work, self._strangers, self._reserved)
        finally:
            self._networks[network] -= 1
            if not self._networks[network]:
                del self._networks[network]

    async def _run(self, work: Callable[[], T], queue: deque[asyncio.Future[None]], spare: int) -> T:
        await self._turn(queue, spare)
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        job.add_done_callback(lambda _: self._next())
        # A caller that gives up does not free the thread: only the end of the work does.
        return await asyncio.shield(job)

    async def _turn(self, queue: deque[asyncio.Future[None]], spare: int) -> None:
        """Take a thread, leaving so many to others; wait for one if there is none."""
        if self._free > spare:
            self._free -= 1
            return
        if len(queue) >= self._most:
            raise _overloaded("too many logins are under way")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                queue.remove(turn)
            else:
                self._next()
            raise

    def _next(self) -> None:
        self._free += 1
        for queue, spare in ((self._first, 0), (self._strangers, self._reserved)):
            while queue and self._free > spare:
                turn = queue.popleft()
                if not turn.done():
                    self._free -= 1
                    turn.set_result(None)


def check_password(password: str) -> None:
    """Raise `Malformed` if a new password is too short or too long."""
    if not PASSWORD_LEAST <= len(password) <= PASSWORD_MOST:
        raise Malformed(f"a password has {PASSWORD_LEAST} to {PASSWORD_MOST} characters; choose another")


def _overloaded(why: str) -> Overloaded:
    problem = Overloaded(f"{why}; try again in a few seconds")
    problem.wait = 3 * SECOND
    return problem
