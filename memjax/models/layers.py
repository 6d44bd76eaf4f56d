"""The parts of a transformer layer that hold weights; matrices are (out, in).

Letters: B batch, T time, D model, F ffn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from memjax.models.config import ModelOptions, Qwen2Config

Axes = tuple[str | None, ...]


def parameter(value: jax.Array, axes: Axes, units: tuple[int, ...] | None = None) -> nnx.Param:
    """A parameter with its logical axes; `units` counts the indivisible parts of each axis (default: its length)."""
    return nnx.Param(value, out_sharding=axes, units=units or tuple(value.shape), eager_sharding=False)


class Linear(nnx.Module):
    """y = x W^T (+ b), multiplied in the narrower dtype, summed in float32."""

    def __init__(
        self,
        shape: tuple[int, int],
        axes: Axes,
        options: ModelOptions,
        rngs: nnx.Rngs,
        *,
        std: float,
        bias: bool = False,
        units: tuple[int, int] | None = None,
    ):
        weight = std * jax.random.normal(rngs.params(), shape, options.param_dtype)
        self.weight = parameter(weight, axes, units)
        if bias:
            self.bias = parameter(jnp.zeros(shape[:1], options.param_dtype), axes[:1], units and units[:1])

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Apply to the last axis."""
        y = matmul(x, self.weight[...])
        if hasattr(self, "bias"):
            y = y + jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)
        return y.astype(x.dtype)


def matmul(x: Float[Array, "*batch in"], weight: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """x W^T with float32 sums and result, in the narrower of the two dtypes."""
    dtype = min(x.dtype, weight.dtype, key=lambda dtype: jnp.dtype(dtype).itemsize)
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    # XLA's CPU backend multiplies a single bfloat16 row in a loop 10-25 times slower than its fast kernel, which wants
    # more rows and a float32 result; elsewhere eight rows are one tile.
    missing = max(0, 8 - len(rows)) if dtype != jnp.float32 else 0
    padded = jnp.pad(rows, ((0, missing), (0, 0)))
    y = jnp.einsum("mi,oi->mo", padded, weight.astype(dtype), preferred_element_type=jnp.float32)
    return y[: len(rows)].reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """Scale to unit root mean square, in float32."""

    def __init__(self, size: int, eps: float, options: ModelOptions):
        self.weight = parameter(jnp.ones(size, options.param_dtype), (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalise the last axis."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * jnp.broadcast_to(self.weight[...].astype(jnp.float32), x.shape)).astype(x.dtype)


class MLP(nnx.Module):
    """The gated feed-forward block."""

    def __init__(self, config: Qwen2Config, options: ModelOptions, rngs: nnx.Rngs):
        d, f, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.gate_proj = Linear((f, d), ("ffn", "embed"), options, rngs, std=std)
        self.up_proj = Linear((f, d), ("ffn", "embed"), options, rngs, std=std)
        self.down_proj = Linear((d, f), ("embed", "ffn"), options, rngs, std=std)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply to every position."""
        return self.down_proj(nnx.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
