"""An episode in the shape of the official async OpenAI client, for agents that were written for it.

What the model says comes back with the client's attributes, and goes into a later prompt as the very ids that were
sampled when its message, or a dict of its content and tool calls, is among the messages: such a conversation extends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from memjax.rollout.client import Message, Prompt, Role, ToolCall
from memjax.rollout.tool_calls import parse_tool_calls

if TYPE_CHECKING:
    from memjax.episodes.episode import Episode, Reply

# Arguments that may be given with the value that changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
# Arguments that change no reply, whatever they say.
_WITHOUT_EFFECT = {
    "timeout",
    "user",
    "extra_headers",
    "extra_query",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Function(BaseModel):
    """What is called; `arguments` is JSON text."""

    arguments: str
    name: str


class ChatCompletionMessageToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class ChatCompletionMessage(BaseModel):
    """What the model said."""

    content: str | None = None
    refusal: None = None
    role: Literal["assistant"] = "assistant"
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ChatCompletionMessageToolCall] | None = None


class Choice(BaseModel):
    """The one answer."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int = 0
    logprobs: None = None
    message: ChatCompletionMessage


class CompletionUsage(BaseModel):
    """Tokens."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    completion_tokens_details: None = None
    prompt_tokens_details: None = None


class ChatCompletion(BaseModel):
    """The answer to a request."""

    id: str
    choices: list[Choice]
    created: int
    model: str
    object: Literal["chat.completion"] = "chat.completion"
    metadata: None = None
    moderation: None = None
    service_tier: None = None
    system_fingerprint: None = None
    usage: CompletionUsage


class EpisodeClient:
    """Has `chat.completions.create`, `close` and `async with` of AsyncOpenAI.

    The episode's model answers, whatever `model` says.
    """

    def __init__(self, episode: Episode):
        self.chat = _Chat(episode)

    async def close(self) -> None:
        """Nothing: the episode closes what it uses."""

    async def __aenter__(self) -> EpisodeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"episode.openai() has chat.completions.create, but no {name!r}")


class _Chat:
    def __init__(self, episode: Episode):
        self.completions = _Completions(episode)


class _Completions:
    def __init__(self, episode: Episode):
        self._episode = episode

    async def create(
        self,
        *,
        messages: Sequence[Any],
        model: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> ChatCompletion:
        """One call of the model, as the official client has it.

        `seed` is not used: the episode's own seed fixes every draw, and one seed for all attempts at a task would make
        them equal. A call with another temperature than the run's carries no loss (`off_temperature_calls` counts it),
        as the learner takes its probabilities at the run's. ValueError names any other argument that is not honoured.
        """
        for name, value in others.items():
            if name in _WITHOUT_EFFECT:
                continue
            if not _is_absent(value) and value not in _NEUTRAL.get(name, ()):
                raise ValueError(f"episode.openai() does not support {name}={value!r}: leave it out")
        given = [n for n in (max_completion_tokens, max_tokens) if n is not None and not _is_absent(n)]
        stops = () if _is_absent(stop) or stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        shown = () if _is_absent(tools) or tools is None else tuple(tools)
        prompt = Prompt(tuple(map(_message, messages)), tools=shown)
        reply = await self._episode.chat(
            prompt,
            max_tokens=given[0] if given else self._episode.room(prompt),
            stop=stops,
            temperature=None if _is_absent(temperature) else temperature,
        )
        return _completion(reply, self._episode.model, with_tools=bool(shown))


def _completion(reply: Reply, model: str, *, with_tools: bool) -> ChatCompletion:
    name = "_".join(map(str, reply.key))
    parsed = parse_tool_calls(reply.text, f"call_{name}") if with_tools else None
    message = ChatCompletionMessage(content=reply.text)
    if parsed and parsed.calls:
        calls = [
            ChatCompletionMessageToolCall(id=call.id, function=Function(arguments=call.json, name=call.name))
            for call in parsed.calls
        ]
        message = ChatCompletionMessage(content=parsed.text or None, tool_calls=calls)
    done = reply.completion
    usage = CompletionUsage(
        completion_tokens=done.completion_tokens,
        prompt_tokens=done.prompt_tokens,
        total_tokens=done.prompt_tokens + done.completion_tokens,
    )
    finish: Literal["stop", "length", "tool_calls"]
    finish = "length" if reply.truncated else "tool_calls" if message.tool_calls else "stop"
    choice = Choice(finish_reason=finish, message=message)
    return ChatCompletion(id=f"chatcmpl-{name}", choices=[choice], created=int(time.time()), model=model, usage=usage)


def _message(given: Any) -> Message:
    """A message of the client's, a dict or an object that it returned."""
    fields = given if isinstance(given, Mapping) else given.model_dump()
    role = _ROLES.get(fields.get("role") or "")
    if role is None:
        raise ValueError(f"a message has the role {fields.get('role')!r}: use {', '.join(_ROLES)}")
    if fields.get("function_call"):
        raise ValueError("a message has a function_call: use tool_calls")
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in fields.get("tool_calls") or ()
    )
    text = _text(fields.get("content"))
    parts = () if text is None else (text,)
    return Message(role, parts, calls, fields.get("tool_call_id"), fields.get("name"))


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"a message holds a part of type {part.get('type')!r}: this model reads text only")
    return "".join(part["text"] for part in content)


def _is_absent(value: Any) -> bool:
    """Whether an argument was left out, as the official client says it too."""
    return value is None or type(value).__name__ in ("NotGiven", "Omit")
