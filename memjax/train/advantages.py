"""How a trajectory did against the others of its group, formed before its conversations are unrolled. numpy only.

N trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from memjax.train.presets import AdvantageKind, ObjectiveConfig
from memjax.trajectory import Trajectory

# Rewards closer than this are one reward: a mean over equal floats may miss them by rounding.
_SAME_REWARD = 1e-8
_STD_FLOOR = 1e-6


def trajectory_rewards(trajectories: Sequence[Trajectory]) -> Float[np.ndarray, " N"]:
    """The rewards, float64. Raises ValueError where a trajectory has none or one that is no number."""
    for trajectory in trajectories:
        if trajectory.reward is None or not np.isfinite(trajectory.reward):
            raise ValueError(
                f"trajectory of task {trajectory.task_id!r} has reward {trajectory.reward}; "
                "score every trajectory, failed ones with 0, before forming advantages"
            )
    return np.array([trajectory.reward for trajectory in trajectories], np.float64)


def group_index(group_ids: Sequence[str]) -> Int[np.ndarray, " N"]:
    """Number the groups 0, 1, ...; equal ids get equal numbers."""
    return np.unique(np.asarray(group_ids, dtype=str), return_inverse=True)[1].reshape(-1)


def informative(rewards_N: Float[np.ndarray, " N"], group_ids: Sequence[str]) -> Bool[np.ndarray, " N"]:
    """Which trajectories belong to a group whose rewards differ; the others have nothing to teach."""
    group_N = group_index(group_ids)
    count = group_N.max(initial=-1) + 1
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group_N, rewards_N)
    np.maximum.at(high, group_N, rewards_N)
    return (high - low > _SAME_REWARD)[group_N]


def keep_informative(trajectories: Sequence[Trajectory], objective: ObjectiveConfig) -> tuple[Trajectory, ...]:
    """The trajectories to train on: with dynamic sampling, those of groups whose raw rewards differ."""
    if not objective.dynamic_sampling:
        return tuple(trajectories)
    keep_N = informative(trajectory_rewards(trajectories), [t.group_id for t in trajectories])
    return tuple(t for t, keep in zip(trajectories, keep_N, strict=True) if keep)


def group_advantages(
    rewards_N: Float[np.ndarray, " N"], group_ids: Sequence[str], kind: AdvantageKind
) -> Float[np.ndarray, " N"]:
    """Advantage of each trajectory within its group, float32.

    `mean`: r - mean. `mean_std`: that over the unbiased deviation. `leave_one_out`: r - mean of the others, which is
    n / (n - 1) times the first. Groups whose rewards are all equal, and groups of one, get exactly 0.
    """
    group_N = group_index(group_ids)
    size = np.bincount(group_N)
    mean = np.bincount(group_N, weights=rewards_N) / size
    centred_N = rewards_N - mean[group_N]
    others = np.maximum(size - 1, 1)
    if kind == "mean_std":
        std = np.sqrt(np.bincount(group_N, weights=centred_N**2) / others)
        centred_N = centred_N / (std + _STD_FLOOR)[group_N]
    elif kind == "leave_one_out":
        centred_N = centred_N * (size / others)[group_N]
    return np.where(informative(rewards_N, group_ids), centred_N, 0.0).astype(np.float32)


def step_baselines(trajectories: Sequence[Trajectory]) -> dict[tuple[str, str], float]:
    """The mean reward of the spans of each (group, step)."""
    found: dict[tuple[str, str], list[float]] = {}
    for trajectory in trajectories:
        for conversation in trajectory.conversations:
            for span in conversation.spans:
                found.setdefault((trajectory.group_id, span.step), []).append(span.reward)
    return {place: sum(rewards) / len(rewards) for place, rewards in found.items()}


def overlong_penalty(trajectories: Sequence[Trajectory], objective: ObjectiveConfig) -> Float[np.ndarray, " N"]:
    """What to take from each reward for length, in sampled tokens of the longest conversation (DAPO, Eq. 13).

    0 up to limit - buffer, then linear, the whole penalty from the limit on. ValueError for a limit that is null.
    """
    limit, buffer = objective.overlong_limit, objective.overlong_buffer
    if buffer == 0:
        return np.zeros(len(trajectories))
    if limit is None or buffer is None:
        raise ValueError("overlong_limit or overlong_buffer is null: memjax.train.presets.within_budgets sets both")
    longest_N = np.array(
        [max((int(c.loss_mask.sum()) for c in t.conversations), default=0) for t in trajectories], np.float64
    )
    return objective.overlong_penalty * np.clip((longest_N - (limit - buffer)) / buffer, 0.0, 1.0)
