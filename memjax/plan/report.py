"""Whether a run fits, what it needs, the least time it takes, and what to change: for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.table import Table

from memjax.plan.job import Job
from memjax.plan.memory import UPDATE, held, passing, update_parts
from memjax.plan.programs import Compiled, TooLarge
from memjax.plan.work import decode_time, longest, micro_batches, step_times, update_flops, update_time

_FREE = 0.95  # of the memory: the rest is the runtime's, and lost between arrays
_FEWEST_SLOTS = 8


@dataclass(frozen=True)
class Plan:
    """What is known of a job: by arithmetic, and of the programs in `compiled` by the compiler."""

    job: Job
    compiled: Mapping[str, Compiled | TooLarge] = field(default_factory=dict)

    @property
    def passing(self) -> dict[str, int]:
        """Bytes that each program needs beside what is held, by the compiler where it was asked."""
        estimated = passing(self.job)
        return estimated | {name: it.passing for name, it in self.compiled.items() if isinstance(it, Compiled)}

    @property
    def needed(self) -> int:
        """Bytes of one device at the worst moment: what is held, and the most that one program adds."""
        return sum(held(self.job).values()) + max(self.passing.values())

    @property
    def usable(self) -> float:
        """Bytes of one device."""
        return _FREE * self.job.topology.chip.memory

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        refused = any(isinstance(it, TooLarge) for it in self.compiled.values())
        return not refused and self.needed <= self.usable

    @property
    def advice(self) -> str:
        """What to change where it does not fit; '' where it does."""
        if self.fits:
            return ""
        excess = self.needed - self.usable
        knobs = list(_knobs(self.job, excess))
        enough = [knob for knob, saved in knobs if saved >= excess]
        chosen = enough[:1] or [knob for knob, _ in knobs]
        return f"set {' and '.join(chosen)}" if chosen else "take a slice of more chips, or chips with more memory"


def _knobs(job: Job, excess: float) -> Iterator[tuple[str, float]]:
    """Settings that lower the memory, the least costly first, and about how much each saves."""
    parts, sizes, rollout = update_parts(job), held(job), job.config.rollout
    if not job.model.options.remat:
        yield "compute.remat=true", parts["activations"] * (1 - 1 / job.shape.num_hidden_layers)
    if job.rows > 1:
        tokens = job.packing.row_tokens * job.model.row_multiple
        yield f"batch.micro_batch_tokens={tokens}", (parts["activations"] + parts["logits"]) * (1 - 1 / job.rows)
    fewer = max(_FEWEST_SLOTS, int(rollout.slots * (1 - excess / sizes["KV cache"])) // 8 * 8)
    if fewer < rollout.slots:
        yield f"rollout.slots={fewer}", sizes["KV cache"] * (1 - fewer / rollout.slots)
    tensor = job.config.compute.tensor
    if job.topology.per_process % (2 * tensor) == 0 and job.shape.num_attention_heads % (2 * tensor) == 0:
        halved = sizes["engine's weights"] + sizes["KV cache"] * (job.shape.num_key_value_heads % (2 * tensor) == 0)
        yield f"compute.tensor={2 * tensor}", halved / 2


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that is known, in bytes, operations and seconds."""
    job = plan.job
    update, decode = update_time(job), decode_time(job)
    return {
        "topology": job.topology.name,
        "chips": job.topology.count,
        "processes": job.topology.processes,
        "mesh": dict(job.model.layout.mesh.shape),
        "parameters": _parameters(job),
        "bytes_per_device": {
            "held": held(job),
            "passing": plan.passing,
            "update_estimated": update_parts(job),
            "needed": plan.needed,
            "memory": job.topology.chip.memory,
        },
        "compiled": {
            name: {"arguments": it.arguments, "passing": it.passing, "seconds": it.seconds}
            if isinstance(it, Compiled)
            else {"too_large": it.said, "seconds": it.seconds}
            for name, it in plan.compiled.items()
        },
        "fits": plan.fits,
        "engine_proven_beside_others": job.topology.is_proven_in_parts,
        "advice": plan.advice,
        "micro_batches_per_update": micro_batches(job),
        "update_flops": update_flops(job),
        "roofline_seconds": {
            "micro_batch": update and update.seconds,
            "decode_step": decode and decode.seconds,
            "step": step_times(job),
        },
    }


def tables(plan: Plan) -> Iterator[Table | str]:
    """The report, part by part."""
    job, chip = plan.job, plan.job.topology.chip
    mesh = " x ".join(f"{name} {size}" for name, size in job.model.layout.mesh.shape.items())
    processes = job.topology.processes
    yield (
        f"{job.config.model}: {_parameters(job) / 1e9:.2f}B parameters on {job.topology.count} chips ({mesh}) in "
        f"{processes} process{'es' if processes > 1 else ''}, an engine of {job.config.rollout.slots} slots in each"
    )
    yield _memory_table(plan)
    share = plan.needed / chip.memory
    yield f"{_gb(plan.needed)} of {_gb(chip.memory)} GB on each device ({share:.0%}): it {_verdict(plan)}"
    if plan.advice:
        yield f"To make it fit: {plan.advice}"
    if job.devices and not job.topology.is_proven_in_parts:
        yield (
            "Not proven: libtpu compiles no program for one host of such a slice, as an engine in each process needs; "
            "the engine above was compiled for a host by itself. Try a short run first."
        )
    times = step_times(job)
    if times is None:
        yield "No roofline: the peak of this chip is not known."
        return
    yield _time_table(job, times)
    total, one = sum(times.values()), longest(job)
    documents = job.config.rollout.groups * job.config.rollout.samples
    rate = documents * one.document / total / job.topology.count
    yield (
        f"At best a step takes {total:.0f} s, one part after the other, if every document has {one.document:,} tokens "
        f"and every budget is used up ({rate:,.0f} document tokens/s per chip). How much longer, only a run can tell."
    )


def _verdict(plan: Plan) -> str:
    refused = [f"{name} ({it.said})" for name, it in plan.compiled.items() if isinstance(it, TooLarge)]
    if refused:
        return f"does NOT fit, too large by itself: {', '.join(refused)}"
    return f"{'fits' if plan.fits else 'does NOT fit'}{'' if plan.compiled else ', by estimate'}"


def _memory_table(plan: Plan) -> Table:
    table = Table("GB on each device", "", title_justify="left")
    table.columns[1].justify = "right"
    for kind, size in held(plan.job).items():
        table.add_row(kind, _gb(size))
    table.add_section()
    for name, size in plan.passing.items():
        known = plan.compiled.get(name)
        source = f"compiled in {known.seconds:.0f} s" if isinstance(known, Compiled) else "estimated"
        table.add_row(f"while it runs: {name} ({source})", _gb(size))
        if name == UPDATE:
            for kind, part in update_parts(plan.job).items():
                table.add_row(f"    of that {kind} (estimated)", _gb(part))
    return table


def _time_table(job: Job, times: Mapping[str, float]) -> Table:
    table = Table("roofline", "seconds", "bound by")
    table.columns[1].justify = "right"
    update, decode = update_time(job), decode_time(job)
    assert update is not None
    assert decode is not None
    operations = f"{update_flops(job) / job.topology.count / 1e12:,.0f} TFLOP a chip"
    table.add_row(f"a micro-batch forward and back ({operations})", f"{update.seconds:.3f}", update.bound)
    table.add_row("a decode step of all slots", f"{decode.seconds:.4f}", decode.bound)
    table.add_section()
    for part, seconds in times.items():
        table.add_row(f"a step: {part}", f"{seconds:.0f}")
    return table


def _parameters(job: Job) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(job.state.params))


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
