"""An evaluation's progress in a terminal: time left, and the score so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from memjax.eval.results import Row
from memjax.eval.tasks import Cell


class TerminalProgress:
    """A watcher that draws one bar per cell and one for all. Use as a context manager.

    The bars count tokens of context where they are known, so that the time left is right when 1M follows 7k.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_interactive,
        )
        self._all = self._bars.add_task("all", total=None, state="loading")
        self._cells: dict[str, _CellState] = {}

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A bar above an error would look as if something still went on; an interrupted run may show how far it came.
        self._bars.live.transient = isinstance(error, Exception)
        self._bars.stop()

    def say(self, message: str) -> None:
        """Print a line above the bars."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def begin(self, cells: list[Cell], samples: int | None, done: Sequence[Row]) -> None:
        """Add a bar for each cell, with what earlier runs have done counted in the score but not in the speed."""
        whole = 0
        for cell in cells:
            before = [row for row in done if row.cell == cell.name]
            left = None if samples is None else samples - len(before)
            weight = cell.tokens or 1
            total = None if left is None else left * weight
            bar = self._bars.add_task(cell.name, total=total, state="")
            state = _CellState(weight, samples, [row.score for row in before], bar)
            self._bars.update(bar, state=state.text())
            self._cells[cell.name] = state
            whole += total or 0
        self._bars.update(self._all, total=whole or None, state="")

    def finished(self, row: Row) -> None:
        """Move the bars of the sample's cell."""
        state = self._cells[row.cell]
        state.scores.append(row.score)
        if row.error is not None:
            state.failed += 1
            self.say(f"{row.cell} {row.number} failed: {row.error}")
        if row.replayed_calls:
            self.say(
                f"{row.cell} {row.number} continued: {row.replayed_calls} of {row.model_calls} calls were replayed"
            )
        self._bars.update(state.bar, advance=state.weight, state=state.text())
        self._bars.update(self._all, advance=state.weight, state=f"failed {self._failed()}" if self._failed() else "")

    def _failed(self) -> int:
        return sum(state.failed for state in self._cells.values())


@dataclass
class _CellState:
    """What a cell's bar shows."""

    weight: int
    samples: int | None
    scores: list[float]
    bar: TaskID
    failed: int = 0

    def text(self) -> str:
        count = f"{len(self.scores)}{f'/{self.samples}' if self.samples else ''}"
        if not self.scores:
            return count
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{count} {100 * sum(self.scores) / len(self.scores):.1f} %{failed}"
