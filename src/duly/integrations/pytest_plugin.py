"""The pytest plugin: the fixture `simulate`, and the options that replay a failure.

It is loaded in every test run of an environment with duly, so it imports nothing of duly before it is used.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("duly", "simulated runs")
    group.addoption(
        "--duly-replay", default="", metavar="NAME", help="only this simulated run, as a failure printed it"
    )
    group.addoption("--duly-runs", type=int, default=None, metavar="N", help="so many random runs a test")


@pytest.fixture
def simulate(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Run the test's programs in virtual time, with faults: `duly.testing.simulate` with the options of this
    test run. A failure says how to replay it."""
    from duly.testing.programs.search import simulate as run

    asked: dict[str, object] = {"replay": request.config.getoption("--duly-replay")}
    runs = request.config.getoption("--duly-runs")
    if runs is not None:
        asked["runs"] = runs
    command = f"pytest {shlex.quote(request.node.nodeid)} --duly-replay=NAME"

    call: Callable[..., int] = run

    def with_options(**given: object) -> int:
        __tracebackhide__ = True
        return call(**{"command": command, **given, **asked})

    return with_options
