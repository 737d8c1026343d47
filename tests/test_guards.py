"""A test waits for what must happen until its own limit ends it (tests/guard.py), and has a time-out of its
own only where the time-out is what it is about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent
TIMEOUT: Final = re.compile(r"\basyncio\.(?:timeout\(|wait_for\(.*, )\d[\d._]*\)")
LEFT_OUT: Final = ("core/", "testing/")
"""What runs in virtual time, and clients with bugs, which have time-outs as real ones do."""
OWN_TIMEOUTS: Final[dict[str, tuple[int, str]]] = {
    "broker/test_embedded.py": (2, "a publish that cannot be stored; a stop that is cancelled"),
    "clients/test_sentinel.py": (3, "what is neither sent nor stored while it cannot be"),
    "end_to_end/test_bounds.py": (1, "a client that goes, whether it was refused or not"),
    "end_to_end/test_faults.py": (1, "a hub that does not answer is asked again"),
    "end_to_end/test_http_fuzz.py": (1, "a request that is never whole is not answered"),
    "end_to_end/test_mqtt_firmware.py": (1, "what would be sent again is not"),
    "runtime/test_engine.py": (1, "in virtual time"),
    "test_run_once.py": (1, "the news travels before a lease would run out"),
}


def test_each_time_out_of_a_test_has_a_reason() -> None:
    found = {
        file.relative_to(TESTS).as_posix(): count
        for file in sorted(TESTS.rglob("*.py"))
        if (count := len(TIMEOUT.findall(file.read_text(encoding="utf-8"))))
    }
    found = {file: count for file, count in found.items() if not file.startswith(LEFT_OUT)}
    assert found == {file: count for file, (count, _) in OWN_TIMEOUTS.items()}
