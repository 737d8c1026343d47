"""What hubs that share a ledger ask of it: the same of every ledger."""

from __future__ import annotations

from duly.core import operations as w
from duly.core.lifecycle import State
from duly.core.messages import Answer
from duly.storage.ledger import Ledger
from tests.storage.making import admit, message

CHANNEL = "device"


async def book(ledger: Ledger, n: int, recipient: str, worker: str = "", expires: int = 0) -> bytes:
    """A delivery that waits, or that `worker` holds."""
    m = message(n, recipient=recipient)
    ref = w.DeliveryRef(m.key, CHANNEL, recipient)
    deliver = w.Deliver(ref, 100, expires, 1 if worker else 0, worker)
    await ledger.write(admit(m, at=n, then=(deliver,)))
    return m.key


async def strays(ledger: Ledger, *here: str, now: int = 50) -> list[bytes]:
    found = await ledger.strays(CHANNEL, here=here, worker="me", living=["me", "other"], now=now)
    return [item.message.key for item in found]


async def test_a_hub_sees_to_what_others_hold_for_a_recipient_who_is_here(ledger: Ledger) -> None:
    booked = await book(ledger, 1, "lock")
    theirs = await book(ledger, 2, "lock", "other")
    await book(ledger, 3, "lock", "me")
    await book(ledger, 4, "lamp")
    await book(ledger, 5, "lamp", "other")
    assert await strays(ledger, "lock", "door") == [booked, theirs]
    assert await strays(ledger) == []


async def test_what_is_booked_for_a_recipient_is_found_by_his_name(ledger: Ledger) -> None:
    booked = [await book(ledger, n, "lock") for n in (3, 1, 2)]
    await book(ledger, 4, "lock", "other")
    await book(ledger, 5, "lamp")
    found = await ledger.booked(CHANNEL, ["lock", "door"])
    assert [item.message.key for item in found] == sorted(booked)
    assert await ledger.booked("another", ["lock"]) == []


async def test_what_waits_for_recipients_whom_no_hub_holds_is_counted(ledger: Ledger) -> None:
    for n, recipient, worker in ((1, "lock", ""), (2, "lock", ""), (3, "lamp", ""), (4, "door", "other")):
        await book(ledger, n, recipient, worker)
    found = await ledger.unheld(CHANNEL)
    accepted = [item.accepted_at for item in await ledger.open_deliveries(CHANNEL)]
    assert found == {"lock": (2, min(accepted[:2])), "lamp": (1, accepted[2])}
    assert await ledger.unheld("another") == {}


async def test_a_hub_sees_to_what_a_dead_one_held(ledger: Ledger) -> None:
    dead = await book(ledger, 1, "lock", "dead")
    await book(ledger, 2, "lock", "other")
    assert await strays(ledger) == [dead]


async def test_a_hub_expires_what_waited_for_no_recipient(ledger: Ledger) -> None:
    over = await book(ledger, 1, "lock", expires=50)
    await book(ledger, 2, "lock", expires=51)
    await book(ledger, 3, "lock")
    await book(ledger, 4, "lock", "other", expires=50)
    assert await strays(ledger) == [over]


async def test_what_has_ended_is_left_to_no_hub(ledger: Ledger) -> None:
    key = await book(ledger, 1, "lock", "dead", expires=1)
    end = w.Advance(key, State.DONE, 2, Answer())
    await ledger.write(w.Finish(w.DeliveryRef(key, CHANNEL, "lock"), None, State.DONE, then=(end,)))
    assert await strays(ledger, "lock") == []


async def test_a_stray_comes_whole(ledger: Ledger) -> None:
    await book(ledger, 1, "lock", "dead")
    (all_of_it,) = await ledger.open_deliveries(CHANNEL)
    assert await ledger.strays(CHANNEL, here=[], worker="me", living=["me"], now=0) == [all_of_it]


async def test_many_messages_are_found_at_once(ledger: Ledger) -> None:
    messages = [message(n) for n in range(3)]
    for m in messages[:2]:
        await ledger.admit(m)
    await ledger.write(w.Advance(messages[0].key, State.DONE, 2, Answer(0, b"yes")))
    found = {record.message.key: record for record in await ledger.find_all([m.key for m in messages])}
    assert found == {m.key: await ledger.find(m.key) for m in messages[:2]}
    assert await ledger.find_all([]) == []


async def test_the_ends_of_many_streams_are_told_at_once(ledger: Ledger) -> None:
    for _ in range(3):
        await ledger.write(w.AppendEntry("one", b"", 1))
    await ledger.write(w.AppendEntry("two", b"", 1))
    await ledger.trim("two", 1)
    assert await ledger.lasts(["one", "two", "none"]) == {"one": 3, "two": 1}
    assert await ledger.lasts([]) == {}


async def test_many_items_and_buckets_are_asked_for_at_once(ledger: Ledger) -> None:
    await ledger.write(w.PutItem("one", "a", b"1"), w.PutItem("one", "b", b""), w.PutItem("two", "a", b"2"))
    places = [("two", "a"), ("one", "c"), ("one", "b"), ("none", "a"), ("two", "a")]
    assert await ledger.items(places) == [b"2", None, b"", None, b"2"]
    assert await ledger.items([]) == []
    assert await ledger.counts(["one", "two", "none"]) == {"one": 2, "two": 1}
    assert await ledger.counts([]) == {}


async def test_an_item_is_dropped_only_if_it_is_still_the_same(ledger: Ledger) -> None:
    await ledger.write(w.PutItem("registry", "lock", b"here"))
    assert (await ledger.write(w.DropItem("registry", "lock", b"there"))).values == [False]
    assert await ledger.item("registry", "lock") == b"here"
    taking = (w.DropItem("registry", "lock", b"here"), w.PutNewItem("registry", "lock", b"mine"))
    assert (await ledger.write(*taking)).values == [True, True]
    assert (await ledger.write(*taking)).values == [False, False]
    assert await ledger.item("registry", "lock") == b"mine"
    assert (await ledger.write(w.DropItem("registry", "nobody", b""))).values == [False]


async def test_marks_are_told_by_the_beginning_of_their_names(ledger: Ledger) -> None:
    names = ['["lamp","a","app"]', '["lamp","ü\U0010ffff","app"]', '["lamp2","a","app"]', "ids"]
    for n, name in enumerate(names):
        await ledger.write(w.RaiseMark(name, n, 1))
    assert set(await ledger.marks('["lamp",')) == set(names[:2])
    assert set(await ledger.marks()) == set(names)
