"""Logical axis names to mesh axes: the one place where a model's axes meet a mesh's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """The mesh axes over which each logical axis is split; () is whole on every device."""

    batch: MeshAxes = ("data", "fsdp")
    time: MeshAxes = ()
    embed: MeshAxes = ()
    q_heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    head_dim: MeshAxes = ()
    ffn: MeshAxes = ("tensor",)
    vocab: MeshAxes = ("tensor",)
    layers: MeshAxes = ()

    def axes(self, name: str) -> MeshAxes:
        """The mesh axes of the logical axis called `name`."""
        if name not in self.__dataclass_fields__:
            raise ValueError(f"no sharding rule for axis {name!r}; known: {', '.join(self.__dataclass_fields__)}")
        return getattr(self, name)


ROLLOUT = Rules()
"""Weights are whole in every replica and split over tensor only: a decode step gathers no weights."""

TRAIN = Rules(embed=("fsdp",))
"""Weights, and with them gradients and optimiser state, are also split over fsdp and gathered layer by layer."""


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules that place logical axes on it."""

    mesh: Mesh
    rules: Rules = ROLLOUT

    def spec(self, names: Sequence[str | None], units: Sequence[int]) -> PartitionSpec:
        """The partition of an array whose axis i is called `names[i]` and splits into `units[i]` indivisible parts.

        Units are the axis length, but the number of heads for an axis of heads times head size. An axis takes its mesh
        axes as far as their product divides its units, and is replicated over the rest: two kv heads on tensor = 8 are
        whole on every device. Two axes of one array on one mesh axis are an error in the rules or the names.
        """
        taken: dict[str, str] = {}
        parts: list[tuple[str, ...] | None] = []
        for name, unit in zip(names, units, strict=True):
            axes = () if name is None else self.rules.axes(name)
            for axis in axes:
                if axis in taken:
                    raise ValueError(f"axes {taken[axis]!r} and {name!r} of one array both map to mesh axis {axis!r}")
                taken[axis] = str(name)
            while unit % prod(self.mesh.shape[axis] for axis in axes):
                axes = axes[:-1]
            parts.append(axes or None)
        return PartitionSpec(*parts)

    def sharding(self, names: Sequence[str | None], units: Sequence[int]) -> NamedSharding:
        """The sharding for `spec(names, units)`."""
        return NamedSharding(self.mesh, self.spec(names, units))


def constrain(x: jax.Array, layout: Layout | None, names: Sequence[str | None]) -> jax.Array:
    """Ask the compiler to lay `x` out by its logical axes; without a layout, `x` as it is."""
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(names, x.shape))
