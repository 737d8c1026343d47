"""Names the violation that a planted bug must be caught by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest

Bug = Callable[[pytest.MonkeyPatch], None]

BREAKS: Final[dict[Bug, str]] = {}
"""The checker that must notice each bug."""


def breaks(checker: str) -> Callable[[Bug], Bug]:
    """Say which checker must notice a bug: another's complaint does not count."""

    def note(bug: Bug) -> Bug:
        BREAKS[bug] = checker
        return bug

    return note


def planted(*bugs: Bug) -> Mapping[str, Bug]:
    """Return bugs by their names; each has said what it breaks."""
    assert all(bug in BREAKS for bug in bugs)
    return {bug.__name__: bug for bug in bugs}
