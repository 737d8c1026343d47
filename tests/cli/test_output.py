"""The one place that prints: foreign text is harmless, colours are ours, and there is no other place."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import duly.cli
from duly.cli.output import note, pad, print_json, rendered, say, style, table, tint, visible

OWN_WORDS = {"output.py", "slim.py"}
"""What prints by itself: the one place for it, and what runs where its packages are missing."""
VERBS = [path for path in Path(duly.cli.__file__).parent.glob("*.py") if path.name not in OWN_WORDS]
PRINTING = {
    ("typer", "echo"),
    ("typer", "secho"),
    ("typer", "style"),
    ("typer", "echo_via_pager"),
    ("stdout", "write"),
    ("stderr", "write"),
}


@pytest.mark.parametrize("path", VERBS, ids=lambda path: path.name)
def test_no_verb_prints_by_itself(path: Path) -> None:
    """What is printed remote would not be made harmless: use `say`, `note`, `table` and `print_json`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            assert (owner, node.attr) not in PRINTING, f"line {node.lineno}: {owner}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}: print"


def test_foreign_colours_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert rendered(f"{style('mine', 'red')} \x1b[35mtheirs") == "\x1b[31mmine\x1b[0m �[35mtheirs"
    assert visible(f"{tint('done')}\x1b[35m") == "done�[35m"
    assert pad(tint("done"), 6).endswith("  ")


def test_without_colours_there_is_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert rendered(style("x\x1b", "dim")) == "x�"


def test_one_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo", "three")
    note("four\nfive")
    shown = capsys.readouterr()
    assert shown.out == "one ↵ two\nthree\n"
    assert shown.err == "four ↵ five\n"


def test_columns_are_as_wide_as_they_look(capsys: pytest.CaptureFixture[str]) -> None:
    table(["a", "b"], [["x\x1b[2J\nhm", "1"], ["y", "2"]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert {line.index(last) for line, last in zip(lines, "b12", strict=True)} == {len("x�[2J ↵ hm") + 2}


def test_json_holds_everything_and_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"a": "\x1b[2J\x9b\x7f\u202e\U000e0041 你好\n"}
    print_json(said)
    shown = capsys.readouterr().out
    assert json.loads(shown) == said
    assert shown.count("\n") == 1
    assert not {"\x1b", "\x9b", "\x7f", "\u202e", "\U000e0041"} & set(shown)
    assert "你好" in shown


def test_an_argument_that_is_not_utf_8_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"detail": "what is \udcff?"})
    assert "\\udcff" in capsys.readouterr().out


def test_log_lines_are_made_harmless() -> None:
    """In a process of its own: logging keeps the stream that it writes to by default."""
    program = """
import logging
from duly.cli import output
output.guard_logs()
log = logging.getLogger("of a stranger's words")
log.error("said %s", "\\x1b]0;x\\x07\\nforged")
try:
    raise ValueError("\\x1b[2J in an error")
except ValueError:
    log.exception("bug")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "said �]0;x� ↵ forged\n" in done.stderr
    assert "ValueError: �[2J in an error" in done.stderr
    assert "\x1b" not in done.stderr
