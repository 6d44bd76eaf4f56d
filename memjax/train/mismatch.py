"""How far apart sampler and learner are on the same tokens, and when that is a fault. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Mismatch:
    """Statistics of d = rollout - learner log-probability, in nats, over the sampled tokens."""

    tokens: int
    mean_abs: float
    max_abs: float
    bias: float  # mean of d; sampling from the very same distribution makes it 0
    probs_diff_mean: float  # mean of |rollout probability - learner probability|
    probs_diff_max: float

    def metrics(self) -> dict[str, float]:
        """The statistics under the names they are logged with."""
        return {
            "training/rollout_logprobs_diff_mean": self.mean_abs,
            "training/rollout_logprobs_diff_max": self.max_abs,
            "training/rollout_logprobs_bias": self.bias,
            "training/rollout_probs_diff_mean": self.probs_diff_mean,
            "training/rollout_probs_diff_max": self.probs_diff_max,
        }


@dataclass(frozen=True)
class MismatchLimits:
    """What still counts as arithmetic noise, in nats per token."""

    mean_abs: float
    max_abs: float
    bias: float


FLOAT32_LIMITS = MismatchLimits(mean_abs=1e-5, max_abs=1e-4, bias=1e-5)
# bfloat16 has 8 bits: single unlikely tokens are off by tenths, while their mean and above all their bias stay small.
BFLOAT16_LIMITS = MismatchLimits(mean_abs=0.03, max_abs=1.5, bias=0.005)


def measure_mismatch(
    rollout_logprobs: Float[np.ndarray, "*S"],
    learner_logprobs: Float[np.ndarray, "*S"],
    loss_mask: Bool[np.ndarray, "*S"],
) -> Mismatch:
    """Compare the two on the sampled tokens; the learner must hold the weights that sampled."""
    rollout = np.asarray(rollout_logprobs, np.float64)[loss_mask]
    learner = np.asarray(learner_logprobs, np.float64)[loss_mask]
    if rollout.size == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    d = rollout - learner
    probs_diff = np.abs(np.exp(rollout) - np.exp(learner))
    return Mismatch(
        tokens=rollout.size,
        mean_abs=float(np.abs(d).mean()),
        max_abs=float(np.abs(d).max()),
        bias=float(d.mean()),
        probs_diff_mean=float(probs_diff.mean()),
        probs_diff_max=float(probs_diff.max()),
    )


def mismatch_alarm(mismatch: Mismatch, limits: MismatchLimits) -> str | None:
    """A sentence for the log when the gap is more than noise, else None."""
    found = []
    # Written so that a statistic that is not a number trips the alarm too.
    if not mismatch.mean_abs <= limits.mean_abs:
        found.append(f"mean |difference| {mismatch.mean_abs:.2g} over {limits.mean_abs:g}")
    if not mismatch.max_abs <= limits.max_abs:
        found.append(f"max |difference| {mismatch.max_abs:.2g} over {limits.max_abs:g}")
    if not abs(mismatch.bias) <= limits.bias:
        found.append(f"bias {mismatch.bias:+.2g} beyond {limits.bias:g}")
    if not found:
        return None
    return (
        f"rollout and learner disagree on {mismatch.tokens} sampled tokens: {'; '.join(found)} nats. Check that the "
        "engine has the learner's weights, that tokens and logprobs are aligned, and that logprobs are taken before "
        "any top-k or top-p cut"
    )
