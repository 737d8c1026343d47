"""Compiles what tests build with Go, before they begin: on a machine that has built nothing yet this takes
minutes, which are no part of a test. The tests themselves say what cannot be built."""

from __future__ import annotations

import contextlib
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from tests import nsqd

SOURCE = Path(str(files("duly"))) / "clients" / "go"
"""The module of nodes in Go."""


def main() -> None:
    for words in (["build", "./..."], ["vet", "./..."], ["test", "-run", "^$", "./..."]):
        subprocess.run(["go", *words], cwd=SOURCE, capture_output=True, check=False)
    with contextlib.suppress(pytest.skip.Exception, pytest.fail.Exception):
        nsqd.binary()


if __name__ == "__main__":
    main()
