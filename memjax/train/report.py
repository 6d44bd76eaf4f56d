"""The curves of a run, drawn with characters, and its first and last numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from memjax.metrics import read_metrics

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60  # characters of a curve
_CURVES = (
    "actor/loss",
    "critic/rewards/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "rollout/groups_dropped",
    "rollout/failed",
    "rollout/lost",
    "rollout/broken_conversations",
    "training/rollout_logprobs_diff_max",
    "timing_s/step",
)


def report(run: Path) -> list[Table]:
    """A table for each stage of a run. ValueError for a directory without one."""
    rows = list(read_metrics(run / "metrics.jsonl"))
    if not rows:
        raise ValueError(f"{run} holds no run with a finished step: give the directory that the run has as `out`")
    return [_stage_table(stage, rows) for stage in dict.fromkeys(row["stage"] for row in rows)]


def _stage_table(stage: str, rows: Sequence[dict]) -> Table:
    rows = [row for row in rows if row["stage"] == stage]
    found = {name for row in rows for name in row}
    names = [*sorted(name for name in found if name.startswith(("val/reward", "reward/"))), *_CURVES]
    table = Table(title=f"{stage}: {len(rows)} lines up to step {rows[-1]['step']}")
    for heading in ("metric", "first", "last", "lowest", "highest", "over the steps"):
        table.add_column(heading, no_wrap=True)
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            numbers = [f"{value:.4g}" for value in (values[0], values[-1], min(values), max(values))]
            table.add_row(name, *numbers, curve(values))
    return table


def curve(values: Sequence[float], width: int = _WIDTH) -> str:
    """Means of `width` stretches of the values, as bars between their lowest and highest."""
    means = np.array([part.mean() for part in np.array_split(np.asarray(values, float), min(width, len(values)))])
    span = np.ptp(means)
    heights = (means - means.min()) / span * (len(_BARS) - 1) if span else np.zeros(len(means))
    return "".join(_BARS[round(height)] for height in heights)
