"""The guides of `once` and of the middleware, as printed: their programs and commands, in a fresh folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import servers
from tests.guard import GUARD

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "docs", ROOT / "docs/zh"]


def blocks(text: Path, kind: str) -> list[str]:
    found: list[str] = re.findall(
        rf"^```{kind}\n(.*?)^```$", text.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return found


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("docs", DOCS, ids=lambda path: path.name)
def test_the_programs_of_once_run_as_printed_and_again(docs: Path, tmp_path: Path) -> None:
    program = "\n".join(blocks(docs / "once.md", "python"))
    for _ in range(2):
        assert run(program, tmp_path).splitlines() == ["charged 12", "charged 12", "1", "charged 12"]


def test_the_commands_of_once_run_as_printed(tmp_path: Path) -> None:
    dies = blocks(ROOT / "docs/once.md", "python")[0].replace(
        "    return", "    import os; os._exit(9)\n    return"
    )
    dies = dies.replace('key=lambda order: order["id"]', 'key=lambda order: order["id"], lease=0.01')
    for key in ("order-7", "order-10", "order-11"):
        program = dies.replace("order-7", key)
        assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 9
    (commands,) = blocks(ROOT / "docs/once.md", "console")
    said = []
    for line in commands.splitlines():
        words = shlex.split(line.removeprefix("$ duly "))
        done = subprocess.run(
            [sys.executable, "-m", "duly", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        said.append((done.returncode, done.stdout.strip() or done.stderr.strip()))
    assert said == [
        (0, "no key is unknown"),  # their processes have died, and no repeat has noticed yet
        (0, "payments order-10 is settled; repeats get this outcome"),
        (0, "payments order-11 is settled; repeats get this outcome"),
        (0, "payments order-7 is forgotten: it may run again"),
    ]


@pytest.mark.parametrize("docs", DOCS, ids=lambda path: path.name)
def test_the_first_application_of_the_middleware_answers_as_printed(docs: Path, tmp_path: Path) -> None:
    first, routes, scope, book = blocks(docs / "middleware.md", "python")
    (tmp_path / "main.py").write_text("\n".join((first, routes, scope, book)))
    run("import main", tmp_path)
    (tmp_path / "main.py").write_text(first)
    port = servers.free_port()
    start, curl = blocks(docs / "middleware.md", "console")
    command = [sys.executable, "-m", *start.splitlines()[-1].removeprefix("$ ").split(), "--port", str(port)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        servers.wait_for_port(port, process, "uvicorn")
        words = shlex.split(curl.strip().removeprefix("$ ").replace("localhost:8000", f"127.0.0.1:{port}"))
        answers = [
            subprocess.run([*words, "-s"], capture_output=True, text=True, check=True).stdout
            for _ in range(3)
        ]
    finally:
        process.terminate()
        process.wait(GUARD)
    assert all(answer.endswith('{"charged":12}') for answer in answers)
    assert ["idempotent-replayed: true" in answer for answer in answers] == [False, True, True]


def test_the_example_runs_with_several_workers(tmp_path: Path) -> None:
    port = servers.free_port()
    shown = (ROOT / "examples/idempotent_api.py").read_text().partition("Run it with: ")[2].splitlines()[0]
    words = shlex.split(shown.replace("examples ", f"{ROOT / 'examples'} "))
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "--port", str(port)], cwd=tmp_path, stdout=said
        )
    ask = ["curl", "-s", "-i", f"http://127.0.0.1:{port}/payments", "--json", '{"order":"o-1","amount":12}']
    try:
        servers.wait_for_port(port, process, "uvicorn")
        without = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        keyed = [*ask, "-H", "Idempotency-Key: k-1"]
        answers = [subprocess.run(keyed, capture_output=True, text=True, check=True).stdout for _ in range(5)]
    finally:
        process.terminate()
        process.wait(GUARD)
    assert without.startswith("HTTP/1.1 400")
    assert all('{"receipt":"receipt for o-1"}' in answer for answer in answers)
    assert (tmp_path / "said").read_text().count("charging 12 for o-1") == 1
