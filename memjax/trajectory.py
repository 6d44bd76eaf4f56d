"""The types that pass between agents, clients, rewards and the learner. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

FinishReason = Literal["stop", "length", "error", "cancelled"]


@runtime_checkable
class TextSource(Protocol):
    """A document that is read piece by piece and never held whole."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def pieces(self) -> Iterator[str]:
        """Yield the text in order, from the start, in pieces of any size; every call starts afresh."""
        ...


@dataclass(frozen=True)
class Task:
    """One question about one context.

    `metric` names the function in memjax.rewards that scores an answer; tasks with the same `group` are samples of one
    prompt when advantages are formed. `extra` carries whatever the data set knows (evidence, positions, level).
    """

    id: str
    question: str
    context: str | TextSource
    answers: tuple[str, ...] = ()
    metric: str = "sub_em"
    group: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How to draw `n` completions of one prompt.

    Temperature 0 is greedy. `top_k` 0 and `top_p` 1 mean no cut. With the same seed a prompt gives the same tokens
    whatever else is in the batch; sample i of n uses the i-th stream of that seed. None draws a fresh seed.
    """

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature must be between 0 and 100, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no cut) or positive, got {self.top_k}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed must have at most 64 bits, got {self.seed}")
        if any(not stop for stop in self.stop):
            raise ValueError("a stop string must not be empty")


@dataclass(frozen=True)
class Completion:
    """What a model wrote after one prompt.

    `token_ids` are the sampled ids, the end-of-sequence id included when it was drawn. `logprobs[i]` is the log softmax
    of logits/temperature over the real vocabulary at `token_ids[i]`, before any top-k or top-p cut; greedy decoding
    reports temperature 1. A text-only service leaves the three arrays empty. `text` ends before a stop string.
    `weights_version` is the version at the first sampled token.
    """

    prompt_ids: np.ndarray  # int32 [T]
    token_ids: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    text: str
    finish_reason: FinishReason
    weights_version: int = 0
    prompt_tokens: int = 0  # as counted by whoever ran the model
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose prefill was shared with an earlier request
    seconds: float = 0.0
    error: str | None = None


class Span(NamedTuple):
    """The sampled tokens of a turn that has a reward of its own: a half-open range in its conversation.

    Spans of one `step` are compared with each other within a group.
    """

    start: int
    end: int
    step: str
    reward: float


@dataclass(frozen=True)
class Conversation:
    """One context window: prompt and sampled tokens, in order; several turns where a prompt extends it."""

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True where the model sampled the token
    logprobs: np.ndarray  # float32 [T], 0 where loss_mask is False
    kind: str  # of its last turn, as the agent calls it: memory, final, ...
    truncated: bool = False  # the last reply was cut at its token limit
    spans: tuple[Span, ...] = ()  # of the turns that have a reward of their own

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.loss_mask) == len(self.logprobs):
            raise ValueError(
                f"token_ids, loss_mask and logprobs must have one length, got "
                f"{len(self.token_ids)}, {len(self.loss_mask)}, {len(self.logprobs)}"
            )


@dataclass(frozen=True)
class Trajectory:
    """What an episode leaves: its conversations, its answer, its reward.

    A failed episode is a result like any other: `error` says why, `answer` is empty, the reward is zero.
    """

    task_id: str
    group_id: str
    conversations: tuple[Conversation, ...]
    answer: str
    reward: float | None = None
    error: str | None = None
    counters: Mapping[str, float] = field(default_factory=dict)  # document_tokens, model_calls, truncated_tokens, ...
    seconds: float = 0.0  # from the first call to the answer
    failure: Exception | None = field(default=None, compare=False, repr=False)  # what `error` tells of
