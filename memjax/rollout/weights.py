"""The weights an engine runs, behind a reference that can be swapped between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Weights:
    """A parameter tree and the number of the update that made it."""

    params: Any
    version: int = 0


class WeightStore:
    """Holds the current weights; an engine reads them at every call.

    All trees have the structure, shapes, dtypes and shardings of the first, so that no program is compiled for a swap.
    """

    def __init__(self, params: Any, version: int = 0):
        self.current = Weights(params, version)
        self.abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
        )

    def swap(self, params: Any, version: int | None = None) -> int:
        """Make `params` current, as `version` (by default the next), and return the version.

        Arrays already in place are not copied: the caller must not donate them to a computation of its own.
        """
        self._check(params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        version = self.current.version + 1 if version is None else version
        self.current = Weights(jax.device_put(params, shardings), version)
        return version

    def _check(self, params: Any) -> None:
        held, given = _by_path(self.abstract), _by_path(params)
        odd = sorted(given.keys() ^ held.keys())
        if odd:
            raise ValueError(f"the weights to swap in differ in structure from those in use at {', '.join(odd[:5])}")
        for path, leaf in given.items():
            if (leaf.shape, leaf.dtype) != (held[path].shape, held[path].dtype):
                raise ValueError(
                    f"weight {path} is {leaf.dtype}{list(leaf.shape)}, the engine runs "
                    f"{held[path].dtype}{list(held[path].shape)}: cast or reshape it before the swap"
                )


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
