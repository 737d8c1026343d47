"""Programs of a test's own run with every kind of fault; planted bugs are found, shrunk and replayed, and
programs that keep their promises pass."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import duly
from duly.errors import DulyError, Malformed, OutcomeError, ProgramError
from duly.testing import (
    CallFailed,
    History,
    Process,
    PromiseBroken,
    at_most_once,
    everyone_was_told,
    in_order,
    simulate,
)

RUNS = 40


# ── code that does not use duly ──────────────────────────────────────────────────────────────────


async def buys(process: Process) -> None:
    """A client that asks again until it is answered, as every client does."""
    process.wants("order-1")
    while True:
        try:
            outcome = await process.call("shop", "order-1")
        except TimeoutError:
            continue
        process.told("order-1", outcome)
        return


async def charges_whenever_asked(process: Process) -> None:
    async def charge(order: str) -> str:
        process.effect("charge", order)
        return "done"

    await process.serve(charge)


async def checks_then_charges(process: Process) -> None:
    async def charge(order: str) -> str:
        if process.load(order) is None:
            process.effect("charge", order)
            await process.save(order, "done")
        return "done"

    await process.serve(charge)


@pytest.mark.parametrize("shop", [charges_whenever_asked, checks_then_charges])
def test_a_double_charge_is_found_and_shown_with_one_fault(shop: Any) -> None:
    with pytest.raises(PromiseBroken) as broken:
        simulate(shop=shop, till=buys, runs=RUNS)
    said = str(broken.value)
    assert "at_most_once: charge of order-1 happened 2 times" in said
    assert re.search("shown with (1 fault|2 faults):", said)
    assert said.count("EFFECT charge order-1") == 2
    assert f"simulate(replay='{broken.value.name}', …)" in said


def test_a_failure_is_replayed_by_its_name_with_the_same_trace() -> None:
    with pytest.raises(PromiseBroken) as first:
        simulate(shop=checks_then_charges, till=buys, runs=RUNS)
    with pytest.raises(PromiseBroken) as again:
        simulate(shop=checks_then_charges, till=buys, replay=first.value.name)
    shown = [str(one.value).splitlines()[2:-1] for one in (first, again)]
    assert shown[0] == shown[1]


def test_a_race_of_two_questions_is_found_without_crashes() -> None:
    async def shop(process: Process) -> None:
        async def charge(order: str) -> str:
            if process.load(order) is None:
                await asyncio.sleep(0.1)  # the card company takes its time
                process.effect("charge", order)
                await process.save(order, "done")
            return "done"

        await process.serve(charge)

    with pytest.raises(PromiseBroken, match="charge of order-1 happened 2 times") as broken:
        simulate(shop=shop, till=buys, runs=RUNS, without={"crash", "delay"})
    assert "shown with 1 fault:" in str(broken.value)
    assert "REPEATED" in str(broken.value)


def test_a_program_that_goes_round_without_waiting_is_a_finding() -> None:
    async def polls(process: Process) -> None:
        process.note("looks for work")
        while process.load("work") is None:
            await asyncio.sleep(0)

    with pytest.raises(PromiseBroken, match="time does not pass") as broken:
        simulate(worker=polls, runs=RUNS)
    assert "looks for work" in str(broken.value)


def test_a_program_that_opens_a_real_socket_is_a_finding() -> None:
    async def connects(process: Process) -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    with pytest.raises(PromiseBroken, match="a real socket does not work in virtual time"):
        simulate(worker=connects, runs=RUNS)


def test_a_program_that_keeps_its_promises_passes() -> None:
    async def shop(process: Process) -> None:
        lock = asyncio.Lock()

        async def charge(order: str) -> str:
            async with lock:
                known = process.load(order)
                if known is None:
                    await process.save(order, "unknown")
                    process.effect("charge", order)
                    await process.save(order, "done")
                    return "done"
                return str(known)

        await process.serve(charge)

    assert simulate(shop=shop, till=buys, runs=RUNS, check=[at_most_once]) > RUNS


def test_messages_come_out_of_order_unless_their_receiver_sorts_them() -> None:
    async def remote(process: Process) -> None:
        for n in range(4):
            process.send("lamp", n)

    async def lamp(process: Process) -> None:
        while True:
            _, n = await process.receive()
            assert isinstance(n, int)
            process.effect("switch", f"{process.life}-{n}", lane="kitchen", n=n)

    with pytest.raises(PromiseBroken, match="switch number 0 of kitchen happened after number"):
        simulate(remote=remote, lamp=lamp, runs=RUNS, check=[in_order])


def test_a_program_that_gives_up_leaves_its_user_in_the_dark() -> None:
    async def gives_up(process: Process) -> None:
        process.wants("order-1")
        try:
            process.told("order-1", await process.call("shop", "order-1"))
        except TimeoutError:
            return

    with pytest.raises(PromiseBroken, match="no outcome of order-1 was ever reported"):
        simulate(shop=charges_whenever_asked, till=gives_up, runs=RUNS, check=[everyone_was_told])


def test_a_test_adds_checkers_of_its_own() -> None:
    def no_more_than_one_asks(history: History) -> Iterator[str]:
        if len(history.events) > 1:
            yield "too much has happened"

    with pytest.raises(PromiseBroken, match="no_more_than_one_asks: too much has happened"):
        simulate(shop=charges_whenever_asked, till=buys, check=[no_more_than_one_asks])


def test_a_program_that_raises_is_a_finding() -> None:
    async def broken(process: Process) -> None:
        raise ValueError("no paper")

    said = r"a program ended by ValueError\('no paper'\) in line \d+ of test_search.py"
    with pytest.raises(PromiseBroken, match=said):
        simulate(printer=broken)


def test_the_caller_learns_that_a_handler_raised() -> None:
    async def printer(process: Process) -> None:
        async def fail(job: str) -> None:
            raise ValueError("no paper")

        await process.serve(fail)

    async def user(process: Process) -> None:
        with pytest.raises(CallFailed, match=r"no paper.* in line \d+ of test_search.py"):
            await process.call("printer", "job")

    simulate(printer=printer, user=user, runs=0, without=["crash"])


def test_a_handler_may_be_a_plain_function_and_a_checker_stand_alone() -> None:
    async def printer(process: Process) -> None:
        await process.serve(lambda job: f"printed {job}")

    async def user(process: Process) -> None:
        assert await process.call("printer", "job") == "printed job"

    assert simulate(printer=printer, user=user, runs=0, without="crash", check=at_most_once) == 1


def test_what_is_saved_survives_a_crash_and_the_rest_does_not() -> None:
    lives: list[tuple[int, object]] = []

    async def program(process: Process) -> None:
        lives.append((process.life, process.load("life")))
        await process.save("life", process.life)
        await process.point()

    simulate(program=program, runs=0)
    # Calm, then a crash before and after the save and one at the point.
    assert lives == [(1, None), (1, None), (2, None), (1, None), (2, 1), (1, None), (2, 1)]


def test_tasks_of_a_dead_process_do_nothing_more() -> None:
    ticks = count()

    async def program(process: Process) -> None:
        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                process.effect("tick", f"{process.life} {next(ticks)}")

        ticking = asyncio.create_task(tick())
        if process.life == 1:
            await process.save("x", 1)
            await asyncio.sleep(20)
        ticking.cancel()

    def first_life_ended(history: History) -> Iterator[str]:
        lives = [event.life for event in history.effects()]
        if lives != sorted(lives):
            yield "a dead process went on"

    simulate(program=program, runs=RUNS, check=[first_life_ended])


# ── duly's own ───────────────────────────────────────────────────────────────────────────────────


async def commands(process: Process) -> None:
    key = "1700000000000_1"
    async with process.app() as app:
        process.wants(key)
        while True:
            try:
                await app.send("lock", "lock_control", "open", id=key)
            except OutcomeError:
                process.told(key, "unknown")
            except DulyError:
                await asyncio.sleep(1)  # the lock is offline
                continue
            else:
                process.told(key, "done")
            return


def lock_with(effect: Any) -> Any:
    async def lock(process: Process) -> None:
        device = process.device()

        @device.on("lock_control", effect=effect)
        async def open_(command: Any) -> str:
            process.effect("open", command.id)
            return "open"

        await device.run()

    return lock


def test_a_device_opens_at_most_once_if_its_handler_says_so() -> None:
    simulate(lock=lock_with("at_most_once"), phone=commands, runs=RUNS, check=[at_most_once])


def test_a_handler_that_should_have_said_so_is_found() -> None:
    with pytest.raises(PromiseBroken, match="open of 1700000000000_1 happened 2 times"):
        simulate(lock=lock_with("at_least_once"), phone=commands, runs=RUNS, check=[at_most_once])


def test_a_function_that_runs_once_does() -> None:
    def shop_with(effect: Any) -> Any:
        async def shop(process: Process) -> None:
            @duly.once(process.ledger, scope="shop", key=lambda order: order, effect=effect)
            async def charge(order: str) -> str:
                process.effect("charge", order)
                return "done"

            async def handler(order: str) -> object:
                try:
                    return await charge(order)
                except duly.Unknown:
                    return "unknown"

            await process.serve(handler)

        return shop

    simulate(shop=shop_with("at_most_once"), till=buys, runs=RUNS)
    with pytest.raises(PromiseBroken, match="charge of order-1 happened 2 times"):
        simulate(shop=shop_with("at_least_once"), till=buys, runs=RUNS)


def test_a_consumer_runs_a_lane_once_and_in_order() -> None:
    async def remote(process: Process) -> None:
        for n in range(4):
            while True:
                try:
                    await process.call("lamp", n)
                    break
                except TimeoutError:
                    continue

    async def lamp(process: Process) -> None:
        async def switch(message: duly.QueueMessage) -> None:
            process.effect("switch", message.id, lane="kitchen", n=message.n)

        async with duly.Consumer(process.ledger, switch, order="latest") as consumer:

            async def taken(n: int) -> str:
                await consumer.accept(duly.QueueMessage(str(n), sender="remote", lane="kitchen", n=n))
                return "stored"

            await process.serve(taken)

    simulate(remote=remote, lamp=lamp, runs=RUNS)


def test_a_node_carries_a_task_out_once() -> None:
    async def worker(process: Process) -> None:
        node = process.node()

        @node.task("turn_on", effect="at_most_once")
        async def turn_on(task: Any) -> str:
            process.effect("turn_on", task.id)
            return "on"

        await node.run()

    async def asker(process: Process) -> None:
        async with process.node() as node:
            try:
                await node.call("worker", "turn_on", id="task-1", expires=3_600)
            except (OutcomeError, duly.Conflict):
                return

    simulate(worker=worker, asker=asker, runs=RUNS, check=[at_most_once])


def test_a_sentinels_alert_reaches_the_hub() -> None:
    async def phone(process: Process) -> None:
        process.wants("alert")
        async with process.sentinel() as sentinel:
            alert = sentinel.trigger("fall", "belt", severity="critical", countdown=0)
            await alert.sent
            process.told("alert", "sent")

    simulate(phone=phone, runs=RUNS, check=[everyone_was_told])


# ── wrong use ────────────────────────────────────────────────────────────────────────────────────


def plain(process: Process) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs programs"),
        ({"shop": plain}, "nor a program, which is an async function"),
        ({"till": buys, "faults": ["drop"]}, "faults= is neither an option"),
        ({"till": buys, "without": "rain"}, "without=rain is not known"),
        ({"hub": buys}, "the hub's name"),
        ({"till": buys, "without": ["rain"]}, "use drop, repeat"),
        ({"till": buys, "runs": -1}, "0 or more"),
        ({"till": buys, "check": "at_most_once"}, "is not a checker"),
        ({"till": buys, "check": [None]}, "is not a checker"),
        ({"till": buys, "replay": "seven"}, "not the name of a run"),
    ],
)
def test_wrong_use_is_named(options: Any, says: str) -> None:
    with pytest.raises((ProgramError, Malformed), match=says):
        simulate(**options)


async def test_it_is_not_called_from_an_async_test() -> None:
    with pytest.raises(ProgramError, match="from a plain test"):
        simulate(till=buys)


def test_a_process_that_is_not_there_is_named() -> None:
    with pytest.raises(PromiseBroken, match="there is no process 'shop'; the processes of this run are till"):
        simulate(till=buys)


def test_a_process_has_one_client() -> None:
    async def both(process: Process) -> None:
        process.app()
        process.device()

    with pytest.raises(PromiseBroken, match="a process is one client"):
        simulate(both=both)
