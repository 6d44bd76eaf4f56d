"""AdamW and its learning rate, through optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from memjax.train.optimizer_config import OptimizerConfig


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
