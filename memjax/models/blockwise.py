"""Attention by blocks of queries and keys with a running softmax: memory grows with the length, not with its square.

The method is FlashAttention's (arXiv 2205.14135); the backward pass recomputes the scores block by block. Blocks that
no query may see (later keys, other segments) are not computed: the bounds of the loops are read from the data.
Letters: B batch, T query time, S key time, K kv heads, G query heads per kv head, H head size; t and s are T and S
within a block.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

HIDDEN = -1e30  # not -inf: a block whose keys are all hidden must not make NaN


class Sight(NamedTuple):
    """Who sees whom: query t of row b sees keys s <= start[b] + t, s < limit, of its own segment."""

    start: Int[Array, " B"]
    segments: Int[Array, "B T"] | None
    limit: int


def cached_attention(
    q_BKGTH: Float[Array, "B K G T H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    start_B: Int[Array, " B"],
    limit: int,
) -> Float[Array, "B K G T H"]:
    """Attention to the first `limit` entries of a cache, without copying a window out of it. Not differentiable."""
    return _forward(q_BKGTH, k_BKSH, v_BKSH, Sight(start_B, None, limit))[0]


@jax.custom_vjp
def segment_attention(
    q_BKGTH: Float[Array, "B K G T H"],
    k_BKTH: Float[Array, "B K T H"],
    v_BKTH: Float[Array, "B K T H"],
    segments_BT: Int[Array, "B T"],
) -> Float[Array, "B K G T H"]:
    """Causal attention within segments, differentiable by q, k and v."""
    return _forward(q_BKGTH, k_BKTH, v_BKTH, _within(segments_BT))[0]


def _within(segments_BT: Int[Array, "B T"]) -> Sight:
    b, t = segments_BT.shape
    return Sight(jnp.zeros(b, jnp.int32), segments_BT, t)


def _block_sizes(t: int, s: int) -> tuple[int, int]:
    # Fastest of 64..512 on a CPU core: a prefill block's scores stay in its cache; decode blocks are long and few.
    queries = min(128, t)
    return queries, min(128 if queries > 8 else 256, s)


def _pad_time(x: jax.Array, block: int, axis: int) -> jax.Array:
    missing = -x.shape[axis] % block
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def _slice(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _key_range(sight: Sight, t: int, s: int) -> tuple[jax.Array, jax.Array]:
    """For each block of queries, the first block of keys that it must read and the one after the last."""
    queries, keys = _block_sizes(t, s)
    ends = jnp.max(sight.start) + jnp.minimum(jnp.arange(queries, t + queries, queries, dtype=jnp.int32), t)
    stop = -(-jnp.minimum(ends, min(sight.limit, s)) // keys)
    segments_BT = sight.segments
    if segments_BT is None:
        return jnp.zeros_like(stop), stop

    def extremes(block: int) -> tuple[jax.Array, jax.Array]:
        padded = jnp.pad(segments_BT, ((0, 0), (0, -t % block)), mode="edge").reshape(-1, -(-t // block), block)
        return padded.min(axis=-1), padded.max(axis=-1)

    (q_low, q_high), (k_low, k_high) = extremes(queries), extremes(keys)
    meet = (q_low[:, :, None] <= k_high[:, None, :]) & (k_low[:, None, :] <= q_high[:, :, None])
    return jnp.argmax(jnp.any(meet, axis=0), axis=-1).astype(jnp.int32), stop


def _scores(
    q_BKGtH: jax.Array, k_BKsH: jax.Array, sight: Sight, first_q: jax.Array, block: jax.Array, first_k: jax.Array
) -> Float[Array, "B K G t s"]:
    """Scores of one block, hidden keys at HIDDEN; the last block of keys starts early and hides what it repeats."""
    scores = jnp.einsum("bkgth,bksh->bkgts", q_BKGtH, k_BKsH, preferred_element_type=jnp.float32)
    t, s = scores.shape[-2:]
    at_s = first_k + jnp.arange(s, dtype=jnp.int32)
    at_Bt = sight.start[:, None] + first_q + jnp.arange(t, dtype=jnp.int32)[None]
    fresh_s = (at_s >= block * s) & (at_s < sight.limit)
    visible_Bts = (at_s[None, None, :] <= at_Bt[:, :, None]) & fresh_s[None, None, :]
    if sight.segments is not None:
        segments_Bt = _slice(_pad_time(sight.segments, t, 1), first_q, t, 1)
        segments_Bs = _slice(sight.segments, first_k, s, 1)
        visible_Bts &= segments_Bt[:, :, None] == segments_Bs[:, None, :]
    return jnp.where(visible_Bts[:, None, None], scores, HIDDEN)


def _scaled(q: jax.Array, dtype: np.dtype) -> jax.Array:
    return (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(dtype)


def _forward(
    q_BKGTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, sight: Sight
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K G T"]]:
    """The output, and the log of each query's softmax denominator."""
    b, k, g, t, h = q_BKGTH.shape
    s = k_BKSH.shape[2]
    queries, keys = _block_sizes(t, s)
    scaled = _pad_time(_scaled(q_BKGTH, k_BKSH.dtype), queries, 3)
    ranges = _key_range(sight, t, s)

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_BKGtH = _slice(scaled, i * queries, queries, 3)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, top, total = carry
            first_k = jnp.minimum(j * keys, s - keys)
            k_BKsH, v_BKsH = _slice(k_BKSH, first_k, keys, 2), _slice(v_BKSH, first_k, keys, 2)
            scores = _scores(q_BKGtH, k_BKsH, sight, i * queries, j, first_k)
            higher = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.exp(scores - higher[..., None])
            shrink = jnp.exp(top - higher)
            read = jnp.einsum(
                "bkgts,bksh->bkgth", weights.astype(v_BKsH.dtype), v_BKsH, preferred_element_type=jnp.float32
            )
            return out * shrink[..., None] + read, higher, total * shrink + weights.sum(axis=-1)

        shape = (b, k, g, queries)
        start = (jnp.zeros((*shape, h)), jnp.full(shape, HIDDEN), jnp.zeros(shape))
        out, top, total = jax.lax.fori_loop(ranges[0][i], ranges[1][i], key_block, start)
        return out / total[..., None], top + jnp.log(total)

    blocks = jax.lax.map(query_block, jnp.arange(scaled.shape[3] // queries, dtype=jnp.int32))
    out, log_total = jnp.moveaxis(blocks[0], 0, 3), jnp.moveaxis(blocks[1], 0, 3)
    out = out.reshape(b, k, g, -1, h)[:, :, :, :t]
    return out.astype(q_BKGTH.dtype), log_total.reshape(b, k, g, -1)[..., :t]


def _segment_forward(
    q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segments_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, log_total = _forward(q_BKGTH, k_BKTH, v_BKTH, _within(segments_BT))
    return out, (q_BKGTH, k_BKTH, v_BKTH, segments_BT, out, log_total)


def _segment_backward(saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_BKGTH, k_BKTH, v_BKTH, segments_BT, out, log_total = saved
    sight = _within(segments_BT)
    t, h = q_BKGTH.shape[3:]
    queries, keys = _block_sizes(t, t)
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    ranges = _key_range(sight, t, t)
    # sum over H of dout * out, the part of the softmax gradient that is common to a query's scores (paper, section B.4)
    common = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    scaled, dout, log_total, common = (
        _pad_time(x, queries, 3) for x in (_scaled(q_BKGTH, k_BKTH.dtype), dout.astype(v_BKTH.dtype), log_total, common)
    )

    def query_block(dkv: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q, d, log_sum, shared = (_slice(x, i * queries, queries, 3) for x in (scaled, dout, log_total, common))

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = carry
            first_k = jnp.minimum(j * keys, t - keys)
            k, v = _slice(k_BKTH, first_k, keys, 2), _slice(v_BKTH, first_k, keys, 2)
            weights = jnp.exp(_scores(q, k, sight, i * queries, j, first_k) - log_sum[..., None])
            dweights = dot("bkgth,bksh->bkgts", d, v)
            dscores = (weights * (dweights - shared[..., None])).astype(k.dtype)
            dk_block = dot("bkgts,bkgth->bksh", dscores, q) + _slice(dk, first_k, keys, 2)
            dv_block = dot("bkgts,bkgth->bksh", weights.astype(v.dtype), d) + _slice(dv, first_k, keys, 2)
            return (
                dq + dot("bkgts,bksh->bkgth", dscores, k),
                jax.lax.dynamic_update_slice_in_dim(dk, dk_block, first_k, axis=2),
                jax.lax.dynamic_update_slice_in_dim(dv, dv_block, first_k, axis=2),
            )

        dq, *dkv_ = jax.lax.fori_loop(ranges[0][i], ranges[1][i], key_block, (jnp.zeros(q.shape), *dkv))
        return (dkv_[0], dkv_[1]), dq

    zeros = jnp.zeros(k_BKTH.shape)
    blocks = jnp.arange(scaled.shape[3] // queries, dtype=jnp.int32)
    (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), blocks)
    dq = jnp.moveaxis(dq, 0, 3).reshape(scaled.shape)[:, :, :, :t] * h**-0.5
    return dq.astype(q_BKGTH.dtype), dk.astype(k_BKTH.dtype), dv.astype(v_BKTH.dtype), None


segment_attention.defvjp(_segment_forward, _segment_backward)
