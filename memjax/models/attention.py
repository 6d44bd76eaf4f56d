"""Causal attention of query groups: one signature, and the one place where its body is chosen.

Letters: B batch, T query time, S key time, W attended window, N query heads, K kv heads, G query heads per kv head,
H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from memjax.models.blockwise import HIDDEN, cached_attention, segment_attention
from memjax.models.config import AttentionBody, ModelOptions
from memjax.sharding import Layout

SPLASH_MULTIPLE = 128  # the kernel's tiles: lengths are multiples of it


def choose_body(options: ModelOptions, query_length: int, key_length: int, head_dim: int) -> AttentionBody:
    """The attention body for a platform and shape; an explicit choice in the options stands."""
    if options.attention != "auto":
        return options.attention
    if options.platform == "cpu":
        return "blockwise"
    if query_length == 1:  # one query row has nothing to block over: reading the cache is all there is
        return "einsum"
    if options.platform == "tpu":
        fits = query_length % SPLASH_MULTIPLE == 0 and key_length % SPLASH_MULTIPLE == 0
        return "splash" if fits else "blockwise"
    half = jnp.dtype(options.compute_dtype).itemsize == 2
    return "cudnn" if options.platform == "gpu" and half and head_dim <= 128 else "blockwise"


def attend_segments(
    q_BTNH: Float[Array, "B T N H"],
    k_BKTH: Float[Array, "B K T H"],
    v_BKTH: Float[Array, "B K T H"],
    segments_BT: Int[Array, "B T"],
    options: ModelOptions,
) -> Float[Array, "B T N H"]:
    """Attention over whole sequences, where a query sees the keys of its own segment up to its own index."""
    t, h = q_BTNH.shape[1], q_BTNH.shape[3]
    body = choose_body(options, t, t, h)
    if body == "blockwise":
        return _by_groups(segment_attention, q_BTNH, k_BKTH, v_BKTH, segments_BT)
    if body == "splash":
        return _splash(q_BTNH, k_BKTH, v_BKTH, segments_BT, segments_BT, options.layout)
    causal_TT = jnp.tril(jnp.ones((t, t), bool))
    visible_BTT = causal_TT[None] & (segments_BT[:, :, None] == segments_BT[:, None, :])
    return _masked(body)(q_BTNH, k_BKTH, v_BKTH, visible_BTT)


def attend_cache(
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    start_B: Int[Array, " B"],
    window: int,
    options: ModelOptions,
) -> Float[Array, "B T N H"]:
    """Attention to a cache that holds the queries' own keys: query t of row b sees entries up to start_B[b] + t.

    Only the first `window` entries are read, and start_B + T <= window.
    """
    t, h = q_BTNH.shape[1], q_BTNH.shape[3]
    body = choose_body(options, t, window, h)
    if body == "blockwise":
        return _by_groups(partial(cached_attention, start_B=start_B, limit=window), q_BTNH, k_BKSH, v_BKSH)
    k_BKWH, v_BKWH = k_BKSH[:, :, :window], v_BKSH[:, :, :window]
    if body == "splash":
        return _splash_cached(q_BTNH, k_BKWH, v_BKWH, start_B, options.layout)
    at_BT = start_B[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    visible_BTW = jnp.arange(window, dtype=jnp.int32)[None, None, :] <= at_BT[:, :, None]
    return _masked(body)(q_BTNH, k_BKWH, v_BKWH, visible_BTW)


def einsum_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    visible_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """The reference body: all scores at once, in float32."""

    def attend(q_BKGTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array) -> jax.Array:
        q_BKGTH = _scaled(q_BKGTH, k_BKSH)
        scores = jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible_BTS[:, None, None], scores, HIDDEN), axis=-1)
        return jnp.einsum("bkgts,bksh->bkgth", weights.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32)

    return _by_groups(attend, q_BTNH, k_BKSH, v_BKSH)


def _masked(body: AttentionBody) -> Callable[..., jax.Array]:
    return _cudnn if body == "cudnn" else einsum_attention


def _scaled(q: jax.Array, k: jax.Array) -> jax.Array:
    return (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(k.dtype)


def _by_groups(
    attend: Callable[..., jax.Array], q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, *rest: jax.Array
) -> jax.Array:
    """Call a body that wants each kv head's queries together, so that keys and values are never repeated."""
    b, t, n, h = q_BTNH.shape
    k = k_BKSH.shape[1]
    q_BKGTH = q_BTNH.reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4)
    out_BKGTH = attend(q_BKGTH, k_BKSH, v_BKSH, *rest)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h).astype(q_BTNH.dtype)


