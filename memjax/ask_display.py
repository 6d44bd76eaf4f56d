"""What a person sees on the terminal while a document is read."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.rule import Rule
from rich.text import Text

from memjax.data.chunks import Chunk
from memjax.episodes.episode import Turn
from memjax.trajectory import Trajectory

_RECENT = 16  # chunks of which the rate is the mean
_LINES_EVERY = 5.0  # seconds between two lines where there is no terminal


class AskDisplay:
    """Progress on standard error: a bar on a terminal, lines elsewhere; with `show_memory` every memory as well."""

    def __init__(self, console: Console, questions: Sequence[str], *, show_memory: bool, compiles: bool) -> None:
        """`compiles`: the first chunk takes longer, because the model's programs are compiled for it."""
        self._console, self._questions, self._show_memory = console, questions, show_memory
        self._begin = "reading; the first chunk also compiles" if compiles else "reading"
        self._done = [0] * len(questions)  # chunks read by question
        self._replayed = 0
        self._chunks = 0  # read by this drive
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # when chunks were done, and their tokens
        self._printed = -math.inf  # when a line was printed last
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task(self._begin, total=None)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is done inside, and then that reading begins."""
        if self._replayed:
            self._say(f"continuing: {_counted(self._replayed, 'call')} replayed from the journal")
        for text in (what, self._begin):
            if self._console.is_terminal:
                self._progress.update(self._task, description=text)
            else:
                self._console.print(text, highlight=False, soft_wrap=True)
            if text == what:
                yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Show progress inside."""
        if not self._console.is_terminal:
            yield
            return
        with self._progress:
            yield

    def note(self, text: str) -> None:
        """Say something that a waiting person should know."""
        self._console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def turn(self, question: int, turn: Turn, memory: str) -> None:
        """Show one turn of one question; progress is that of the slowest."""
        self._replayed += turn.replayed
        chunk = turn.chunk
        if chunk is None:
            return
        before = min(self._done)
        self._done[question] = max(self._done[question], chunk.index + 1)
        if self._show_memory:
            about = f": {self._questions[question]}" if len(self._questions) > 1 else ""
            self._console.print(Rule(Text(f"memory after chunk {chunk.index + 1}{about}"), align="left", style="dim"))
            self._console.print(Text(memory.strip() or "(nothing yet)"))
        if not turn.replayed and (min(self._done) > before or len(self._questions) == 1):
            self._show(chunk)

    def summarise(self, trajectories: Sequence[Trajectory], chunks: int, journals: Sequence[Path]) -> None:
        """What the run took, what was not read again, and where it is kept."""
        tokens = int(sum(one.counters["document_tokens"] for one in trajectories)) // len(trajectories)
        seconds = max(one.seconds for one in trajectories)
        read = _counted(chunks, "chunk") if chunks else "one turn"
        calls = int(sum(one.counters["model_calls"] for one in trajectories))
        replayed = (
            f"{self._replayed} of {_counted(calls, 'call')} replayed from the journal. " if self._replayed else ""
        )
        rate = "" if self._replayed else f", {tokens / max(seconds, 1e-9):.0f} tokens/s"
        read = f"{tokens} document tokens in {read}" if tokens else _counted(calls, "call")
        self._say(f"{replayed}{read}, {seconds:.1f} s{rate if tokens else ''}.")
        if left_out := int(sum(one.counters["truncated_tokens"] for one in trajectories)) // len(trajectories):
            self._say(f"{left_out} tokens in the middle of the text did not fit and were left out.")
        if cut := int(sum(one.counters.get("truncated_memories", 0) for one in trajectories)):
            self._say(f"{_counted(cut, 'memory', 'memories')} ended at the memory budget; --memory-tokens raises it.")
        for journal in dict.fromkeys(journals):
            self._say(f"Journal: {journal} (memjax view shows it)")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def _show(self, chunk: Chunk) -> None:
        done, total = chunk.start_token + len(chunk.ids), chunk.document_tokens
        number = chunk.index + 1
        chunks = number if done >= total else number + -(-(total - done) * number // done)
        parts = [f"chunk {number} of {'' if done >= total else 'about '}{chunks}"]
        rate = self._rate(len(chunk.ids))
        if rate is not None:
            parts.append(f"{rate:.0f} tokens/s")
        if done >= total:
            parts.append("answering")
        elif rate is not None:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        line = ", ".join(parts)
        if self._console.is_terminal:
            self._progress.update(self._task, description=line, completed=done, total=total)
        elif done >= total or time.monotonic() - self._printed >= _LINES_EVERY:
            self._printed = time.monotonic()
            self._console.print(line, highlight=False)

    def _rate(self, tokens: int) -> float | None:
        """Tokens per second of the latest chunks; None before the third, for two are also loading and compiling."""
        self._chunks += 1
        if self._chunks >= 2:
            self._recent.append((time.monotonic(), tokens))
        if len(self._recent) < 2:
            return None
        (first, _), *others = self._recent
        return sum(tokens for _, tokens in others) / max(self._recent[-1][0] - first, 1e-9)


def _counted(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
