"""What is long by nature has two sizes: one round in `make test`, and the whole of it in `make proof`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TWO_SIZES = pytest.mark.parametrize(
    "whole", [pytest.param(False, id="one round"), pytest.param(True, id="whole", marks=pytest.mark.proof)]
)
"""The test takes `whole: bool`: whether it goes through all of it."""


def count(what: str, many: int, replay: str = "") -> None:
    """Add to a figure of `make proof`: so many cases of one kind were tried, and nothing was wrong."""
    counts = os.environ.get("DULY_PROOF_COUNTS")
    if counts:
        with Path(counts).open("a") as file:
            file.write(json.dumps({"what": what, "count": many, "replay": replay}) + "\n")
