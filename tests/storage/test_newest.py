"""The list for people: every ledger shows messages whose ids have no time where they were accepted."""

from __future__ import annotations

from typing import Any

from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.units import MS
from duly.storage.ledger import Ledger
from duly.storage.message_filter import ANY_MESSAGE, OPEN_STATES, MessageFilter
from tests.storage.making import admit, message


async def test_ids_without_a_time_are_listed_by_their_acceptance(ledger: Ledger) -> None:
    start = 1_700_000_000_000
    timed = [message(n, ms=start + 10 * n, scope="app") for n in range(6)]
    for n in range(6):  # accepted between two of them, in the opposite order of their ids
        await ledger.commit([(admit(timed[n], at=(start + 10 * n) * MS, state=State.DONE),)])
        untimed = Message("api", f"order-{9 - n}", "k", "r")
        await ledger.commit([(admit(untimed, at=(start + 10 * n + 5) * MS),)])
    expected = [name for n in reversed(range(6)) for name in (f"order-{9 - n}", timed[n].id)]

    async def listed(wanted: MessageFilter = ANY_MESSAGE, **asked: Any) -> list[list[str]]:
        found: list[list[str]] = []
        before: bytes | None = None
        while True:
            page = await ledger.newest(wanted=wanted, before=before, **asked)
            found.append([record.message.id for record in page.records])
            before = page.next
            if before is None:
                return found

    for limit in (1, 2, 5, 100):
        in_pages = await listed(limit=limit)
        assert [name for page in in_pages for name in page] == expected
        assert {len(page) for page in in_pages[:-1]} <= {limit}
    for asked in (
        MessageFilter(recipient="r"),
        MessageFilter(scope="api"),
        MessageFilter(states=OPEN_STATES),
    ):
        for look_at in (3, 4, 100):
            found = [name for page in await listed(asked, look_at=look_at, limit=3) for name in page]
            wanted = [name for name in expected if name.startswith("order")]
            assert found == wanted, (asked, look_at)
    since = MessageFilter(since=(start + 11) * MS, until=(start + 30) * MS)
    assert await listed(since) == [["order-7", timed[2].id, "order-8"]]


async def test_too_many_ids_without_a_time_to_be_sorted_come_last(
    ledger: Ledger,
) -> None:
    untimed = [Message("app", f"order-{n}", "k", "r") for n in range(5)]
    timed = message(0, ms=1_700_000_000_000)
    await ledger.admit_many([timed, *untimed])
    first = await ledger.newest(limit=3, look_at=2)
    rest = await ledger.newest(limit=3, look_at=2, before=first.next)
    assert [one.message for one in (*first.records, *rest.records)] == [timed, *untimed[::-1]]
