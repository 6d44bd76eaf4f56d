"""Supervised training: written conversations as trajectories, packed and learned by the same update as sampled ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from memjax.agents.scripted import demonstrate, recall
from memjax.data import arithmetic, tiny
from memjax.data.seeds import stream
from memjax.episodes.run import Agent
from memjax.own_code import is_own, load_own
from memjax.tokenizer import Tokenizer
from memjax.train.batches import token_weights
from memjax.train.config import SupervisedStage
from memjax.train.losses import Batch
from memjax.train.packing import PackingConfig, pack
from memjax.trajectory import Task, Trajectory


def stage_examples(
    stage: SupervisedStage,
    step: int,
    agent: Agent,
    tokenizer: Tokenizer,
    seed: int,
    recorded: Sequence[Trajectory] = (),
) -> list[Trajectory]:
    """What update number `step` of a stage learns from; the same whenever it is asked for.

    `recorded` are those of its file, for a stage of trajectories: each once in every epoch, in another order.
    """
    numbers = range(step * stage.examples, (step + 1) * stage.examples)
    if stage.kind == "trajectories":
        size = len(recorded)
        epochs = {n // size: stream(seed, "order", stage.name, n // size) for n in numbers}
        orders = {epoch: rng.sample(range(size), size) for epoch, rng in epochs.items()}
        return [recorded[orders[n // size][n % size]] for n in numbers]
    rng = stream(seed, "supervised", stage.name, step)

    async def written() -> list[Trajectory]:
        if stage.kind == "recall":
            return [await recall(agent, rng, tokenizer) for _ in numbers]
        names, shares = zip(*sorted(stage.policies.items()), strict=True)
        policies = rng.choices(names, weights=shares, k=stage.examples)
        tasks = [(stage.arithmetic or stage.tasks).task(n) for n in numbers]
        built_in = arithmetic.replies if stage.arithmetic else tiny.replies
        scripts = [_script(task, policy, rng, built_in) for task, policy in zip(tasks, policies, strict=True)]
        return [await demonstrate(agent, *pair, tokenizer) for pair in zip(tasks, scripts, strict=True)]

    return asyncio.run(written())


def _script(task: Task, policy: str, rng: random.Random, built_in: Callable[..., list[str]]) -> list[str]:
    """What a scripted reader writes about a task, one of `built_in` or of the user's."""
    if not is_own(policy):
        return built_in(task, policy, rng)
    try:
        written = load_own(policy, "scripted reader")(task, rng)
    except Exception as error:  # the boundary around code of the user's
        raise ValueError(
            f"the scripted reader {policy} failed at {task.id}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(written, list) or not all(isinstance(text, str) for text in written):
        raise ValueError(f"the scripted reader {policy} must return its replies as a list of str, got {written!r:.200}")
    return written


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
