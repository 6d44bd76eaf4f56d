"""Readers who know what to write: demonstrations in the ids of the model that is to learn."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memjax.agents.memagent import MemAgent
from memjax.data.tiny import recall_example
from memjax.episodes.episode import Episode
from memjax.episodes.run import Agent, run_episode
from memjax.rollout.client import Prompt
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams, Task, Trajectory


async def _nothing() -> None:
    pass


@dataclass(frozen=True)
class TeacherClient:
    """What someone else writes, as if the tokenizer's model had drawn it: in its ids, cut at its budgets.

    The log-probabilities, unknown, are 0. A reply ends with the end token unless it was cut.
    """

    write: Callable[[Prompt, SamplingParams], Awaitable[Sequence[Completion]]]
    tokenizer: Tokenizer
    model: str = "script"
    window: int | None = None  # in the teacher's tokens
    close: Callable[[], Coroutine[Any, Any, None]] = _nothing

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """The teacher's texts in the tokenizer's ids."""
        prompt_ids = np.asarray(self.tokenizer.render_prompt(prompt).ids, np.int32)
        return [self._own(prompt_ids, reply, params.max_tokens) for reply in await self.write(prompt, params)]

    def _own(self, prompt_ids: np.ndarray, reply: Completion, max_tokens: int) -> Completion:
        if reply.finish_reason not in ("stop", "length"):
            return reply
        ids = self.tokenizer.encode_reply(reply.text)
        ids += [self.tokenizer.eos_ids[0]] if reply.finish_reason == "stop" else []
        is_cut = reply.finish_reason == "length" or len(ids) > max_tokens
        ids = ids[:max_tokens]
        return replace(
            reply,
            prompt_ids=prompt_ids,
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            text=self.tokenizer.decode(ids) if is_cut else reply.text,
            finish_reason="length" if is_cut else "stop",
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(ids),
        )


def said(text: str) -> Completion:
    """A reply that is this text and ends."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), text, "stop")


async def demonstrate(agent: Agent, task: Task, texts: Sequence[str], tokenizer: Tokenizer) -> Trajectory:
    """The episode of a task in which the agent's model writes `texts`; ValueError where it needs more or fewer."""
    missing = [*reversed(texts)]

    async def write(prompt: Prompt, params: SamplingParams) -> list[Completion]:
        if not missing:
            raise ValueError(f"it takes more than {len(texts)} turns")
        return [said(missing.pop())]

    client = TeacherClient(write, tokenizer)
    trajectory = await run_episode(agent, task, client, tokenizer, SamplingParams(seed=0))
    problem = trajectory.error or (f"it takes fewer than {len(texts)} turns" if missing else None)
    if problem:
        raise ValueError(f"the demonstration of {task.id} does not fit the agent: {problem}")
    return trajectory


async def recall(agent: Agent, rng: random.Random, tokenizer: Tokenizer) -> Trajectory:
    """One memory turn that lists every fact shown. ValueError for an agent without a memory."""
    if not isinstance(agent, MemAgent):
        raise ValueError(f"kind: recall teaches an agent with a memory, not {type(agent).__name__}")
    question, memory, chunk, reply = recall_example(rng)
    prompt = agent.loaded_prompts.memory.fill({"question": question, "memory": memory, "chunk": chunk})

    async def one_turn(task: Task, episode: Episode) -> str:
        await episode.chat(prompt, max_tokens=tokenizer.count(reply) + 1, kind="memory")
        return ""

    return await demonstrate(one_turn, Task("recall", question, chunk), [reply], tokenizer)
