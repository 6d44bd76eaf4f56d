"""Accuracy against length as a picture. Needs the `report` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memjax.eval.report import Run
from memjax.eval.statistics import Interval, interval
from memjax.eval.suites import SUITES
from memjax.eval.tasks import tokens_of


def curve(run: Run) -> dict[int, Interval]:
    """The score over all tasks of a run at each of its lengths in tokens."""
    suite = SUITES[run.config["suite"]]
    points = {}
    for label in run.config["lengths"]:
        scores = [row.score for cell, rows in run.cells.items() if cell.endswith(f"_{label.lower()}") for row in rows]
        if scores:
            points[tokens_of(label, suite.kilo)] = interval(scores)
    return points


def plot_accuracy(runs: Sequence[Run], file: Path) -> None:
    """Draw each run's accuracy with its 95 % interval, and the published rows of the same suite as dashed lines.

    ValueError where there is nothing to draw: no matplotlib, or no run with lengths.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: install memjax[report], or leave --plot out") from None
    curves = {run.name: points for run in runs if (points := curve(run))}
    if not curves:
        raise ValueError("none of the runs has lengths to plot against; leave --plot out")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    drawn: set[int] = set()
    for name, points in curves.items():
        lengths = sorted(points)
        means = [100 * points[length].mean for length in lengths]
        below = [100 * (points[length].mean - points[length].low) for length in lengths]
        above = [100 * (points[length].high - points[length].mean) for length in lengths]
        drawn.update(lengths)
        axes.errorbar(lengths, means, yerr=[below, above], marker="o", capsize=3, label=name)
    for name in dict.fromkeys(run.config["suite"] for run in runs):
        suite = SUITES[name]
        for row in suite.published:
            lengths = [tokens_of(label, suite.kilo) for label in row.scores]
            drawn.update(lengths)
            axes.plot(
                lengths, list(row.scores.values()), "--", linewidth=1, alpha=0.7, label=f"{row.model} (published)"
            )
    axes.set_xscale("log", base=2)
    ticks = sorted(drawn)
    axes.set_xticks(ticks, [_short(length) for length in ticks])
    axes.minorticks_off()
    axes.set_ylim(-2, 102)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("score, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)


def _short(tokens: int) -> str:
    kilo = 1024 if tokens % 1024 == 0 else 1000
    if tokens >= kilo * kilo:
        return f"{tokens / (kilo * kilo):g}M"
    return f"{tokens / kilo:g}K" if tokens >= kilo else str(tokens)
