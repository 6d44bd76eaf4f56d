"""Rotary position embeddings, plain and stretched by YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles; the fields are those of Hugging Face's `rope_parameters`.

    Only `theta` matters to the default type. `original_max_position_embeddings` is the length the model saw before YaRN
    stretched it by `factor`.
    """

    theta: float = 10_000.0
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position for each of the head_dim / 2 pairs, float32."""
    plain = 1.0 / config.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if config.kind == "default":
        return plain.astype(np.float32)

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns this many times over the original length."""
        turns = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slow = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain * (1 - slow) + plain / config.factor * slow).astype(np.float32)


def attention_scale(config: RopeConfig) -> float:
    """What cos and sin are multiplied by, so that scores grow by its square."""

    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.kind == "default":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def rope_tables(
    config: RopeConfig, head_dim: int, positions_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Cosines and sines for each position, float32: angles in bfloat16 are off by whole turns past a few hundred."""
    frequencies = jnp.asarray(inverse_frequencies(config, head_dim))
    angles = jnp.einsum("bt,h->bth", positions_BT.astype(jnp.float32), frequencies, precision=jax.lax.Precision.HIGHEST)
    scale = attention_scale(config)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x_BTNH: Float[Array, "B T N H"], cos: Float[Array, "B T H2"], sin: Float[Array, "B T H2"]
) -> Float[Array, "B T N H"]:
    """Turn each pair (i, i + H/2) of every head by its angle, in float32."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
