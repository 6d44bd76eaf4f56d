"""The arithmetic of a training step on documents of full length, and the least time that the hardware leaves it.

A matrix product of [m, k] and [k, n] counts 2 m k n operations. A time is a roofline: the slowest of arithmetic at the
chip's peak, of reading memory, and of moving data between chips, each at its data sheet's best. Real runs take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from memjax.agents.registry import DEFAULT
from memjax.plan.job import Job
from memjax.plan.memory import bytes_per_device, layer_params

_USUAL_CHUNKS = 8  # where the config bounds none


@dataclass(frozen=True)
class Longest:
    """One trajectory with every budget used up, in tokens."""

    document: int
    conversations: int
    prompts: int
    sampled: int


@dataclass(frozen=True)
class Time:
    """Seconds by what bounds them."""

    arithmetic: float
    memory: float = 0.0
    links: float = 0.0

    @property
    def seconds(self) -> float:
        """What the slowest takes."""
        return max(self.arithmetic, self.memory, self.links)

    @property
    def bound(self) -> str:
        """Which that is."""
        return max(("arithmetic", "memory", "links"), key=lambda name: getattr(self, name))


def longest(job: Job) -> Longest:
    """The longest trajectory that the config allows; of an agent without chunks it is one full window."""
    agent, rollout = job.config.agent, job.config.rollout
    chunk, memory = getattr(agent, "chunk", 0), getattr(agent, "memory", 0)
    question, answer = getattr(agent, "question", DEFAULT.question), getattr(agent, "answer", DEFAULT.answer)
    if not chunk:
        prompt = rollout.max_length - answer
        return Longest(document=prompt - question, conversations=1, prompts=prompt, sampled=answer)
    chunks = rollout.max_chunks or _USUAL_CHUNKS
    return Longest(
        document=chunks * chunk,
        conversations=chunks + 1,
        prompts=chunks * (question + memory + chunk) + question + memory,
        sampled=chunks * memory + answer,
    )


def micro_batches(job: Job) -> int:
    """Micro-batches of one update, if rows were filled completely."""
    rollout, one = job.config.rollout, longest(job)
    tokens = rollout.groups * rollout.samples * (one.prompts + one.sampled)
    return max(1, -(-tokens // (job.config.batch.optimizer_steps * job.packing.rows * job.packing.row_tokens)))


def forward_flops(job: Job, tokens: float, context: float, projected: float) -> float:
    """Of `tokens` that attend to `context` others on average, of which `projected` become logits."""
    shape = job.shape
    attention = 4 * shape.num_attention_heads * shape.head_dim * context
    layers = shape.num_hidden_layers * (2 * layer_params(job) + attention)
    return tokens * layers + 2 * projected * shape.vocab_size * shape.hidden_size


def update_flops(job: Job) -> float:
    """Of one micro-batch on all devices: forward, twice that backward, and once more what is recomputed."""
    one, tokens = longest(job), job.packing.rows * job.packing.row_tokens
    sampled = tokens * one.sampled / (one.prompts + one.sampled)
    context = (one.prompts + one.sampled) / one.conversations / 2
    layers = forward_flops(job, tokens, context, 0)
    projection = forward_flops(job, 0, 0, sampled)
    return (4 if job.model.options.remat else 3) * layers + 4 * projection


def update_time(job: Job) -> Time | None:
    """Of one micro-batch."""
    chip, count = job.topology.chip, job.topology.count
    if chip.flops is None or chip.bandwidth is None or chip.link is None:
        return None
    width = jnp.dtype(job.model.options.compute_dtype).itemsize
    mesh, layers = job.model.layout.mesh.shape, job.shape.num_hidden_layers
    weights = width * layers * layer_params(job) / mesh["tensor"]
    gathers = (2 + job.model.options.remat) * weights * (1 - 1 / mesh["fsdp"])  # forward, again, and the gradients back
    hidden = job.rows * job.packing.row_tokens * job.shape.hidden_size * width
    sums = (4 + 2 * job.model.options.remat) * layers * 2 * hidden * (1 - 1 / mesh["tensor"])
    return Time(
        arithmetic=update_flops(job) / (count * chip.flops),
        memory=(2 + job.model.options.remat) * weights / chip.bandwidth,
        links=(gathers + sums) / chip.link,
    )


def decode_flops(job: Job) -> float:
    """Of one step of one engine, each slot half full."""
    slots = job.config.rollout.slots
    return forward_flops(job, slots, job.config.rollout.max_length / 2, slots)


def decode_time(job: Job) -> Time | None:
    """Of one step: the weights and half of the cache are read for one token in each slot."""
    chip = job.topology.chip
    if chip.flops is None or chip.bandwidth is None:
        return None
    cache = bytes_per_device(job.cache(job.config.rollout.slots, job.config.rollout.max_length))
    return Time(
        arithmetic=decode_flops(job) / (job.topology.per_process * chip.flops),
        memory=(bytes_per_device(job.engine_params) + cache / 2) / chip.bandwidth,
    )


def prefill_flops(job: Job) -> float:
    """Of one conversation's prompt."""
    one = longest(job)
    prompt = one.prompts / one.conversations
    return forward_flops(job, prompt, prompt / 2, 0)


def step_times(job: Job) -> dict[str, float] | None:
    """Seconds of one rollout batch and its updates, part by part, where every budget is used up."""
    update, decode, chip = update_time(job), decode_time(job), job.topology.chip
    if update is None or decode is None or chip.flops is None:
        return None
    config, one = job.config, longest(job)
    groups = -(-config.rollout.groups // job.topology.processes)  # of one engine
    trajectories = groups * config.rollout.samples
    # The samples of a group share their first prompt. A prompt is one row, which only `tensor` shares out.
    prompts = trajectories * (one.conversations - 1) + groups
    prefill = prompts * prefill_flops(job) / (config.compute.tensor * chip.flops)
    batches = micro_batches(job) * config.batch.optimizer_steps
    scored = (config.objective.old_logprobs == "learner") + config.objective.needs_reference
    passes = 4 if job.model.options.remat else 3
    return {
        "prefill": prefill,
        "decode": trajectories * one.sampled / min(config.rollout.slots, trajectories) * decode.seconds,
        "score": batches * scored * update.seconds / passes,
        "update": batches * update.seconds,
    }
