"""Bytes that each device holds, by kind: exact by shapes and shardings, estimated for programs while they run."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from memjax.models.config import ModelOptions
from memjax.plan.job import Job
from memjax.train.logprobs import positions_at_once

UPDATE, HAND_OVER, PREFILL, DECODE = "update", "weights to the engine", "prefill", "decode"


def bytes_per_device(tree: Any) -> int:
    """What one device holds of abstract arrays."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def held(job: Job) -> dict[str, int]:
    """What is there all the time."""
    rollout, weights = job.config.rollout, bytes_per_device(job.state.params)
    kinds = {
        "weights, float32": weights,
        "optimizer": bytes_per_device(job.state.opt_state),
        "reference": weights * _width(job.model.options) // 4 if job.config.objective.needs_reference else 0,
        "engine's weights": bytes_per_device(job.engine_params),
        "KV cache": bytes_per_device(job.cache(rollout.slots, rollout.max_length)),
        # Those kept for equal prompts, and the one that is being made.
        "prefixes": bytes_per_device(job.cache(1, rollout.prefix_tokens + job.shapes.work_length)),
    }
    return {kind: size for kind, size in kinds.items() if size}


def passing(job: Job) -> dict[str, int]:
    """What each program needs beside its arguments, estimated."""
    engine = job.engine.layout
    assert engine
    slots = -(-job.config.rollout.slots // engine.mesh.shape["data"])
    bucket = job.shapes.prefill_buckets[-1]
    return {
        UPDATE: sum(update_parts(job).values()),
        HAND_OVER: bytes_per_device(job.engine_params),  # until the engine lets go of those it has
        PREFILL: 2 * bucket * _layer_width(job) * _width(job.engine),
        DECODE: 3 * slots * job.shape.vocab_size * 4,
    }


def update_parts(job: Job) -> dict[str, int]:
    """What an update needs beside its state, estimated by kind."""
    shape, options = job.shape, job.model.options
    width, tensor = _width(options), job.model.layout.mesh.shape["tensor"]
    tokens, weights = job.rows * job.packing.row_tokens, bytes_per_device(job.state.params)
    one_layer = tokens * _layer_width(job) * width
    kept = tokens * shape.hidden_size * width if options.remat else one_layer
    vocabulary = shape.vocab_size // tensor
    chunk = job.rows * min(positions_at_once(job.topology.chip.platform), job.packing.row_tokens)
    return {
        "gradients": weights,
        "weights to multiply": weights * width // 4,
        "activations": shape.num_hidden_layers * kept + 2 * one_layer,
        # For use: a layer and its gradient, the table or projection and its float32 gradient.
        "gathered weights": 2 * width * layer_params(job) // tensor + (width + 4) * vocabulary * shape.hidden_size,
        "logits": 3 * 4 * chunk * vocabulary,
    }


def layer_params(job: Job) -> int:
    """Numbers in the matrices of one layer."""
    shape = job.shape
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    return shape.hidden_size * (heads * shape.head_dim + 3 * shape.intermediate_size)


def _layer_width(job: Job) -> int:
    """Numbers that a layer's matrices read and write of one token on one device."""
    shape, tensor = job.shape, job.model.layout.mesh.shape["tensor"]
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    return 4 * shape.hidden_size + (heads * shape.head_dim + 3 * shape.intermediate_size) // tensor


def _width(options: ModelOptions) -> int:
    return jnp.dtype(options.compute_dtype).itemsize
