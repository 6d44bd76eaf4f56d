"""Accuracy against length as a picture. Needs the `report` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memjax.data.lengths import parse_length
from memjax.eval.report import Run
from memjax.eval.statistics import Interval, interval
from memjax.eval.suites import SUITES

_APART = 0.12  # octaves of length between the runs


def curve(run: Run) -> dict[int, Interval]:
    """The score over all tasks of a run at each of its lengths in tokens."""
    points = {}
    for label in run.config["lengths"]:
        scores = [row.score for cell, rows in run.cells.items() if cell.endswith(f"_{label.lower()}") for row in rows]
        if scores:
            points[parse_length(label)] = interval(scores)
    return points


def plot_accuracy(runs: Sequence[Run], file: Path) -> None:
    """Draw each run's accuracy with its 95 % interval, and the published rows of the same suite as dashed lines.

    ValueError where there is nothing to draw: no matplotlib, or no run with lengths.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "a plot needs matplotlib; install it with: uv sync --extra report, or leave --plot out"
        ) from None
    curves = {run.name: points for run in runs if (points := curve(run))}
    if not curves:
        raise ValueError("none of the runs has lengths to plot against; leave --plot out")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    ticks: dict[int, str] = {}
    for place, (name, points) in enumerate(curves.items()):
        lengths = sorted(points)
        # Beside each other, or equal scores would hide each other's intervals.
        shift = 2 ** (_APART * (place - (len(curves) - 1) / 2))
        means = [100 * points[length].mean for length in lengths]
        below = [100 * (points[length].mean - points[length].low) for length in lengths]
        above = [100 * (points[length].high - points[length].mean) for length in lengths]
        shifted = [length * shift for length in lengths]
        axes.errorbar(shifted, means, yerr=[below, above], marker="o", capsize=3, label=name)
    for run in runs:
        ticks |= {length: _short(length) for length in curves.get(run.name, ())}
    for name in dict.fromkeys(run.config["suite"] for run in runs):
        suite = SUITES[name]
        for row in suite.published:
            lengths = [parse_length(label) for label in row.scores]
            ticks |= {length: _short(length) for length in lengths}
            axes.plot(
                lengths, list(row.scores.values()), "--", linewidth=1, alpha=0.7, label=f"{row.model} (published)"
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_ylim(-2, 102)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("score, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)


def _short(tokens: int) -> str:
    if tokens >= 1 << 20:
        return f"{tokens / (1 << 20):g}M"
    return f"{tokens / 1024:g}K" if tokens >= 1024 else str(tokens)
