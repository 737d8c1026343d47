"""The command line of a slim installation, where Typer is missing: it lists the verbs, and says which extra
each of them needs. It prints only its own text, so it does not need `output`, which makes other text
harmless."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from duly import extras
from duly.cli import SENTENCE, VERBS, WITHOUT_HUB, Panel


def answer(words: Sequence[str]) -> int:
    """Do what a slim installation can: list the verbs, and say what to install for one. Return the exit
    code."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(f"{plain_help()}\n")
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"duly {version('duly')}\n")
        return 0
    if words[0] not in VERBS:
        sys.stderr.write(f"duly: there is no verb {words[0]!r}; 'duly --help' lists them\n")
        return 2
    what = f"'duly {words[0]}'"
    extra = "cli" if words[0] in WITHOUT_HUB else "hub"
    sys.stderr.write(f"duly: {extras.sentence(what, extra)}\n")
    return 1


def plain_help() -> str:
    """Return the list of verbs as text, with what each needs."""
    lines = ["Usage: duly [OPTIONS] COMMAND [ARGS]...", "", f"  {SENTENCE}"]
    for panel in Panel:
        lines += ["", f"{panel.value}:"]
        lines += [f"  {name:12}{verb.sentence}" for name, verb in VERBS.items() if verb.panel == panel]
    lines += ["", "This is the slim installation, the library alone. For the verbs: pip install 'duly[hub]'"]
    return "\n".join(lines)
