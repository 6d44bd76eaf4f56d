"""The key-value cache, an explicit pytree.

Letters: L layers, B slots, S cache length, T time, K kv heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from memjax.models.config import ModelOptions, Qwen2Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys (already rotated) and values of one layer, [B,K,S,H]; of all layers, [L,B,K,S,H], when they are scanned.

    Heads come before time because TPUs tile the last two axes: with two or four kv heads there, every step would copy
    the whole cache into another layout (seen in the TPU compiler's memory analysis). CPUs are indifferent.
    """

    k: Any  # an array, or whatever a tree of the same form holds: its shape, its sharding
    v: Any


KVCache = tuple[LayerCache, ...]
"""One LayerCache per layer, or a single one holding all layers when they are scanned."""


def cache_length(cache: KVCache) -> int:
    """How many tokens a slot can hold."""
    return cache[0].k.shape[-2]


def cache_rows(cache: KVCache) -> int:
    """How many slots it has."""
    return cache[0].k.shape[-4]


def abstract_cache(
    config: Qwen2Config, options: ModelOptions, batch: int, length: int, dtype: DTypeLike | None = None
) -> KVCache:
    """Shapes, dtypes (compute_dtype unless given) and, where the options have a layout, shardings of a cache."""
    shape: tuple[int, ...] = (batch, config.num_key_value_heads, length, config.head_dim)
    names: tuple[str | None, ...] = ("batch", "kv_heads", None, "head_dim")
    if options.scan_layers:
        shape, names = (config.num_hidden_layers, *shape), ("layers", *names)
    sharding = options.layout.sharding(names, shape) if options.layout else None
    leaf = jax.ShapeDtypeStruct(shape, options.compute_dtype if dtype is None else dtype, sharding=sharding)
    return (LayerCache(leaf, leaf),) * (1 if options.scan_layers else config.num_hidden_layers)


def init_cache(
    config: Qwen2Config, options: ModelOptions, batch: int, length: int, dtype: DTypeLike | None = None
) -> KVCache:
    """An empty cache for `batch` slots of `length` tokens."""
    leaves = abstract_cache(config, options, batch, length, dtype)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), leaves)


def write(
    buffer: Float[Array, "*L B K S H"],
    new_BKTH: Float[Array, "B K T H"],
    start_B: Int[Array, " B"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "*L B K S H"]:
    """Put row b's T entries at start_B[b] (of `layer`, in a stacked buffer). The caller sees to start + T <= S."""
    new = new_BKTH.astype(buffer.dtype)
    if layer is None:
        put = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        return jax.vmap(put)(buffer, new, start_B)
    # A scatter of T x H windows, one for each row and head: by the TPU compiler's memory analysis it is done in place,
    # where a vmapped update, or windows that span heads, keep a copy of the whole cache.
    b, k = new.shape[:2]
    places = layer, jnp.arange(b)[:, None], jnp.arange(k)[None, :], start_B[:, None]
    indices = jnp.stack([jnp.broadcast_to(place, (b, k)).astype(jnp.int32) for place in places], axis=-1)
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3), inserted_window_dims=(0, 1, 2), scatter_dims_to_operand_dims=(0, 1, 2, 3)
    )
    return jax.lax.scatter(buffer, indices, new, windows, indices_are_sorted=True, unique_indices=True, mode="clip")


def take_row(cache: KVCache, slot: Int[Array, ""], length: int) -> KVCache:
    """The first `length` entries of one slot, as a cache of batch 1."""

    def take(x: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=x.ndim - 4)
        return jax.lax.slice_in_dim(row, 0, length, axis=x.ndim - 2)

    return jax.tree.map(take, cache)


def put_row(cache: KVCache, row: KVCache, slot: Int[Array, ""]) -> KVCache:
    """`cache` with the start of one slot replaced by `row`, a cache of batch 1 that is no longer than it."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        index = [jnp.int32(0)] * x.ndim
        index[x.ndim - 4] = jnp.asarray(slot, jnp.int32)
        return jax.lax.dynamic_update_slice(x, new.astype(x.dtype), index)

    return jax.tree.map(put, cache, row)
