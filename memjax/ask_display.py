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

    def __init__(self, console: Console, *, chunk_tokens: int, show_memory: bool, compiles: bool) -> None:
        """`compiles`: the first chunk takes longer, because the model's programs are compiled for it."""
        self._console = console
        self._chunk_tokens = chunk_tokens
        self._show_memory = show_memory
        self._begin = "reading; the first chunk also compiles" if compiles else "reading"
        self._first_done: float | None = None  # the rate counts from here: what comes before is start-up
        self._tokens = 0  # read since then
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task(self._begin, total=None)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is done inside."""
        if not self._console.is_terminal:
            self._console.print(what, highlight=False, soft_wrap=True)
        with self._console.status(what):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Show progress inside."""
        if not self._console.is_terminal:
            self._console.print(self._begin)
            yield
            return
        with self._progress:
            yield

    def note(self, text: str) -> None:
        """Say something that a waiting person should know."""
        self._console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def step(self, step: Step) -> None:
        """Show one step."""
        if step.chunk is None:
            return
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
        number = step.chunk.index + 1
        chunks = number + -(-(total - done) // self._chunk_tokens)
        parts = [f"chunk {number} of {'' if done == total else 'about '}{chunks}"]
        rate = self._rate(len(step.chunk.ids))
        if rate is not None:
            parts.append(f"{rate:.0f} tokens/s")
        if done == total:
            parts.append("answering")
        elif rate is not None:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        return ", ".join(parts)

    def _rate(self, tokens: int) -> float | None:
        """Tokens per second with the chunk just read; None at the first, whose time is also that of starting up."""
        now = time.perf_counter()
        if self._first_done is None:
            self._first_done = now
            return None
        self._tokens += tokens
        return self._tokens / max(now - self._first_done, 1e-9)

    def _print_memories(self, step: Step) -> None:
        assert step.chunk is not None
        several = len(step.state.readings) > 1
        for reading in step.state.readings:
            title = f"memory after chunk {step.chunk.index + 1}" + (f": {reading.question}" if several else "")
            self._console.print(Rule(Text(title), align="left", style="dim"))
            self._console.print(Text(reading.memory_text.strip() or "(nothing yet)"))
