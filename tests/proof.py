"""What is long by nature has two sizes: one round in `make test`, and the whole of it in `make proof`, which
counts what was tried."""

from __future__ import annotations

import pytest
from proof.counts import count

__all__ = ["TWO_SIZES", "count"]

TWO_SIZES = pytest.mark.parametrize(
    "whole", [pytest.param(False, id="one round"), pytest.param(True, id="whole", marks=pytest.mark.proof)]
)
"""The test takes `whole: bool`: whether it goes through all of it."""

WHOLE = pytest.mark.parametrize("whole", [pytest.param(True, id="whole", marks=pytest.mark.proof)])
"""The same, where other tests of `make test` show one round already."""
