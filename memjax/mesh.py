"""Devices to a mesh, and processes to one job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes data, fsdp and tensor over `devices` (default: all of the job's); one size may be -1, the rest."""
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
