"""What the programs of a part have counted: a line of JSON each, in the file that DULY_PROOF_COUNTS names."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Final

VARIABLE: Final = "DULY_PROOF_COUNTS"


def count(what: str, many: int, replay: str = "") -> None:
    """Add to a figure: so many cases of one kind were tried, and nothing was wrong."""
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps({"what": what, "count": many, "replay": replay}) + "\n")


def total(path: Path) -> dict[str, int]:
    """Add up what a file of counts says."""
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        found[entry["what"]] += int(entry["count"])
    return dict(found)
