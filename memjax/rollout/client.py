"""What an agent asks of a model: the prompt type and the client protocol. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from memjax.trajectory import Completion, SamplingParams

Part = str | Sequence[int]
"""Text, or token ids that enter the prompt verbatim."""

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One chat message whose content is put together from parts."""

    role: Role
    content: tuple[Part, ...]

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The content as text, ids decoded."""
        return "".join(part if isinstance(part, str) else decode(part) for part in self.content)


@dataclass(frozen=True)
class Prompt:
    """Chat messages, and how much of them other prompts will repeat.

    `shared_parts` counts the leading parts of the last message that, with everything before them, are common to several
    prompts: a client may keep the prefill of that prefix (one chunk, many questions). It never changes the result.
    """

    messages: tuple[Message, ...]
    shared_parts: int = 0


class ClientError(RuntimeError):
    """A completion could not be had. The message says what was asked of whom, what came back, and what to do."""


class Client(Protocol):
    """Completes prompts. Safe to call from many tasks of one event loop at a time."""

    @property
    def model(self) -> str:
        """A name for reports."""
        ...

    @property
    def window(self) -> int | None:
        """The most tokens, prompt and completion together; None where unknown."""
        ...

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """Draw `params.n` completions, in order of sample.

        Raises ValueError for a prompt that cannot fit and ClientError when the model could not be reached or failed.
        Cancelling the call frees what it holds.
        """
        ...

    async def close(self) -> None:
        """Release what the client holds; afterwards it cannot be used."""
        ...
