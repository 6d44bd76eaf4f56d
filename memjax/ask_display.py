"""What a person sees on the terminal while a document is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.rule import Rule
from rich.text import Text

from memjax.ask import Step


class AskDisplay:
    """Progress on standard error: a bar on a terminal, lines elsewhere; with `show_memory` every memory as well."""

    def __init__(self, console: Console, *, chunk_tokens: int, show_memory: bool) -> None:
        self._console = console
        self._chunk_tokens = chunk_tokens
        self._show_memory = show_memory
        self._started = time.perf_counter()
        self._tokens = 0  # read by this run: a resumed one starts in the middle
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task("reading the first chunk", total=None)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Show progress inside."""
        self._started = time.perf_counter()
        if not self._console.is_terminal:
            yield
            return
        with self._progress:
            yield

    def step(self, step: Step) -> None:
        """Show one step."""
        if step.chunk is None:
            return
        self._tokens += len(step.chunk.ids)
        line = self._line(step)
        if self._console.is_terminal:
            done, total = step.state.document_tokens, step.chunk.document_tokens
            self._progress.update(self._task, description=line, completed=done, total=total)
        else:
            self._console.print(line, highlight=False)
        if self._show_memory:
            self._print_memories(step)

    def _line(self, step: Step) -> str:
        assert step.chunk is not None
        done, total = step.state.document_tokens, step.chunk.document_tokens
        rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
        number = step.chunk.index + 1
        chunks = number + -(-(total - done) // self._chunk_tokens)
        if done == total:
            return f"chunk {number} of {chunks}, {rate:.0f} tokens/s, answering"
        left = timedelta(seconds=round((total - done) / max(rate, 1e-9)))
        return f"chunk {number} of about {chunks}, {rate:.0f} tokens/s, {left} left"

    def _print_memories(self, step: Step) -> None:
        assert step.chunk is not None
        several = len(step.state.readings) > 1
        for reading in step.state.readings:
            title = f"memory after chunk {step.chunk.index + 1}" + (f": {reading.question}" if several else "")
            self._console.print(Rule(Text(title), align="left", style="dim"))
            self._console.print(Text(reading.memory_text.strip() or "(nothing yet)"))