def _cudnn(q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """cuDNN's fused attention: scores stay on the chip, the mask is a [B, 1, T, S] array."""
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BKSH.swapaxes(1, 2).astype(q_BTNH.dtype),
        v_BKSH.swapaxes(1, 2).astype(q_BTNH.dtype),
        mask=visible_BTS[:, None],
        implementation="cudnn",
    )


def _splash_cached(
    q_BTNH: jax.Array, k_BKWH: jax.Array, v_BKWH: jax.Array, start_B: jax.Array, layout: Layout | None
) -> jax.Array:
    """Splash for queries at an offset known only at run time.

    The kernel's causal mask is static. So the keys are laid out as the W - T oldest entries followed by the queries'
    own T, with the mask's offset at W - T; what lies between start and W - T is given a segment that nobody sees.
    """
    t, w = q_BTNH.shape[1], k_BKWH.shape[2]
    if w > t:

        def own_last(x_BKWH: jax.Array) -> jax.Array:
            own = jax.vmap(lambda x_KWH, start: jax.lax.dynamic_slice_in_dim(x_KWH, start, t, axis=1))(x_BKWH, start_B)
            return jnp.concatenate([x_BKWH[:, :, : w - t], own], axis=2)

        k_BKWH, v_BKWH = own_last(k_BKWH), own_last(v_BKWH)
    index_W = jnp.arange(w, dtype=jnp.int32)
    seen_BW = (index_W[None] < start_B[:, None]) | (index_W >= w - t)[None]
    own_BT = jnp.ones(q_BTNH.shape[:2], jnp.int32)
    return _splash(q_BTNH, k_BKWH, v_BKWH, own_BT, seen_BW.astype(jnp.int32), layout)


def _splash(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_segments_BT: jax.Array,
    k_segments_BS: jax.Array,
    layout: Layout | None,
) -> jax.Array:
    """The Pallas TPU kernel on each device's own rows and heads; query t sees keys s <= S - T + t of its segment."""
    n, k = q_BTNH.shape[2], k_BKSH.shape[1]

    def local(q_BTNH: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
        (t, s), groups = (q_BTNH.shape[1], k.shape[2]), q_BTNH.shape[2] // k.shape[1]
        mask = splash.MultiHeadMask([splash.CausalMask((t, s), offset=s - t)] * groups)
        kernel = splash.make_splash_mqa_single_device(mask=mask, block_sizes=_splash_blocks(t, s))
        heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))

        def attend(q_BKGTH: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            segments = splash.SegmentIds(q_segments, k_segments)
            return jax.vmap(heads)(_scaled(q_BKGTH, k), k, v, segments)

        return _by_groups(attend, q_BTNH, k, v)

    if layout is None:
        return local(q_BTNH, k_BKSH, v_BKSH, q_segments_BT, k_segments_BS)
    q_sharding = layout.sharding(("batch", None, "q_heads", None), q_BTNH.shape)
    q_spec = q_sharding.spec
    k_spec = layout.spec(("batch", "kv_heads", None, None), k_BKSH.shape)
    if q_spec[2] != k_spec[1]:
        # Fewer kv heads than devices: repeat each, so that every device holds those of its own queries.
        shards = n // q_sharding.shard_shape(q_BTNH.shape)[2]
        repeats = math.lcm(k, shards) // k
        k_BKSH, v_BKSH = (jnp.repeat(x, repeats, axis=1) for x in (k_BKSH, v_BKSH))
        k_spec = PartitionSpec(k_spec[0], q_spec[2], None, None)
    segments = PartitionSpec(q_spec[0], None)
    mapped = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(q_spec, k_spec, k_spec, segments, segments),
        out_specs=q_spec,
        check_vma=False,  # the kernel does not say over which axes its outputs vary
    )
    return mapped(q_BTNH, k_BKSH, v_BKSH, q_segments_BT, k_segments_BS)


def _splash_blocks(t: int, s: int) -> splash.BlockSizes:
    block_t, block_s = (max(b for b in (512, 256, 128) if length % b == 0) for length in (t, s))
    return splash.BlockSizes(
        block_q=block_t,
        block_kv=block_s,
        block_q_dkv=block_t,
        block_kv_dkv=block_s,
        block_kv_dkv_compute=block_s,
        block_q_dq=block_t,
        block_kv_dq=block_s,
    )
