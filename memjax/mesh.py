"""Devices to a mesh, and processes to one job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


_SILENCE_SECONDS = 30  # after which a process counts as dead, and jax ends the others


def start_distributed() -> None:
    """Join this process to the job, if it is one of several; call before anything touches a device.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID say what the job is. Without
    them a Slurm step of several tasks is one, and MEMJAX_DISTRIBUTED=auto lets jax look for others (TPU pods);
    otherwise this process is the whole job and nothing is done. When a process dies, the others end within a minute.
    """
    join = partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=_SILENCE_SECONDS,
        shutdown_timeout_seconds=_SILENCE_SECONDS,
    )
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1" or os.environ.get("MEMJAX_DISTRIBUTED") == "auto":
            join()
        return
    count, index = _from_environment("JAX_NUM_PROCESSES"), _from_environment("JAX_PROCESS_ID")
    if not 0 <= index < count:
        raise ValueError(f"JAX_PROCESS_ID {index} is not below JAX_NUM_PROCESSES {count}: ids run from 0")
    if count > 1:
        join(coordinator, count, index)


def _from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name} must be a whole number when JAX_COORDINATOR_ADDRESS is set, got {value!r}")
    return int(value)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of axes data, fsdp and tensor over `devices` (default: all of the job's); one size may be -1: the rest."""
    # Those of a process side by side, so that the axes that split finely stay in it: on a TPU slice a row of ids runs
    # through several hosts.
    devices = sorted(jax.devices() if devices is None else devices, key=lambda device: device.process_index)
    sizes = mesh_sizes(data, fsdp, tensor, len(devices))
    grid = np.asarray(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(data: int, fsdp: int, tensor: int, count: int) -> dict[str, int]:
    """The size of each axis of a mesh over `count` devices, where one size may be -1; ValueError if they do not fit."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    bad = {name: size for name, size in sizes.items() if size != -1 and size < 1}
    if bad or len(free) > 1:
        raise ValueError(f"mesh sizes must be positive, at most one of them -1 (the rest), got {sizes}")
    if free:
        sizes[free[0]] = count // prod(size for size in sizes.values() if size != -1)
    if prod(sizes.values()) != count:
        raise ValueError(
            f"mesh {data} x {fsdp} x {tensor} (data x fsdp x tensor) does not cover {count} devices exactly; "
            f"choose sizes whose product is {count}, or set one to -1"
        )
    return sizes
