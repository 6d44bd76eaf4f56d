"""What an update reads: packed rows joined with advantages, weights and earlier log-probabilities. Runs on the host.

M micro-batches, B rows of one micro-batch, T tokens of a row, N trajectories of the rollout batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from memjax.train.advantages import group_advantages, overlong_penalty, step_baselines, trajectory_rewards
from memjax.train.losses import Batch, kl_estimate
from memjax.train.packing import PackedStep
from memjax.train.presets import Aggregation, ObjectiveConfig
from memjax.trajectory import Trajectory


def make_batches(
    steps: Sequence[PackedStep],
    trajectories: Sequence[Trajectory],
    objective: ObjectiveConfig,
    *,
    learner_logprobs: Sequence[Float[Any, "M B T"]] | None = None,
    ref_logprobs: Sequence[Float[Any, "M B T"]] | None = None,
) -> list[Batch]:
    """Join the steps of a rollout batch with what the objective makes of its rewards.

    `learner_logprobs` are of the weights before the first of these updates, `ref_logprobs` of the frozen reference;
    each is required when the objective reads it. Advantages compare whole groups, also those split over several steps.
    """
    if objective.old_logprobs == "learner" and learner_logprobs is None:
        raise ValueError("old_logprobs: learner needs a pass of the learner over the batch before its first update")
    if objective.needs_reference and ref_logprobs is None:
        raise ValueError(f"kl_coef {objective.kl_coef} needs log-probabilities of the frozen reference")
    rollout = [step.rollout_logprobs for step in steps]
    old = rollout if objective.old_logprobs == "rollout" or learner_logprobs is None else learner_logprobs
    reference = ref_logprobs if objective.needs_reference and ref_logprobs is not None else None

    rewards_N = trajectory_rewards(trajectories) - overlong_penalty(trajectories, objective)
    if reference is not None and objective.kl_in == "reward":
        divergence = [kl_estimate(objective.kl_estimator, o, r) for o, r in zip(old, reference, strict=True)]
        rewards_N = rewards_N - objective.kl_coef * sum_by_trajectory(steps, divergence, len(trajectories))
    advantages_N = group_advantages(rewards_N, [t.group_id for t in trajectories], objective.advantage)
    advantages = [advantages_N[step.trajectory] for step in steps]
    if credit := objective.step_credit:
        parts = step_advantages(steps, trajectories)
        advantages = [(1 - credit) * whole + credit * part for whole, part in zip(advantages, parts, strict=True)]
    importance = importance_weights(steps, old, len(trajectories), objective)

    return [
        Batch(
            rows=step.rows,
            rollout_logprobs=step.rollout_logprobs,
            old_logprobs=_masked(old[i], step),
            ref_logprobs=_masked(reference[i] if reference is not None else 0.0, step),
            advantages=_masked(advantages[i] * importance[i], step),
            weights=token_weights(step, objective.aggregation, objective.constant_tokens),
        )
        for i, step in enumerate(steps)
    ]


def step_advantages(steps: Sequence[PackedStep], trajectories: Sequence[Trajectory]) -> list[Float[Any, "M B T"]]:
    """The reward of each token's span minus the mean of its group at the same step; 0 outside of spans."""
    baselines = step_baselines(trajectories)
    found = []
    for step in steps:
        part = np.zeros(step.trajectory.size, np.float32)
        for index, conversation, first in step.places:
            for span in conversation.spans:
                baseline = baselines[trajectories[index].group_id, span.step]
                part[first + span.start : first + span.end] = span.reward - baseline
        found.append(part.reshape(step.trajectory.shape))
    return found


def token_weights(step: PackedStep, aggregation: Aggregation, constant_tokens: int = 1) -> Float[np.ndarray, "M B T"]:
    """The weight of each sampled token in the loss of its optimiser step; 0 elsewhere.

    Means are over the whole step: `token` 1 / tokens; `trajectory` 1 / (trajectories x tokens of this one);
    `conversation` the same per conversation; `constant` 1 / (trajectories x constant_tokens). Trajectories and
    conversations are counted when they have a token in the loss.
    """
    mask_MBT = step.rows.loss_mask
    if not mask_MBT.any():
        return np.zeros(mask_MBT.shape, np.float32)
    if aggregation == "token":
        return _masked(1.0 / mask_MBT.sum(), step)
    owner_MBT = step.conversation if aggregation == "conversation" else step.trajectory
    tokens = np.bincount(owner_MBT[mask_MBT])
    owners = np.count_nonzero(tokens)
    if aggregation == "constant":
        return _masked(1.0 / (owners * constant_tokens), step)
    return _masked(1.0 / (owners * np.maximum(tokens, 1))[owner_MBT], step)


def importance_weights(
    steps: Sequence[PackedStep],
    old_logprobs: Sequence[Float[Any, "M B T"]],
    trajectories: int,
    objective: ObjectiveConfig,
) -> list[Float[Any, "M B T"]]:
    """Probability under the learner over that under the sampler, at most the cap; 1 where the objective wants none.

    A trajectory's weight is the product over all sampled tokens of all its conversations.
    """
    gaps = [_masked(old - step.rollout_logprobs, step) for old, step in zip(old_logprobs, steps, strict=True)]
    if objective.importance == "none":
        return [np.ones_like(gap) for gap in gaps]
    if objective.importance == "trajectory":
        gap_N = sum_by_trajectory(steps, gaps, trajectories)
        gaps = [gap_N[step.trajectory] for step in steps]
    # The bound is taken in logs: over thousands of tokens the product itself would overflow.
    return [np.exp(np.minimum(gap, np.log(objective.importance_cap))) for gap in gaps]


def sum_by_trajectory(
    steps: Sequence[PackedStep], values: Sequence[Float[Any, "M B T"]], trajectories: int
) -> Float[np.ndarray, " N"]:
    """Sum over all sampled tokens of all conversations of each trajectory, float64."""
    total_N = np.zeros(trajectories)
    for step, values_MBT in zip(steps, values, strict=True):
        mask_MBT = step.rows.loss_mask
        total_N += np.bincount(step.trajectory[mask_MBT], np.asarray(values_MBT)[mask_MBT], trajectories)
    return total_N


def _masked(values: Float[Any, "*S"] | float, step: PackedStep) -> Float[np.ndarray, "M B T"]:
    return np.where(step.rows.loss_mask, values, 0.0).astype(np.float32)
