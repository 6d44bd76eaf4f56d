"""The token losses of the policy objective, as pure functions of log-probabilities.

B rows, T time. A token stands at its own place: logprobs_BT[b, t] belongs to tokens_BT[b, t].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.train.packing import Rows
from memjax.train.presets import KLEstimator, ObjectiveConfig

# exp of more than this is no use as a ratio and soon no float either
_MAX_LOG_RATIO = 20.0


class Batch(NamedTuple):
    """One optimiser step as the update takes it; with axes B T alone, one micro-batch of it.

    The loss is the sum of `weights` times the token losses. The weights hold the one normaliser of the step, so that
    neither the cut into micro-batches nor the order of rows nor the number of devices enters. `advantages` hold the
    importance weight too, which is positive and therefore commutes with the clips.
    """

    rows: Rows
    rollout_logprobs: Float[Any, "*M B T"]
    old_logprobs: Float[Any, "*M B T"]
    ref_logprobs: Float[Any, "*M B T"]  # zeros where the loss does not read the reference
    advantages: Float[Any, "*M B T"]
    weights: Float[Any, "*M B T"]


class PolicyLoss(NamedTuple):
    """The clipped loss of every token, and which clips were at work."""

    loss: Float[Array, "B T"]
    clipped: Bool[Array, "B T"]  # the clipped surrogate was the larger loss
    dual_clipped: Bool[Array, "B T"]  # a negative advantage hit the dual clip


def conversation_mean(
    values_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], segment_ids_BT: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Mean over the masked tokens of each packed conversation, handed to all of its tokens."""
    segments = values_BT.shape[1] + 1

    def row(values_T: Array, mask_T: Array, segment_ids_T: Array) -> Array:
        total = jax.ops.segment_sum(jnp.where(mask_T, values_T, 0.0), segment_ids_T, segments)
        count = jax.ops.segment_sum(mask_T.astype(jnp.float32), segment_ids_T, segments)
        return (total / jnp.maximum(count, 1.0))[segment_ids_T]

    return jax.vmap(row)(values_BT, mask_BT, segment_ids_BT)


def log_ratio(
    objective: ObjectiveConfig,
    logprobs_BT: Float[Array, "B T"],
    old_logprobs_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Log of the probability ratio that the clip acts on."""
    ratio_BT = jnp.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)
    if objective.ratio == "conversation":
        # All tokens of a conversation then have one loss, so their weights add up to GSPO's single term (its Eq. 5).
        ratio_BT = conversation_mean(ratio_BT, mask_BT, segment_ids_BT)
    return jnp.clip(ratio_BT, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def policy_loss(
    objective: ObjectiveConfig, log_ratio_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"]
) -> PolicyLoss:
    """PPO's clipped loss with separate bounds, and the dual clip (arXiv 1912.09729) below a negative advantage."""
    ratio_BT = jnp.exp(log_ratio_BT)
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * jnp.clip(ratio_BT, 1.0 - objective.clip_low, 1.0 + objective.clip_high)
    loss_BT = jnp.maximum(plain_BT, clipped_BT)
    dual_BT = jnp.zeros_like(loss_BT, bool)
    if objective.dual_clip is not None:
        bound_BT = -advantages_BT * objective.dual_clip
        dual_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = jnp.where(dual_BT, bound_BT, loss_BT)
    return PolicyLoss(loss_BT, clipped_BT > plain_BT, dual_BT)


def kl_estimate(
    estimator: KLEstimator, logprobs: Float[Any, "*S"], ref_logprobs: Float[Any, "*S"]
) -> Float[Array, "*S"]:
    """Divergence from the reference at sampled tokens: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, d = logp - ref."""
    d = jnp.clip(logprobs - ref_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    return jnp.expm1(-d) + d


def objective_loss(
    objective: ObjectiveConfig,
    logprobs_BT: Float[Array, "B T"],
    entropy_BT: Float[Array, "B T"],
    micro: Batch,
    tokens: Int[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The share of one micro-batch in the loss of its optimiser step, and in the metrics.

    `tokens` counts the sampled tokens of the whole step. Metrics add up over micro-batches, those ending in `_max` by
    maximum. Losses, divergence and entropy are weighted as in the loss; clip fractions, `ppo_kl` and the differences
    are means over tokens.
    """
    mask_BT = micro.rows.loss_mask
    log_ratio_BT = log_ratio(objective, logprobs_BT, micro.old_logprobs, mask_BT, micro.rows.segment_ids)
    policy = policy_loss(objective, log_ratio_BT, micro.advantages)
    token_share_BT = mask_BT / jnp.maximum(tokens, 1).astype(jnp.float32)
    probs_diff_BT = jnp.where(mask_BT, jnp.abs(jnp.exp(micro.rollout_logprobs) - jnp.exp(logprobs_BT)), 0.0)

    pg_loss, entropy = jnp.sum(micro.weights * policy.loss), jnp.sum(micro.weights * entropy_BT)
    loss = pg_loss - objective.entropy_coef * entropy
    metrics = {
        "actor/pg_loss": pg_loss,
        "actor/entropy": entropy,
        "actor/pg_clipfrac": jnp.sum(token_share_BT * policy.clipped),
        "actor/pg_clipfrac_lower": jnp.sum(token_share_BT * policy.dual_clipped),
        "actor/ppo_kl": jnp.sum(token_share_BT * (micro.old_logprobs - logprobs_BT)),
        "training/rollout_probs_diff_mean": jnp.sum(token_share_BT * probs_diff_BT),
        "training/rollout_probs_diff_max": probs_diff_BT.max(),
    }
    if objective.reference_in_loss:
        divergence_BT = kl_estimate(objective.kl_estimator, logprobs_BT, micro.ref_logprobs)
        metrics["actor/kl_loss"] = jnp.sum(micro.weights * divergence_BT)
        loss = loss + objective.kl_coef * metrics["actor/kl_loss"]
    return loss, metrics | {"actor/loss": loss}
