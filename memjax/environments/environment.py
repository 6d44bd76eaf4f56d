"""Something outside the model that an agent acts in: gymnasium's five fields in text and asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from memjax.trajectory import Task


@dataclass(frozen=True)
class Step:
    """What comes back for an action."""

    text: str  # what the model is shown
    reward: float = 0.0
    terminated: bool = False  # the task ended
    truncated: bool = False  # a limit ended it
    actions: tuple[str, ...] = ()  # those that are allowed, where there is such a list
    info: Mapping[str, Any] = field(default_factory=dict)  # never shown to the model, and not kept in the journal


class Environment(Protocol):
    """One object per episode; whatever it raises is its own failure, not the agent's.

    An action that makes no sense is answered with a Step that says so. An environment whose actions cannot be repeated
    (they book a flight, or depend on the hour) has an attribute `repeatable = False`.
    """

    async def reset(self, task: Task, *, seed: int) -> Step:
        """Begin the task anew."""
        ...

    async def step(self, action: str) -> Step:
        """Act."""
        ...

    async def close(self) -> None:
        """Let go of what it holds; also when it was never reset."""
        ...


class ToolEnvironment(Environment, Protocol):
    """An environment whose actions are calls of tools, as JSON text: {"name": ..., "arguments": {...}}."""

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The definitions of the tools, as OpenAI writes them."""
        ...
