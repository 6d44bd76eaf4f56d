"""How sure a score is: intervals, paired differences, and the samples that a difference needs. numpy only.

The unit is one sample's score in [0, 1]; a failed sample is a score of 0 and stays in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean score and the interval that holds the true one at the stated confidence."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Comparison:
    """Run B against run A on the samples that both have."""

    difference: Interval  # mean of B - A
    p_value: float  # two-sided, sign-flip test: how often chance alone gives a difference as large
    samples_for_3_points: int | None  # shared, to see a true one 4 times in 5; None where the runs never differ


def wilson(successes: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; with no samples it is all of [0, 1]."""
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / count
    scale = 1 + z * z / count
    centre = (p + z * z / (2 * count)) / scale
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / scale
    # Exactly 0 and 1 at the ends, where rounding would leave them just inside.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == count else centre + half


def bootstrap(scores: Sequence[float], confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean."""
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(_resampled_means(np.asarray(scores, float), seed), [tail, 100 - tail])
    return float(low), float(high)


def interval(scores: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean with Wilson's interval where scores are right or wrong, with a bootstrap where they are graded.

    The bootstrap of scores that are all equal has no width, which claims too much; Wilson's serves there too, unless
    they are outside [0, 1], as those of a user's own metric may be.
    """
    count = len(scores)
    if count == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    mean = float(np.mean(scores))
    graded = any(score not in (0, 1) for score in scores)
    spread = graded and (len(set(scores)) > 1 or not 0 <= mean <= 1)
    low, high = bootstrap(scores, confidence) if spread else wilson(mean * count, count, confidence)
    return Interval(mean, low, high, count)


def standard_error(scores: Sequence[float]) -> float:
    """Standard error of the mean, with the sample's own spread."""
    return float(np.std(scores, ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else math.nan


def compare(scores_a: Sequence[float], scores_b: Sequence[float], seed: int = 0) -> Comparison:
    """B - A with its paired bootstrap interval; the two sequences hold the same samples in the same order.

    The p-value is not the bootstrap's, which is far too small for a handful of samples, but that of flipping the sign
    of each sample's difference at random: if the runs were equally good, either one could have been A.
    """
    if len(scores_a) != len(scores_b) or not scores_a:
        raise ValueError(f"a paired comparison needs the same samples twice, got {len(scores_a)} and {len(scores_b)}")
    differences = np.asarray(scores_b, float) - np.asarray(scores_a, float)
    means = _resampled_means(differences, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    mean = float(differences.mean())
    signs = np.random.default_rng(seed).integers(0, 2, (RESAMPLES, len(differences)), np.int8) * 2 - 1
    as_large = int(np.sum(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9))
    variance = float(np.var(differences))
    return Comparison(
        Interval(mean, float(low), float(high), len(differences)),
        # One is added so that no finite number of flips claims p = 0 (Davison & Hinkley 1997, 4.2).
        p_value=(as_large + 1) / (RESAMPLES + 1),
        samples_for_3_points=samples_needed(variance) if variance else None,
    )


def samples_needed(variance: float, difference: float = 0.03, confidence: float = 0.95, power: float = 0.8) -> int:
    """Samples so that a mean difference is told from zero with the given power.

    `variance` is that of one sample's difference: of B - A when the runs share their samples, the sum of both variances
    (2 p (1 - p) for two runs near accuracy p) when they do not.
    """
    normal = NormalDist()
    z = normal.inv_cdf(0.5 + confidence / 2) + normal.inv_cdf(power)
    return max(1, math.ceil(variance * (z / difference) ** 2))


def _resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of RESAMPLES draws with replacement."""
    rng = np.random.default_rng(seed)
    rows = max(1, min(RESAMPLES, 2_000_000 // len(values)))  # bounds the index array
    means = [
        values[rng.integers(0, len(values), (min(rows, RESAMPLES - start), len(values)))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(means)
