"""What the judges of kill tests show of a log."""

from __future__ import annotations

from tests.end_to_end.processes import tracebacks

LOG = """hub starts
Task exception was never retrieved
future: <Task finished>
Traceback (most recent call last):
  File "hub.py", line 1, in start
    await ledger.open()
ConnectionResetError: gone
hub serves
{"level": "error", "message": "it failed", "exc": "Traceback (most recent call last): ..."}
hub stops
"""


def test_every_traceback_of_a_log_is_shown_with_where_it_was_caught() -> None:
    shown = tracebacks(LOG * 1_000)
    assert shown.count("ConnectionResetError: gone") == shown.count("it failed") == 1_000
    assert tracebacks(LOG).splitlines()[:6] == ["", *LOG.splitlines()[2:7]]
    assert tracebacks("hub starts\nhub stops\n") == ""
