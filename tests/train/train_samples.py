"""Small trajectories and a one-layer model for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memjax.models.config import Qwen2Config
from memjax.trajectory import Conversation, Trajectory

VOCAB = 40
CONFIG = Qwen2Config(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


def conversation(prompt: int, sampled: int, rng: np.random.Generator, *, truncated: bool = False) -> Conversation:
    """Random ids: `prompt` given, then `sampled` with log-probabilities around those of a uniform draw."""
    mask = np.arange(prompt + sampled) >= prompt
    logprobs = np.where(mask, rng.normal(-np.log(VOCAB), 0.3, len(mask)), 0).astype(np.float32)
    return Conversation(rng.integers(0, VOCAB, len(mask)).astype(np.int32), mask, logprobs, "memory", truncated)


def trajectory(reward: float, group: str, lengths: Sequence[tuple[int, int]], seed: int = 0) -> Trajectory:
    """A trajectory whose conversations have these (prompt, sampled) lengths."""
    rng = np.random.default_rng(seed)
    return Trajectory("task", group, tuple(conversation(*pair, rng) for pair in lengths), "", reward)


def trajectories(groups: int = 2, size: int = 3, seed: int = 0) -> list[Trajectory]:
    """Groups of trajectories with several conversations of mixed lengths, whose rewards differ within each group."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(groups * size):
        lengths = [tuple(rng.integers((2, 1), (7, 5))) for _ in range(rng.integers(1, 4))]
        made.append(trajectory(float(i % size == 0), f"group {i // size}", lengths, seed=seed * 1000 + i))
    return made
