"""Progress for people: bars in a terminal, a few lines in other outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

__all__ = ["Bars", "bars"]


class Bars(Protocol):
    """Progress of counts towards their totals."""

    def show(self, done: Mapping[str, int]) -> None: ...


@contextmanager
def bars(console: Console, totals: Mapping[str, int]) -> Iterator[Bars]:
    """Show one bar for each of ``totals``; the bars stay visible after the block."""
    if console.is_terminal and not console.is_dumb_terminal:
        progress = Progress(
            TextColumn("  {task.description:<13}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            console=console,
        )
        with progress:
            yield _Drawn(progress, totals)
    else:
        lines = _Lines(console, totals)
        try:
            yield lines
        finally:
            lines.finish()


class _Drawn:
    def __init__(self, progress: Progress, totals: Mapping[str, int]) -> None:
        self._progress = progress
        self._tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}

    def show(self, done: Mapping[str, int]) -> None:
        for name, task in self._tasks.items():
            self._progress.update(task, completed=done[name])


class _Lines:
    """A printed line for every quarter of the work."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._totals = totals
        self._done: Mapping[str, int] = dict.fromkeys(totals, 0)
        self._quarters = 0
        self._printed = ""

    def show(self, done: Mapping[str, int]) -> None:
        self._done = dict(done)
        quarters = 4 * sum(done[name] for name in self._totals) // sum(self._totals.values())
        if quarters > self._quarters:
            self._quarters = quarters
            self._print()

    def finish(self) -> None:
        self._print()

    def _print(self) -> None:
        line = ", ".join(
            f"{name} {self._done[name]}/{total}" for name, total in self._totals.items()
        )
        if line != self._printed:
            self._printed = line
            self._console.print(f"  {line}", highlight=False)
