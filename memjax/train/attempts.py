"""Scored trajectories as bytes: what processes send one another, and what is kept beside a checkpoint."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from memjax.trajectory import Conversation, Task, Trajectory


@dataclass(frozen=True)
class Attempt:
    """A scored trajectory, and the task that it worked."""

    task: Task
    trajectory: Trajectory
    reward_error: str | None = None

    @property
    def reward(self) -> float:
        """What it is worth."""
        assert self.trajectory.reward is not None
        return self.trajectory.reward


def to_bytes(attempts: Sequence[Attempt], metrics: Mapping[str, float] = MappingProxyType({})) -> bytes:
    """Everything about attempts but their tasks, whose documents may be large; and metrics of all of them."""
    conversations = [c for attempt in attempts for c in attempt.trajectory.conversations]
    masks = [c.loss_mask for c in conversations]
    about = {"attempts": [_about(attempt) for attempt in attempts], "metrics": dict(metrics)}
    arrays: dict[str, Any] = {
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "lengths": np.array([len(mask) for mask in masks], np.int64),
        "token_ids": np.concatenate([np.zeros(0, np.int32), *(c.token_ids for c in conversations)]),
        "loss_mask": np.packbits(np.concatenate([np.zeros(0, bool), *masks])),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(c.logprobs[c.loss_mask] for c in conversations)]),
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def from_bytes(data: bytes, task_of: Callable[[str], Task]) -> tuple[list[Attempt], dict[str, float]]:
    """The attempts and their metrics; `task_of` gives the task of a group."""
    with np.load(io.BytesIO(data)) as arrays:
        about = json.loads(arrays["about"].tobytes())
        ends = np.cumsum(arrays["lengths"])
        token_ids, sampled = arrays["token_ids"], arrays["logprobs"]
        mask = np.unpackbits(arrays["loss_mask"], count=len(token_ids)).astype(bool)
    logprobs = np.zeros(len(token_ids), np.float32)
    logprobs[mask] = sampled
    pieces = zip(*(np.split(x, ends[:-1]) for x in (token_ids, mask, logprobs)), strict=True)
    return [_attempt(row, pieces, task_of) for row in about["attempts"]], about["metrics"]


def _about(attempt: Attempt) -> dict[str, Any]:
    t = attempt.trajectory
    return {
        "task_id": t.task_id,
        "group_id": t.group_id,
        "conversations": [[c.kind, c.truncated] for c in t.conversations],
        "answer": t.answer,
        "reward": t.reward,
        "error": t.error,
        "timings": dict(t.timings),
        "counters": dict(t.counters),
        "reward_error": attempt.reward_error,
    }


def _attempt(row: Mapping[str, Any], pieces: Iterator[Any], task_of: Callable[[str], Task]) -> Attempt:
    fields = dict(row)
    reward_error = fields.pop("reward_error")
    kinds = fields.pop("conversations")
    conversations = []
    for kind, truncated in kinds:
        token_ids, mask, logprobs = next(pieces)
        conversations.append(Conversation(token_ids, mask, logprobs, kind, truncated))
    trajectory = Trajectory(conversations=tuple(conversations), **fields)
    return Attempt(task_of(trajectory.group_id), trajectory, reward_error)
