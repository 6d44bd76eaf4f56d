"""Tools in chat completions: what is offered, how a reply is made to call, and the calls in what was drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from memjax.rollout.client import Message, ToolCall
from memjax.rollout.scheduler import TokenEvent
from memjax.rollout.tool_calls import CALL_BEGIN, parse_tool_calls
from memjax.serve.errors import ApiError
from memjax.serve.schemas import ChatRequest, Tool
from memjax.serve.service import ModelService
from memjax.tokenizer import Tokenizer

_MAX_CHARACTERS = 1 << 18  # of all tools, as JSON
_REMEMBERED = 1024  # replies; at worst as many windows of ids
_FORMER = {"functions": "tools", "function_call": "tool_choice, and tool_calls in messages"}

Definitions = Sequence[Mapping[str, Any]]


def offered_tools(body: ChatRequest) -> Definitions:
    """The tools that the model is shown: none for the tool_choice "none". ApiError for fields that do not fit."""
    for sent in (body, *body.messages):
        for former, instead in _FORMER.items():
            if (sent.model_extra or {}).get(former) is not None:
                raise ApiError(400, f"{former} is OpenAI's former way to offer tools: send {instead} instead")
    choice, tools = body.tool_choice, body.tools or []
    names = [tool.function.name for tool in tools]
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is 'required', but there are no tools: send some, or leave it out")
    if choice and not isinstance(choice, str) and choice.function.name not in names:
        offered = ", ".join(names) or "none"
        raise ApiError(400, f"tool_choice names {choice.function.name[:64]!r}, but the tools are: {offered[:200]}")
    return [] if choice == "none" else definitions(tools)


def definitions(tools: Sequence[Tool]) -> Definitions:
    """The tools as a chat template takes them; ApiError where they are too long."""
    shown = [tool.shown() for tool in tools]
    if (length := len(json.dumps(shown))) > _MAX_CHARACTERS:
        raise ApiError(400, f"the tools have {length} characters as JSON, {_MAX_CHARACTERS} are the most")
    return shown


def refuse_tools(body: ChatRequest, memory: str, model: str) -> None:
    """ApiError 400 for tools where a text is read with the memory loop."""
    if offered_tools(body) or any(message.tool_calls or message.role == "tool" for message in body.messages):
        raise ApiError(400, f"{memory} reads without tools: ask the model {model}, or leave tools and their calls out")


def call_opening(body: ChatRequest, tools: Definitions, service: ModelService) -> list[int]:
    """The ids that begin a reply which must call: as the template writes a call, up to the name or the arguments.

    They end behind a colon, where the model's own tokens can go on. ApiError where the template writes calls otherwise.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    name = "f" if isinstance(choice, str) or choice is None else choice.function.name
    wanted = CALL_BEGIN + '{"name":' + ("" if choice == "required" else f'"{name}","arguments":')
    if body.messages[-1].role == "assistant":
        raise ApiError(400, "tool_choice: a message of the assistant that is continued cannot be made to call")
    probe = [Message("user", ("?",))]
    call = Message("assistant", (), (ToolCall("call_1", name, "{}"),))
    begin = service.tokenizer.render(probe, tools=tools)
    whole = service.tokenizer.render([*probe, call, Message("tool", ("?",), tool_call_id="call_1")], tools=tools)
    for end in range(len(begin) + 1, len(whole) if whole[: len(begin)] == begin else 0):
        opening = whole[len(begin) : end]
        if "".join(service.tokenizer.decode(opening).split()) == wanted:
            return opening
    raise ApiError(400, f"tool_choice: {service.name} writes calls in a form that cannot be begun for it: use 'auto'")


class SampledCalls:
    """The ids of the latest replies with calls: a history that tells one again gets the very ids that were drawn.

    Calls are known by ids that nobody can guess, and only where content and calls are told unchanged.
    """

    def __init__(self) -> None:
        self._replies: dict[str, tuple[str, tuple[ToolCall, ...], list[int]]] = {}

    def keep(self, content: str, calls: tuple[ToolCall, ...], ids: list[int]) -> None:
        """Remember a reply, and forget the one that was used longest ago."""
        self._replies[calls[0].id] = (content, calls, ids)
        if len(self._replies) > _REMEMBERED:
            del self._replies[next(iter(self._replies))]

    def ids(self, content: str, calls: tuple[ToolCall, ...]) -> list[int] | None:
        """What was drawn, without the end id; None where nothing like it is remembered."""
        reply = self._replies.get(calls[0].id)
        if reply is None or reply[:2] != (content, calls):
            return None
        self._replies[calls[0].id] = self._replies.pop(calls[0].id)
        return reply[2]


class CallReader:
    """Finds the calls in replies that begin with `opening`."""

    def __init__(self, sampled: SampledCalls, tokenizer: Tokenizer, opening: list[int], *, one: bool):
        self.text, self.ids = tokenizer.decode(opening), opening
        self._sampled, self._eos_ids, self._one = sampled, tokenizer.eos_ids, one

    def read(self, text: str, ids: list[int]) -> tuple[str, tuple[ToolCall, ...]]:
        """The content of a whole reply and its calls; all is content where one of them cannot be read."""
        parsed = parse_tool_calls(text, f"call_{uuid4().hex}")
        calls = parsed.calls[:1] if self._one else parsed.calls
        if parsed.problems or not calls:
            return text, ()
        content = text.partition(CALL_BEGIN)[0].rstrip() if CALL_BEGIN in text else ""
        self._sampled.keep(content, calls, ids[:-1] if ids[-1] in self._eos_ids else ids)
        return content, calls


class StreamedCalls:
    """One sample's content as it comes, and its calls with its last token."""

    def __init__(self, reader: CallReader):
        self._reader = reader
        self._text, self._ids, self._shown = reader.text, list(reader.ids), 0

    def take(self, event: TokenEvent) -> tuple[str, tuple[ToolCall, ...]]:
        """The content that this token settles, and the calls once the reply is whole."""
        self._text += event.text
        self._ids.append(event.token_id)
        calls: tuple[ToolCall, ...] = ()
        if event.finish_reason:
            content, calls = self._reader.read(self._text, self._ids)
        else:
            content = self._text[: _settled(self._text, self._shown)]
        shown, self._shown = self._shown, max(self._shown, len(content))
        return content[shown:], calls


def _settled(text: str, shown: int) -> int:
    """How much of the text so far is content whatever follows."""
    if text.lstrip().startswith(("{", "[", "`")):
        return 0  # all of it may be one call without a tag
    at = text.find(CALL_BEGIN, shown)
    if at < 0:
        at = len(text) - max((n for n in range(1, len(CALL_BEGIN)) if text.endswith(CALL_BEGIN[:n])), default=0)
    return len(text[:at].rstrip())
