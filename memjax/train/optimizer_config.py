"""What the optimizer is told; without jax, so that a config is checked before jax is loaded."""

from __future__ import annotations

from typing import Literal

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
