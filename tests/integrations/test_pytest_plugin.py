"""The plugin in a fresh folder, as a newcomer uses it: the guide's programs, run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard import GUARD

ROOT = Path(__file__).parents[2]
GUIDES = ["docs/testing.md", pytest.param("docs/zh/testing.md", marks=pytest.mark.proof)]


def programs(guide: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), re.DOTALL)


def run_pytest(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        cwd=folder, capture_output=True, text=True, check=False, timeout=GUARD,
    )  # fmt: skip


@pytest.mark.parametrize("guide", GUIDES)
def test_the_guides_shop_charges_twice_and_the_failure_is_replayed_by_the_printed_command(
    guide: str, tmp_path: Path
) -> None:
    (tmp_path / "test_shop.py").write_text(programs(guide)[0], encoding="utf-8")
    failed = run_pytest(tmp_path, "test_shop.py")
    assert failed.returncode == 1, failed.stderr
    shown = re.findall(r"```console\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), re.DOTALL)[0]
    for line in shown.splitlines():
        if not line.startswith(("$", "...")):
            assert line.strip() in failed.stdout
    command = re.findall(r"replay it: pytest (.*)", failed.stdout)[0]
    again = run_pytest(tmp_path, *command.split())
    assert again.returncode == 1
    assert "found in run 1, which is shown with 1 fault" in again.stdout


@pytest.mark.parametrize("guide", GUIDES)
def test_the_guides_other_programs_pass(guide: str, tmp_path: Path) -> None:
    first, repaired, checkers, client = programs(guide)
    text = "\n".join(["import duly", first, repaired, checkers])
    (tmp_path / "test_shop.py").write_text(text, encoding="utf-8")
    done = run_pytest(tmp_path, "test_shop.py", "--duly-runs=60")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    asked = first.partition("async def till")[0] + client + first[first.index("def test_") :]
    asked = asked.replace("charge(order):", "charge(question):\n        order = question['buy']")
    (tmp_path / "test_client.py").write_text(asked, encoding="utf-8")
    failed = run_pytest(tmp_path, "test_client.py")
    assert "at_most_once: charge of" in failed.stdout


def test_plain_tests_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_it(): assert 'duly.core' not in sys.modules\n"
    )
    done = run_pytest(tmp_path, "test_plain.py")
    assert done.returncode == 0, done.stdout
