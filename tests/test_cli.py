from __future__ import annotations

import resource
import subprocess
import sys


def duly(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "duly", *args], capture_output=True, text=True, check=False)


def test_help_answers_at_once_and_names_the_verbs() -> None:
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = duly("--help")
        after = resource.getrusage(
            resource.RUSAGE_CHILDREN
        )  # processor time: others may keep the machine busy
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert "sim" in done.stdout
    assert min(times) < 0.6, "0.3 s is the aim; a slow CI machine gets twice that"


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert duly("--version").stdout == f"duly {version('duly')}\n"


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = duly("frobnicate")
    assert done.returncode == 2
    assert "frobnicate" in done.stderr
