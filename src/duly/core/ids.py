"""Ids: created once by the sender, unique, and carrying their own age.

The law: a generator never repeats an id and never goes backwards, whatever the clock does. The horizon rule
needs only the time in the id: an old message is stale no matter how it arrived. Randomness and time are
arguments, so that a run can be repeated exactly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from duly.core.units import MS
from duly.errors import Malformed

_MS_LIMIT: Final = 1 << 48  # also the limit of a UUIDv7: the year 10889
_N_LIMIT: Final = 1 << 63  # a signed 64-bit column
_TAIL_BITS: Final = 74  # the bits of a UUIDv7 besides time, version and variant
_TAIL_LIMIT: Final = 1 << _TAIL_BITS

_read_seq_id: Final = re.compile(r"(0|[1-9][0-9]{0,14})_(0|[1-9][0-9]{0,18})").fullmatch
_read_uuid7: Final = re.compile(
    "([h]{8})-([h]{4})-7[h]{3}-[89abAB][h]{3}-[h]{12}".replace("h", "0-9a-fA-F")  # IGNORECASE is slower
).fullmatch
_UUID_LENGTH: Final = 36  # longer than any seq_id
_SHORT: Final = 20  # a counter in so short an id cannot be too large


@dataclass(frozen=True, slots=True, order=True)
class SeqId:
    """An id ``{ms}_{n}``: when it was created, and the sender's own counter, which alone decides the order.

    >>> SeqId.parse("1700000000000_7")
    SeqId(ms=1700000000000, n=7)
    >>> str(SeqId(1700000000000, 8))
    '1700000000000_8'
    """

    ms: int
    n: int

    def __post_init__(self) -> None:
        if not (0 <= self.ms < _MS_LIMIT and 0 <= self.n < _N_LIMIT):
            raise Malformed(f"a seq_id needs 0 ≤ ms < 2^48 and 0 ≤ n < 2^63, not {self.ms} and {self.n}")

    @classmethod
    def parse(cls, text: str) -> SeqId:
        """Parse the id in ``text``. Each id has exactly one spelling, so that equal ids are equal strings."""
        found = _read_seq_id(text)
        if found is None:
            raise Malformed(
                f"a seq_id is milliseconds, an underscore and a counter, like 1700000000000_1, in plain "
                f"digits without leading zeros; got {text[:60]!r}. Mint a new id in this form."
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.ms}_{self.n}"


class SeqIds:
    """Generates the ids of one sender: ``ms`` never falls, ``n`` rises by one with every id and never resets.

    Store ``last`` with every id: the next run continues right after it.

    >>> ids = SeqIds()
    >>> str(ids.next(5_000)), str(ids.next(1_000))
    ('5_0', '5_1')
    >>> str(SeqIds(ids.last).next(9_000))
    '9_2'
    """

    __slots__ = ("_last",)

    def __init__(self, last: SeqId | None = None) -> None:
        self._last = last

    @property
    def last(self) -> SeqId | None:
        """The newest id handed out, or the one started from: persist it."""
        return self._last

    def next(self, now: int) -> SeqId:
        """Return a new id."""
        self._last = SeqId(self._ms(now), self._n + 1)
        return self._last

    @property
    def _n(self) -> int:
        return -1 if self._last is None else self._last.n

    def _ms(self, now: int) -> int:
        return max(now // MS, 0 if self._last is None else self._last.ms)


def uuid7(now: int, random_bits: int) -> str:
    """Return a version 7 UUID (RFC 9562) of this time, with the low 74 of the random bits.

    >>> uuid7(1_645_557_742_000_000, 0xCC3 << 62 | 0x18C4DC0C0C07398F)
    '017f22e2-79b0-7cc3-98c4-dc0c0c07398f'
    """
    return _uuid7(now // MS, random_bits % _TAIL_LIMIT)


class Uuid7Ids:
    """Generates UUIDv7s that sort in order of creation, even within a millisecond and when the clock goes
    back.

    Within one millisecond the random part grows by a random step, so that ids stay hard to guess; when it is
    full, the time advances by a millisecond. A generator that starts from the persisted ``last`` continues
    after it.

    >>> ids = Uuid7Ids()
    >>> ids.next(5_000, 2**80 - 1) < ids.next(5_000, 0) < ids.next(1_000, 0)
    True
    """

    __slots__ = ("_ms", "_tail")

    def __init__(self, last: str | None = None) -> None:
        self._ms, self._tail = -1, 0
        if last is not None:
            if not _read_uuid7(last):
                raise Malformed(f"{last[:60]!r} is not a version 7 UUID: start from one, or from nothing")
            number = int(last.replace("-", ""), 16)
            self._ms = number >> 80
            self._tail = (number >> 64 & 0xFFF) << 62 | number & (1 << 62) - 1

    @property
    def last(self) -> str | None:
        """The newest id handed out, or the one started from: persist it."""
        return None if self._ms < 0 else _uuid7(self._ms, self._tail)

    def next(self, now: int, random_bits: int) -> str:
        """Return a new id, made from at least 74 fresh random bits."""
        fresh = random_bits % (_TAIL_LIMIT >> 1)  # the highest bit starts at zero, to leave room to grow
        ms, tail = now // MS, fresh
        if ms <= self._ms:
            ms, tail = self._ms, self._tail + 1 + random_bits % (1 << 32)
            if tail >= _TAIL_LIMIT:
                ms, tail = self._ms + 1, fresh
        text = _uuid7(ms, tail)
        self._ms, self._tail = ms, tail
        return text


def _uuid7(ms: int, tail: int) -> str:
    if not 0 <= ms < _MS_LIMIT:
        raise Malformed(f"a UUIDv7 needs a time from 0 to 2^48 milliseconds, not {ms}: set the clock")
    number = ms << 80 | 0x7 << 76 | (tail >> 62) << 64 | 0b10 << 62 | tail & (1 << 62) - 1
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def uuid7_time(text: str) -> int | None:
    """Return the microsecond time of a version 7 UUID in its usual spelling, or None if it is not one.

    >>> uuid7_time("017f22e2-79b0-7cc3-98c4-dc0c0c07398f")
    1645557742000000
    """
    found = _read_uuid7(text)
    return None if found is None else int(found[1] + found[2], 16) * MS


def time_of(id: str) -> int | None:
    """Return the microsecond time that an id carries (a SeqId or a UUIDv7), or None.

    >>> time_of("1700000000000_7"), time_of("order-66")
    (1700000000000000, None)
    """
    return read(id)[0]


def counter_of(id: str) -> int | None:
    """Return the sender's counter in an id, or None if it has none, like a UUID. A misspelled seq_id is
    `Malformed`.

    >>> counter_of("1700000000000_7"), counter_of("order-66")
    (7, None)
    """
    n = read(id)[1]
    if n is not None:
        return n
    head, _, tail = id.partition("_")
    return SeqId.parse(id).n if head.isdecimal() and tail.isdecimal() else None


def read(id: str) -> tuple[int | None, int | None]:
    """Return the time (µs) and the counter in an id; each is None if it is missing."""
    # The length tells the two forms apart, so that neither costs an exception.
    if len(id) == _UUID_LENGTH:
        return uuid7_time(id), None
    found = _read_seq_id(id)
    if found is None:
        return None, None
    ms, n = int(found[1]), int(found[2])
    if ms < _MS_LIMIT and n < _N_LIMIT:
        return ms * MS, n
    return None, n if len(id) <= _SHORT else None


def event_id(
    *, sentinel: str, tower: str, profile: str, reason: str, session: str, device: str, window_start: int
) -> str:
    """Return the id of an alert: the same episode of the same device in the same session has the same id.

    It is a hash of canonical JSON, since joining with a dash would give ("a-b", "c") and ("a", "b-c") the
    same id. ``window_start`` is the time of its first event. Create it once and store it; do not compute it
    again.
    """
    fields = {
        "sentinel": sentinel,
        "tower": tower,
        "profile": profile,
        "reason": reason,
        "session": session,
        "device": device,
        "window_start": window_start,
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        return sha256(text.encode()).hexdigest()[:32]
    except UnicodeEncodeError as error:
        raise Malformed("an event's fields must be valid Unicode, without half a surrogate pair") from error
