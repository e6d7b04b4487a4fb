"""What the terminal shows during a run and after it: by rich, or plain where rich is absent."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from bench.table import Table, fitting, plain, rich_table, table_width

WIDTH = 132  #: of a table that goes to a file
MARGIN = 3  #: what rich puts around a table


class Screen:
    """A progress bar, lines above it, and tables.  Use it in a with statement."""

    def __init__(self, steps: int) -> None:
        self._console: Any = None
        self._progress: Any = None
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return
        self._console = Console(highlight=False, markup=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, markup=False, width=WIDTH)
        bar = (BarColumn(24), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
        text = TextColumn("{task.description}", markup=False)
        self._progress = Progress(*bar, text, console=self._console, transient=True)
        self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> Self:
        if self._progress is not None and self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def tick(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=text)

    def line(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, soft_wrap=True)
        else:
            print(text, flush=True)

    def table(self, table: Table) -> None:
        room = self._console.width - MARGIN if self._console is not None else WIDTH
        table = fitting(table, room)
        if self._console is not None and table_width(table) <= room:
            self._console.print(rich_table(table))
        else:  # whole lines, wrapped by the terminal, rather than figures cut off
            print("\n" + plain(table) + "\n")
