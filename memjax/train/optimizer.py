"""AdamW and its learning rate, through optax."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from pydantic import BaseModel, ConfigDict, Field, model_validator


class OptimizerConfig(BaseModel):
    """How gradients become updates. A step is one optimiser update, of which a rollout batch may give several."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-6, gt=0)
    """The highest learning rate."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the rate rises linearly: step i of them, from 1, has i parts of it."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the rate does after warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Step at which the cosine ends, counted from the start; needed with `schedule: cosine`."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Part of the rate that is left at the end of the cosine."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradients' running mean per step."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the squared gradients' running mean per step."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared gradients' mean."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Part of a matrix, times the rate, taken off it per step; norms and biases keep theirs."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Global norm to which larger gradients are scaled down."""

    @model_validator(mode="after")
    def _cosine_has_an_end(self) -> OptimizerConfig:
        if self.schedule == "cosine" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) must be larger than warmup_steps ({self.warmup_steps}) for a cosine"
            )
        return self


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of the update after `step` others. The first is never 0: a rollout batch is too dear to waste."""

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        factor = jnp.minimum((jnp.asarray(step, jnp.float32) + 1) / max(config.warmup_steps, 1), 1.0)
        if config.schedule == "cosine":
            done = (jnp.asarray(step, jnp.float32) - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
            cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
            factor = factor * (config.final_fraction + (1 - config.final_fraction) * cosine)
        return config.learning_rate * factor

    return rate


def clip_by_norm(grads: Any, norm: Float[Array, ""], limit: float) -> Any:
    """Gradients of that global norm, scaled down to `limit` where they are larger."""
    # A product, which XLA fuses into the optimizer's passes over the gradients; a quotient would be written out first.
    scale = jnp.minimum(1.0, limit / norm)
    return jax.tree.map(lambda x: x * scale, grads)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW, for gradients that are already clipped."""
    return optax.adamw(
        learning_rate(config),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )


def _decayed(params: Any) -> Any:
    """True at the matrices, by name: with scanned layers a bias has two axes as well."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(key.key) for key in path]
        return names[-1] == "weight" and not any("norm" in name for name in names)

    return jax.tree_util.tree_map_with_path(is_matrix, params)
