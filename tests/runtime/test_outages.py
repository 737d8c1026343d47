"""An outage begins and ends with one line each."""

from __future__ import annotations

import logging

import pytest

from duly.runtime.outages import Outages


def test_an_outage_is_two_lines_however_long_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    time = iter((10.0, 72.5))
    outages = Outages(lambda: next(time))
    with caplog.at_level(logging.INFO, "duly.outage"):
        outages.see({"the broker": None, "the notifier": ""})
        for _ in range(5):
            outages.see({"the broker": "connection refused", "the notifier": None})
        assert set(outages.current) == {"the broker"}
        outages.see({"the broker": None})
        outages.see({"the broker": None})
    assert [record.getMessage() for record in caplog.records] == [
        "the broker does not work: connection refused",
        "the broker works again, after 62.5 s",
    ]
    assert caplog.records[1].__dict__["seconds"] == 62.5
    assert outages.current == {}
