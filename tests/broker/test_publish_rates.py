"""A user that publishes too fast is named, and what a device answers does not count; that the broker then
disconnects it, and the hub reads on, is tested with a real broker in `test_embedded.py`."""

from __future__ import annotations

import pytest

from duly.broker.acl_dialects import DEVICES
from duly.broker.callout import BrokerConnection
from duly.broker.publish_rates import ANSWERED, ANSWERED_LATER, BACKLOG, PUBLISHED, PublishRates, backlogged
from duly.core.acl import HUB

FLOOD = PUBLISHED[DEVICES].amount * 100


@pytest.mark.parametrize(("published", "flooding"), [(1, []), (FLOOD, [7])])
def test_a_user_that_publishes_too_fast_is_named_and_no_other(published: int, flooding: list[int]) -> None:
    connections = [
        BrokerConnection(1, HUB, DEVICES, FLOOD, 0),
        BrokerConnection(7, "thief", DEVICES, published, 0),
        BrokerConnection(8, "lock", DEVICES, 5, 10 * BACKLOG),
    ]
    assert [one.cid for one in PublishRates().flooding(connections, {}, now=0)] == flooding


def test_the_hub_leaves_a_backlog_over_the_limit_and_devices_keep_theirs() -> None:
    connections = [
        BrokerConnection(1, HUB, DEVICES, 0, BACKLOG + 1),
        BrokerConnection(2, HUB, DEVICES, 0, BACKLOG),
        BrokerConnection(8, "lock", DEVICES, 5, 10 * BACKLOG),
    ]
    assert backlogged(connections) == [1]


def test_what_a_device_answers_is_no_flood_and_what_it_adds_is() -> None:
    rates = PublishRates()
    burst, tasks = PUBLISHED[DEVICES].burst, 1_000

    def floods(total: int, given: int) -> bool:
        connections = [BrokerConnection(7, "lock", DEVICES, total)]
        return bool(list(rates.flooding(connections, {"lock": given} if given else {}, now=0)))

    assert not floods(tasks * ANSWERED, tasks), "answers to what it was given just now"
    assert not floods(tasks * ANSWERED, tasks)
    assert not floods(tasks * ANSWERED + ANSWERED_LATER, 0), "answers to what it was given before"
    assert floods(tasks * ANSWERED + ANSWERED_LATER + burst * 3, 0), "more than it was given"
