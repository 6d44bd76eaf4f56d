"""Devices to a mesh, and processes to one job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


def start_distributed(
    coordinator: str | None = None, process_count: int | None = None, process_id: int | None = None
) -> None:
    """Join this process to the job; call before anything touches a device.

    What is not given comes from MEMJAX_COORDINATOR (host:port), MEMJAX_PROCESS_COUNT and MEMJAX_PROCESS_ID. Without a
    coordinator, MEMJAX_DISTRIBUTED=auto lets jax find the job (TPU pods, Slurm, Kubernetes); otherwise this process is
    the whole job and nothing is done.
    """
    coordinator = coordinator or os.environ.get("MEMJAX_COORDINATOR")
    if coordinator is None:
        if os.environ.get("MEMJAX_DISTRIBUTED") == "auto":
            jax.distributed.initialize()
        return
    count = _from_environment("MEMJAX_PROCESS_COUNT") if process_count is None else process_count
    index = _from_environment("MEMJAX_PROCESS_ID") if process_id is None else process_id
    if not 0 <= index < count:
        raise ValueError(f"process id {index} is not below the process count {count}: ids run from 0")
    if count > 1:
        jax.distributed.initialize(coordinator, count, index)


def _from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name} must be a whole number when a coordinator is given, got {value!r}")
    return int(value)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of axes data, fsdp and tensor over `devices` (default: all of the job's); one size may be -1: the rest."""
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    bad = {name: size for name, size in sizes.items() if size != -1 and size < 1}
    if bad or len(free) > 1:
        raise ValueError(f"mesh sizes must be positive, at most one of them -1 (the rest), got {sizes}")
    if free:
        sizes[free[0]] = len(devices) // prod(size for size in sizes.values() if size != -1)
    if prod(sizes.values()) != len(devices):
        raise ValueError(
            f"mesh {data} x {fsdp} x {tensor} (data x fsdp x tensor) does not cover {len(devices)} devices exactly; "
            f"choose sizes whose product is {len(devices)}, or set one to -1"
        )
    grid = np.asarray(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
