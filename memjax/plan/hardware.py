"""Chips, what they can do at best, and the slices that they come in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Chip:
    """One accelerator, by its data sheet. Bytes and FLOPs are decimal and per second; None where nobody knows."""

    platform: Literal["tpu", "gpu", "cpu"]
    memory: float
    flops: float | None  # dense, bfloat16
    bandwidth: float | None  # of its memory
    link: float | None  # to its neighbours, all links together, one direction
    per_host: int  # chips of one process


# TPUs: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e}, tables of key specifications; links are half of "bidirectional
# inter-chip interconnect bandwidth". A slice of several hosts has four chips to a host. GPUs: NVIDIA's data sheets of
# A100 SXM 80 GB, H100 SXM and H200 SXM; NVLink is what joins the GPUs of one host.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip("tpu", 16e9, 197e12, 819e9, 200e9, 4),
        "v5p": Chip("tpu", 95e9, 459e12, 2765e9, 600e9, 4),
        "v6e": Chip("tpu", 32e9, 918e12, 1638e9, 400e9, 4),
        "a100": Chip("gpu", 80e9, 312e12, 2039e9, 300e9, 8),
        "h100": Chip("gpu", 80e9, 989e12, 3350e9, 450e9, 8),
        "h200": Chip("gpu", 141e9, 989e12, 4800e9, 450e9, 8),
    }
)
_SIDES = {"v5e": 2, "v5p": 3, "v6e": 2}
# The usual shapes: docs.cloud.google.com/tpu/docs/{v5e,v6e,v5p}.
_SHAPES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16"),
}
_HOST = {2: "2x2", 3: "2x2x1"}  # the four chips of one host
EXAMPLES = "v5e:8x8, v5p:4x4x4, v6e:8x8 (TPU slices), h100:8 (GPUs), cpu:8 (this machine)"


@dataclass(frozen=True)
class Topology:
    """`count` chips of one kind, in processes of `per_process`."""

    name: str
    chip: Chip
    count: int

    @property
    def per_process(self) -> int:
        """Chips that one process, and so one rollout engine, has for itself."""
        return min(self.count, self.chip.per_host)

    @property
    def processes(self) -> int:
        """Processes of the run."""
        return self.count // self.per_process

    @property
    def is_proven_in_parts(self) -> bool:
        """Whether a program is known to compile for the chips of one process beside a program for all.

        On slices of v5e and v6e libtpu 0.0.42 refuses the one ("device assignment should include all slice devices")
        and breaks down over the other.
        """
        return self.processes == 1 or not self.name.startswith(("v5e", "v6e"))

    @property
    def can_compile(self) -> bool:
        """Whether there is a compiler for it that needs no such chip."""
        return self.chip.platform != "gpu"


def read_topology(name: str) -> Topology:
    """The topology of a name such as v5p:4x4x4, v5litepod-64, h100:8 or cpu:8; ValueError names those that exist."""
    name = _slice_named(name)
    kind, _, size = name.partition(":")
    if kind not in (*CHIPS, "cpu") or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        raise ValueError(f"no topology is called {name!r}: try {EXAMPLES}; chips are {', '.join(CHIPS)} and cpu")
    sides, wanted = [int(side) for side in size.split("x")], _SIDES.get(kind, 1)
    if len(sides) != wanted:
        raise ValueError(f"the size of {kind} has {wanted} number{'s' * (wanted > 1)}, got {size!r}: try {EXAMPLES}")
    count = prod(sides)
    chip = CHIPS[kind] if kind != "cpu" else Chip("cpu", _machine_memory() / count, None, None, None, count)
    topology = Topology(name, chip, count)
    if count % topology.per_process:
        raise ValueError(f"{name} has {count} chips, which do not fill hosts of {topology.per_process}: try {EXAMPLES}")
    return topology


def _slice_named(name: str) -> str:
    """The shape of a slice that is named as Google names its types.

    v5e-64, v5litepod-64 and v6e-64 count chips, v5p-128 counts TensorCores, of which a chip has two.
    """
    found = re.fullmatch(r"(v5e|v5litepod|v5p|v6e)-([1-9]\d*)", name)
    if found is None:
        return name
    kind, number = found[1].replace("litepod", "e"), int(found[2])
    per_chip = 2 if kind == "v5p" else 1
    shapes = {per_chip * prod(map(int, shape.split("x"))): shape for shape in _SHAPES[_SIDES[kind]]}
    if number not in shapes:
        sizes = ", ".join(f"{found[1]}-{size}" for size in shapes)
        raise ValueError(f"there is no slice {name}: {sizes} are; other shapes are written as in {EXAMPLES}")
    return f"{kind}:{shapes[number]}"


def _machine_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def compile_devices(topology: Topology) -> Sequence[jax.Device]:
    """The devices of a slice, of which programs can be compiled for all together.

    For a CPU they are this process's own. For a TPU they exist only for the compiler, which is in libtpu: ValueError
    where that is not installed, or knows no such slice.
    """
    if topology.chip.platform == "cpu":
        return _own_devices(topology.count)
    # Without these libtpu looks for a TPU machine's metadata, and lets only one process in at a time.
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices
    except RuntimeError as error:  # jax's own errors are RuntimeErrors too
        if "TPU support not installed" in str(error):
            raise ValueError(
                'the compiler for TPUs is not installed: uv sync --extra tpu, or pip install "jax[tpu]"; '
                "--no-compile estimates without it"
            ) from None
        said = " ".join(str(error).split())
        raise ValueError(f"libtpu knows no slice {topology.name} ({said}): try {EXAMPLES}") from None


def engine_devices(topology: Topology) -> Sequence[jax.Device]:
    """The devices of one process, as a slice of their own.

    libtpu 0.0.42 compiles for part of a slice on v5p alone; see `Topology.is_proven_in_parts`.
    """
    if topology.chip.platform == "cpu" or topology.processes == 1:
        return compile_devices(topology)
    kind = topology.name.partition(":")[0]
    return compile_devices(read_topology(f"{kind}:{_HOST[_SIDES[kind]]}"))


def _own_devices(count: int) -> Sequence[jax.Device]:
    import jax

    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"this process has {len(devices)} CPU device(s), not {count}: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]
