"""Scored trajectories as bytes: what processes send one another, and what is kept beside a checkpoint."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from memjax.episodes.diagnosis import Fate
from memjax.train.team import exchange
from memjax.trajectory import Conversation, Span, Trajectory


@dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory with its reward, and what became of the facts that its task needs.

    One with a `breakdown`, of the engine, a service or an environment, or with a `reward_error` says nothing of the
    model: its reward of 0 is no measurement, and nobody learns from it. With several rewards, `trajectory.reward` is
    their weighted sum and `rewards` has each by name, the outcome first.
    """

    trajectory: Trajectory
    fates: tuple[Fate, ...] = ()
    reward_error: str | None = None
    breakdown: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> str | None:
        """Why it counts for nothing in its group; None if it counts."""
        return self.breakdown or self.reward_error

    @property
    def reward(self) -> float:
        """What it is worth."""
        assert self.trajectory.reward is not None
        return self.trajectory.reward

    @property
    def outcome(self) -> float:
        """The reward by which it is right or wrong, and by which its group has variance."""
        return next(iter(self.rewards.values()), self.reward)

    def score(self, min_reward: float) -> dict[str, Any]:
        """The fields of its score line in a journal, which says to keep it from an outcome of `min_reward` on."""
        error = self.lost if self.trajectory.error is None else self.trajectory.error
        fields: dict[str, Any] = {"reward": self.outcome, "kept": error is None and self.outcome >= min_reward}
        fields |= {"rewards": {**self.rewards}} if self.rewards else {}
        return fields if error is None else {**fields, "error": error}


def of_all_processes(own: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """What each process has, in their order."""
    parts = exchange(to_bytes(own))
    return [*own] if len(parts) == 1 else [one for part in parts for one in from_bytes(part)[0]]


def to_bytes(scored: Sequence[ScoredTrajectory], metrics: Mapping[str, float] = MappingProxyType({})) -> bytes:
    """Scored trajectories, and metrics of all of them."""
    conversations = [c for one in scored for c in one.trajectory.conversations]
    mask = np.concatenate([np.zeros(0, bool), *(c.loss_mask for c in conversations)])
    arrays: dict[str, Any] = {
        "about": np.frombuffer(json.dumps([[*map(_about, scored)], {**metrics}]).encode(), np.uint8),
        "token_ids": np.concatenate([np.zeros(0, np.int32), *(c.token_ids for c in conversations)]),
        "loss_mask": np.packbits(mask),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(c.logprobs for c in conversations)])[mask],
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def from_bytes(data: bytes) -> tuple[list[ScoredTrajectory], dict[str, float]]:
    """What `to_bytes` was given."""
    with np.load(io.BytesIO(data)) as arrays:
        rows, metrics = json.loads(arrays["about"].tobytes())
        token_ids = arrays["token_ids"]
        mask = np.unpackbits(arrays["loss_mask"], count=len(token_ids)).astype(bool)
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[mask] = arrays["logprobs"]
    end = 0

    def conversation(length: int, kind: str, truncated: bool, spans: Sequence[Any]) -> Conversation:
        nonlocal end
        start, end = end, end + length
        arrays = token_ids[start:end], mask[start:end], logprobs[start:end]
        return Conversation(*arrays, kind, truncated, tuple(Span(*span) for span in spans))

    def scored(row: dict[str, Any]) -> ScoredTrajectory:
        conversations = tuple(conversation(*c) for c in row["conversations"])
        trajectory = Trajectory(**{**row["trajectory"], "conversations": conversations})
        fates = tuple(map(Fate.from_json, row["fates"]))
        return ScoredTrajectory(trajectory, fates, row["reward_error"], row["breakdown"], row["rewards"])

    return [*map(scored, rows)], metrics


def _about(one: ScoredTrajectory) -> dict[str, Any]:
    return {
        "trajectory": {**vars(one.trajectory), "conversations": None},
        "conversations": [(len(c.token_ids), c.kind, c.truncated, c.spans) for c in one.trajectory.conversations],
        "fates": [fate.to_json() for fate in one.fates],
        "reward_error": one.reward_error,
        "rewards": {**one.rewards},
        "breakdown": one.breakdown,
    }
