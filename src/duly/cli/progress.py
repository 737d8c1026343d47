"""A progress bar on a terminal, for work that is counted in rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def row_progress(word: str) -> Iterator[Callable[[int], None]]:
    """Show how many rows were done, on stderr if that is a terminal; give the function that counts them."""
    if not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(word), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(word, total=None)
        yield lambda rows: progress.advance(task, rows)
