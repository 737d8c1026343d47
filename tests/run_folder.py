"""The folder of a test run: all its processes know it, and it goes with all that the run has started."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

from tests.orphans import RUN_FOLDER, OrphanWatch

FOLDER: Final = pytest.StashKey[str]()
_ORPHANS: Final = pytest.StashKey[OrphanWatch]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is None:
        folder = tempfile.mkdtemp(prefix="duly-run-")
        Path(folder).chmod(0o711)  # PostgreSQL, which is another user, has its files there
        config.stash[_ORPHANS] = OrphanWatch(folder)
    else:
        folder = given["folder"]
    config.stash[FOLDER] = os.environ[RUN_FOLDER] = folder


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker the folder of the run."""
    node.workerinput["folder"] = node.config.stash[FOLDER]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[_ORPHANS].close()
