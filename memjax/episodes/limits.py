"""How much one episode may ask for, so that an agent that never stops ends with a sentence."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Bounds of an episode: what goes over one ends it with an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    calls: int = Field(default=256, ge=1)
    """Calls of the model or of a function; as many more for each chunk that was read."""
    call_seconds: float | None = Field(default=None, gt=0)
    """Seconds until a reply of the model is there, its wait for a free slot included; null for no bound."""
    episode_seconds: float | None = Field(default=None, gt=0)
    """Seconds of the whole episode; null for no bound."""
