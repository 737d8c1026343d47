"""A cache of values that expire may forget, but never lies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duly.core.expiring_cache import ExpiringCache
from duly.errors import Malformed


def test_a_value_is_known_before_its_time_and_not_at_it() -> None:
    cache = ExpiringCache[str](10)
    cache.put(b"a", "done", until=100)
    assert cache.get(b"a", 99) == "done"
    assert cache.get(b"a", 100) is None
    assert len(cache) == 0


def test_a_later_value_replaces_the_earlier_one() -> None:
    cache = ExpiringCache[str](10)
    cache.put(b"a", "accepted", until=100)
    cache.put(b"a", "done", until=50)
    assert (cache.get(b"a", 49), cache.get(b"a", 50)) == ("done", None)


def test_over_capacity_the_least_recently_put_goes_and_reading_does_not_count() -> None:
    cache = ExpiringCache[int](2)
    cache.put(b"a", 1, until=100)
    cache.put(b"b", 2, until=100)
    cache.put(b"a", 3, until=100)
    assert cache.get(b"b", 0) == 2
    cache.put(b"c", 4, until=100)
    assert [cache.get(key, 0) for key in (b"a", b"b", b"c")] == [3, None, 4]


def test_what_is_dropped_is_unknown_and_dropping_the_unknown_is_nothing() -> None:
    cache = ExpiringCache[int](2)
    cache.put(b"a", 1, until=100)
    cache.drop(b"a")
    cache.drop(b"a")
    assert cache.get(b"a", 0) is None


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_of_nothing_is_malformed(capacity: int) -> None:
    with pytest.raises(Malformed):
        ExpiringCache(capacity)


keys = st.sampled_from([b"a", b"b", b"c", b"d"])
steps = st.one_of(
    st.tuples(st.just("put"), keys, st.integers(0, 20)),
    st.tuples(st.just("get"), keys, st.integers(0, 20)),
    st.tuples(st.just("drop"), keys, st.just(0)),
)


@settings(max_examples=200)
@given(st.lists(steps), st.integers(1, 4))
def test_a_cache_may_forget_but_never_lies(script: list[tuple[str, bytes, int]], capacity: int) -> None:
    """Against a model that keeps every put; with room for every key, nothing alive is forgotten either."""
    cache, puts = ExpiringCache[int](capacity), dict[bytes, tuple[int, int]]()
    for n, (verb, key, time) in enumerate(script):
        if verb == "put":
            cache.put(key, n, time)
            puts[key] = (n, time)
        elif verb == "drop":
            cache.drop(key)
            puts.pop(key, None)
        else:
            value, until = puts.get(key, (None, 0))
            known, told = value if until > time else None, cache.get(key, time)
            assert told == known or (told is None and capacity < 4)
            if known is None:
                puts.pop(key, None)
        assert len(cache) <= capacity
