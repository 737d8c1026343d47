"""Answers one question in a process of its own: `python -m bench.ask MODULE[:FUNCTION] OPTIONS`.

It prints its progress as lines of JSON, and at last the report. An error ends it, and is its last word.
"""

from __future__ import annotations

import asyncio
import importlib
import sys

import msgspec

from bench.measure import Options, Report
from bench.processes import end_as_interrupted


def main() -> None:
    end_as_interrupted()
    module, _, function = sys.argv[1].partition(":")
    ask = getattr(importlib.import_module(module), function or "run")
    report: Report = asyncio.run(ask(msgspec.json.decode(sys.argv[2], type=Options)))
    print(msgspec.json.encode({"report": report}, enc_hook=float).decode(), flush=True)


if __name__ == "__main__":
    main()
