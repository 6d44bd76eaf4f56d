"""The programs of a run, compiled for hardware that need not be there: what the compiler says of their memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError

from memjax.plan.job import Job
from memjax.plan.memory import DECODE, HAND_OVER, PREFILL, UPDATE
from memjax.plan.work import micro_batches
from memjax.rollout.programs import Programs
from memjax.train.learner import rollout_weights
from memjax.train.losses import Batch, objective_loss
from memjax.train.packing import Rows
from memjax.train.step import make_update

_EOS_WIDTH = 2


@dataclass(frozen=True)
class Compiled:
    """What one program needs of each device, in bytes, and how long its compilation took."""

    arguments: int
    passing: int  # beside its arguments, results that do not take their place included
    seconds: float


@dataclass(frozen=True)
class TooLarge:
    """A program that the compiler refused because it does not fit by itself."""

    said: str
    seconds: float


def compile_program(job: Job, name: str) -> Compiled | TooLarge:
    """Compile one of PROGRAMS for the job's devices. Raises what the compiler raises, but where memory is short."""
    started = time.perf_counter()
    try:
        memory = PROGRAMS[name](job).memory_analysis()
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = re.search(r"Used [\d.]+\w+ of [\d.]+\w+ \w+", str(error))
        return TooLarge(found.group() if found else "it ran out of memory", time.perf_counter() - started)
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    seconds = time.perf_counter() - started
    return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes + fresh, seconds)


def _compile_update(job: Job) -> Any:
    """An update with all of its micro-batches."""
    config, model = job.config, job.model
    shape = (1 << (micro_batches(job) - 1).bit_length(), job.packing.rows, job.packing.row_tokens)
    sharding = model.layout.sharding((None, "batch", "time"), shape)
    integers, flags, numbers = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in (jnp.int32, jnp.bool_, jnp.float32)
    )
    batch = Batch(Rows(integers, integers, integers, flags), numbers, numbers, numbers, numbers, numbers)
    update: Any = make_update(
        model.config,
        model.options,
        model.logprob_options(config.rollout.temperature),
        config.optimizer,
        partial(objective_loss, config.objective),
    )
    return update.lower(job.state, batch).compile()


def _compile_hand_over(job: Job) -> Any:
    """From weights that are trained to those that sample."""
    weights: Any = rollout_weights(job.model)
    return weights.lower(job.state.params).compile()


def _compile_prefill(job: Job) -> Any:
    """The largest piece of a prompt, which may look at the longest cache."""
    return _engine_programs(job).get("prefill", job.shapes.prefill_buckets[-1], job.shapes.prefill_windows[-1])


def _compile_decode(job: Job) -> Any:
    """A step of all slots over the whole cache."""
    return _engine_programs(job).get("decode", job.shapes.max_length)


def _engine_programs(job: Job) -> Programs:
    layout = job.engine.layout
    assert layout
    return Programs(
        job.shape,
        job.engine,
        job.shapes,
        layout.mesh,
        job.engine_params,
        vocabulary=job.vocabulary,
        eos_width=_EOS_WIDTH,
    )


PROGRAMS: Mapping[str, Callable[[Job], Any]] = MappingProxyType(
    {
        UPDATE: _compile_update,
        HAND_OVER: _compile_hand_over,
        PREFILL: _compile_prefill,
        DECODE: _compile_decode,
    }
)
"""The programs that decide whether a run fits, by name."""
