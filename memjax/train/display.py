"""A run as it goes: a table that is redrawn in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

# (name in the metrics, what people call it, how it is written)
_SHOWN = (
    ("actor/loss", "loss", "{:.4f}"),
    ("critic/rewards/mean", "reward", "{:.3f}"),
    ("response_length/mean", "reply tokens", "{:.1f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/pg_clipfrac", "clipped", "{:.4f}"),
    ("actor/grad_norm", "gradient", "{:.3g}"),
    ("rollout/groups_dropped", "groups left out", "{:.0f}"),
    ("rollout/failed", "failed", "{:.0f}"),
    ("rollout/lost", "lost", "{:.0f}"),
    ("training/rollout_logprobs_diff_max", "sampler - learner", "{:.1e}"),
    ("perf/throughput", "tokens/s", "{:.0f}"),
    ("timing_s/step", "seconds", "{:.2f}"),
)
_FAULTS = ("rollout/failed", "rollout/lost")  # shown where there are some
_LINES_EVERY = 5.0  # seconds between two lines where there is no terminal


class Watcher(Protocol):
    """Is told what a run does."""

    def step(self, stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """`step` of a stage's `steps` is done."""
        ...

    def say(self, message: str) -> None:
        """Something worth a line."""
        ...


class Silent:
    """A watcher that shows nothing."""

    def step(self, stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Show nothing."""

    def say(self, message: str) -> None:
        """Show nothing."""


class TerminalWatcher:
    """Shows a run on a console. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._stage, self._first_step, self._started, self._line_at = "", 0, 0.0, 0.0
        self._validation: dict[str, float] = {}

    def __enter__(self) -> TerminalWatcher:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print a line above the table."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def step(self, stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Redraw the table, or print a line if the last one is a while ago."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._first_step, self._started, self._line_at = stage, step, now, 0.0
        self._validation |= {name: value for name, value in metrics.items() if name.startswith("val/reward")}
        rows = {"step": f"{step} of {steps}", "time left": self._time_left(step, steps, now)}
        shown = [row for row in _SHOWN if row[0] in metrics and (metrics[row[0]] or row[0] not in _FAULTS)]
        rows |= {label: form.format(metrics[name]) for name, label, form in shown}
        rows |= {name.removeprefix("val/"): f"{value:.3f}" for name, value in self._validation.items()}
        if self._live:
            table = Table(title=stage, show_header=False)
            for label, text in rows.items():
                table.add_row(label, text)
            self._live.update(table, refresh=True)
        elif now - self._line_at >= _LINES_EVERY or step == steps:
            self._line_at = now
            self.say(f"{stage}  " + "  ".join(f"{label} {text}" for label, text in rows.items()))

    def _time_left(self, step: int, steps: int, now: float) -> str:
        done = step - self._first_step
        if done < 1:
            return "?"
        minutes, seconds = divmod(round((now - self._started) / done * (steps - step)), 60)
        return f"{minutes}:{seconds:02}"
