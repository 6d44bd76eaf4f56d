"""What every agent has: its protocol, its token budgets, and how randomness is shared out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from memjax.data.chunks import MIN_CHUNK_TOKENS, ChunkTokenizer
from memjax.rollout.client import Client, ClientError, Prompt
from memjax.trajectory import Completion, Conversation, ConversationKind, SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from memjax.rollout.client import Message

JOINT_TOKENS = 8
"""Allowed for text that takes more tokens beside the prompt's words than alone."""


class AgentTokenizer(ChunkTokenizer, Protocol):
    """What an agent needs of a tokenizer."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """The ids that end a reply."""
        ...

    def count(self, text: str) -> int:
        """How many tokens the text takes."""
        ...

    def render(self, messages: Sequence[Message]) -> Sequence[int]:
        """The ids of the messages in the model's chat template."""
        ...


class Agent(Protocol):
    """Works a task with a model."""

    async def run(self, task: Task, client: Client) -> Trajectory:
        """Work the task. A failure is a trajectory that says so."""
        ...


@dataclass(frozen=True)
class Budgets:
    """The most tokens that each part of a conversation may take."""

    question: int = 1024
    chunk: int = 5000
    memory: int = 1024
    answer: int = 1024

    def __post_init__(self) -> None:
        for name, least in {"question": 1, "chunk": MIN_CHUNK_TOKENS, "memory": 1, "answer": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"the {name} budget must be at least {least} tokens, got {getattr(self, name)}")


@dataclass(frozen=True)
class Turn:
    """One call of the model."""

    kind: ConversationKind
    prompt: Prompt
    completion: Completion


def question_tokens(question: str, budget: int, tokenizer: AgentTokenizer) -> int:
    """The tokens of a question; ValueError where it is empty or over its budget."""
    if not question.strip():
        raise ValueError("the question is empty: ask something")
    tokens = tokenizer.count(question)
    if tokens > budget:
        raise ValueError(
            f"the question has {tokens} tokens and its budget is {budget}: shorten it, or raise the question budget"
        )
    return tokens


def turn_params(sampling: SamplingParams, max_tokens: int, question: str, step: int) -> SamplingParams:
    """How to draw one reply: a seed of its own for every question and step, so that their order does not matter."""
    seed = sampling.seed
    if seed is not None:
        digest = hashlib.sha256(f"{seed}\n{step}\n{question}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1  # services take signed 32-bit seeds
    return replace(sampling, max_tokens=max_tokens, seed=seed, n=1)


async def take_turn(client: Client, prompt: Prompt, params: SamplingParams, kind: ConversationKind) -> Turn:
    """Ask for one completion; one that ended in an error is raised as such."""
    (completion,) = await client.complete(prompt, params)
    if completion.finish_reason in ("error", "cancelled"):
        raise ClientError(completion.error or f"{client.model} ended the reply with {completion.finish_reason!r}")
    return Turn(kind, prompt, completion)


def conversations_of(turns: Iterable[Turn]) -> tuple[Conversation, ...]:
    """The conversations that the turns make, in order."""
    return tuple(Conversation.from_completion(turn.completion, turn.kind) for turn in turns)


def generation_counters(turns: Sequence[Turn]) -> dict[str, float]:
    """What the model's calls took."""
    completions = [turn.completion for turn in turns]
    return {
        "model_calls": len(completions),
        "prompt_tokens": sum(completion.prompt_tokens for completion in completions),
        "cached_tokens": sum(completion.cached_tokens for completion in completions),
        "generated_tokens": sum(completion.completion_tokens for completion in completions),
    }
