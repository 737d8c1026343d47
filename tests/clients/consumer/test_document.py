"""The guide's program runs as printed, and prints what the guide says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard import GUARD

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("guide", ["docs/consumer.md", "docs/zh/consumer.md"])
def test_the_first_program_of_the_guide_runs_as_printed(guide: str, tmp_path: Path) -> None:
    text = (ROOT / guide).read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    promised = re.findall(r"```console\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / "lamp.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "lamp.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=GUARD
    )
    assert (done.stdout, done.stderr) == (promised, "")
