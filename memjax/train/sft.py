"""Supervised training: written conversations as trajectories, packed and learned by the same update as sampled ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from memjax.agents.memagent import MemAgent
from memjax.data.seeds import stream
from memjax.data.tiny import recall_example, replies
from memjax.rollout.client import Prompt
from memjax.tokenizer import Tokenizer
from memjax.train.batches import token_weights
from memjax.train.config import SupervisedStage
from memjax.train.losses import Batch
from memjax.train.packing import PackingConfig, pack
from memjax.trajectory import Completion, Conversation, SamplingParams, Task, Trajectory


@dataclass
class WrittenReplies:
    """A client that answers prompts with given texts, in order: what an agent makes of them is a demonstration."""

    texts: list[str]
    tokenizer: Tokenizer
    model: str = "demonstrations"
    window: int | None = None
    _next: int = field(default=0, init=False)

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """The next text, as if it had been drawn with its end token."""
        text = self.texts[self._next]
        self._next += 1
        return [written(self.tokenizer.render_prompt(prompt).ids, said(text), self.tokenizer)]

    async def close(self) -> None:
        """Nothing to release."""


def written(
    prompt_ids: Sequence[int], reply: Completion, tokenizer: Tokenizer, max_tokens: int | None = None
) -> Completion:
    """What someone else wrote, as if this tokenizer's model had drawn it; the log-probabilities, unknown, are 0.

    It ends with the end token, unless it was cut: by whoever wrote it, or here at `max_tokens`.
    """
    if reply.finish_reason not in ("stop", "length"):
        return reply
    ids = tokenizer.encode(reply.text)
    ids += [tokenizer.eos_ids[0]] if reply.finish_reason == "stop" else []
    is_cut = reply.finish_reason == "length" or (max_tokens is not None and len(ids) > max_tokens)
    ids = ids[:max_tokens]
    return replace(
        reply,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        text=tokenizer.decode(ids) if is_cut else reply.text,
        finish_reason="length" if is_cut else "stop",
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(ids),
    )


def said(text: str) -> Completion:
    """A reply that is this text and ends."""
    nothing = np.zeros(0, np.int32)
    return Completion(nothing, nothing, np.zeros(0, np.float32), text, "stop")


def stage_examples(
    stage: SupervisedStage,
    step: int,
    agent: MemAgent,
    tokenizer: Tokenizer,
    seed: int,
    readings: Sequence[Trajectory] = (),
) -> list[Trajectory]:
    """What update number `step` of a stage learns from; the same whenever it is asked for.

    `readings` are those of its file, for a stage of trajectories: each once in every epoch, in another order.
    """
    if stage.kind == "trajectories":
        return _in_epochs(readings, range(step * stage.examples, (step + 1) * stage.examples), seed, stage.name)
    rng = stream(seed, "supervised", stage.name, step)
    if stage.kind == "recall":
        return [_recall(agent, tokenizer, rng) for _ in range(stage.examples)]
    names, shares = zip(*sorted(stage.policies.items()), strict=True)
    tasks = [stage.tasks.task(step * stage.examples + i) for i in range(stage.examples)]
    policies = rng.choices(names, weights=shares, k=stage.examples)
    scripts = [(task, replies(task, policy, rng)) for task, policy in zip(tasks, policies, strict=True)]

    async def demonstrate_all() -> list[Trajectory]:
        return [await demonstrate(task, texts, agent, tokenizer) for task, texts in scripts]

    return asyncio.run(demonstrate_all())


def _in_epochs(readings: Sequence[Trajectory], numbers: range, seed: int, name: str) -> list[Trajectory]:
    size = len(readings)
    orders = {
        epoch: stream(seed, "order", name, epoch).sample(range(size), size) for epoch in {n // size for n in numbers}
    }
    return [readings[orders[n // size][n % size]] for n in numbers]


async def demonstrate(task: Task, texts: list[str], agent: MemAgent, tokenizer: Tokenizer) -> Trajectory:
    """The reading of a task in which the agent's model writes `texts`."""
    trajectory = await agent.run(task, WrittenReplies(texts, tokenizer))
    if trajectory.error:
        raise ValueError(f"the demonstration of {task.id} does not fit the agent: {trajectory.error}")
    return trajectory


def supervised_batch(examples: Sequence[Trajectory], packing: PackingConfig) -> Batch:
    """One update on all conversations, each written token counting the same; replies that were cut are left out."""
    (step,) = pack(examples, packing, mask_truncated=True)
    zeros_MBT = np.zeros(step.rows.tokens.shape, np.float32)
    return Batch(
        rows=step.rows,
        rollout_logprobs=zeros_MBT,
        old_logprobs=zeros_MBT,
        ref_logprobs=zeros_MBT,
        advantages=zeros_MBT,
        weights=token_weights(step, "token"),
    )


def supervised_loss(
    logprobs_BT: Float[Array, "B T"], entropy_BT: Float[Array, "B T"], micro: Batch, tokens: Int[Array, ""]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean negative log-probability of the written tokens, in nats: the share of one micro-batch."""
    loss = -jnp.sum(micro.weights * logprobs_BT)
    return loss, {"actor/loss": loss, "actor/entropy": jnp.sum(micro.weights * entropy_BT)}


def _recall(agent: MemAgent, tokenizer: Tokenizer, rng: random.Random) -> Trajectory:
    question, memory, chunk, reply = recall_example(rng)
    prompt = agent.prompts.memory.fill({"question": question, "memory": memory, "chunk": chunk})
    completion = written(tokenizer.render_prompt(prompt).ids, said(reply), tokenizer)
    return Trajectory("recall", "recall", (Conversation.from_completion(completion, "memory"),), answer="")
