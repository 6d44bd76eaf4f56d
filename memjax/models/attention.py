"""Causal attention of query groups: one signature, several bodies.

Letters: B batch, T query time, S key time, N query heads, K kv heads, G query heads per kv head, H head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax.models.config import ModelOptions


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    options: ModelOptions,
    *,
    start_B: Int[Array, "B"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention where query t of row b sees keys s <= start_B[b] + t (start 0 when None), of its own segment when given."""
    return einsum_attention(q_BTNH, k_BSKH, v_BSKH, start_B, segment_ids_BT)


def einsum_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    start_B: Int[Array, "B"] | None,
    segment_ids_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """The reference body: all scores at once, float32."""
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(b, t, k, n // k, h).astype(k_BSKH.dtype)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * h**-0.5
    start_B = jnp.zeros(b, jnp.int32) if start_B is None else start_B
    visible_BTS = jnp.arange(s)[None, None, :] <= start_B[:, None, None] + jnp.arange(t)[None, :, None]
    if segment_ids_BT is not None:
        visible_BTS &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    scores = jnp.where(visible_BTS[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v_BSKH, preferred_element_type=jnp.float32)
    return out.reshape(b, t, n, h).astype(q_BTNH.dtype)
