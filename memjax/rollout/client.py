"""What an agent asks of a model: the prompt type and the client protocol. No jax."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from memjax.trajectory import Completion, SamplingParams

Part = str | Sequence[int]
"""Text, or token ids that enter the prompt verbatim."""

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model asks for. `arguments` is a JSON text, or the mapping that it stands for."""

    id: str
    name: str
    arguments: str | Mapping[str, Any]

    @property
    def json(self) -> str:
        """The arguments as JSON text."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Message:
    """One chat message whose content is put together from parts.

    An assistant message may have `tool_calls`, and then no content. A tool message is the result of the call with the
    id `tool_call_id`, of the tool `name`. An assistant message that is a reply of this episode (`Reply.message`) needs
    no tool_calls: its ids say what it called.
    """

    role: Role
    content: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The content as text, ids decoded."""
        return "".join(part if isinstance(part, str) else decode(part) for part in self.content)


@dataclass(frozen=True)
class Prompt:
    """Chat messages, how much of them other prompts will repeat, and the tools that the model may call.

    `shared_parts` counts the leading parts of the last message that, with everything before them, are common to several
    prompts: a client may keep the prefill of that prefix (one chunk, many questions). It never changes the result.
    `tools` are function definitions as OpenAI writes them: {"type": "function", "function": {"name", "description",
    "parameters": a JSON schema}}.
    """

    messages: tuple[Message, ...]
    shared_parts: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()


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
