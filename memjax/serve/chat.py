"""/v1/chat/completions: one conversation continued, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from memjax.rollout.client import Message, Prompt, ToolCall
from memjax.rollout.scheduler import TokenEvent
from memjax.rollout.tool_calls import CALL_END
from memjax.serve.bodies import JsonRoute
from memjax.serve.errors import ApiError
from memjax.serve.memory_chat import MemoryChat
from memjax.serve.replies import check_model, generation_for, ignored_headers, sampled_ids, usage
from memjax.serve.schemas import ChatMessage, ChatRequest
from memjax.serve.service import Generation, ModelService, off_loop
from memjax.serve.streaming import DONE, sse, started, unless_gone
from memjax.serve.tool_chat import (
    CallReader,
    Definitions,
    SampledCalls,
    StreamedCalls,
    call_opening,
    offered_tools,
    refuse_tools,
)
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion


def chat_routes(service: ModelService, memory: MemoryChat) -> APIRouter:
    """The route, over a model and the reader that stands behind the name memory/MODEL."""
    router = APIRouter(route_class=JsonRoute)
    sampled = SampledCalls()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation; with the model memory/MODEL, about a text of any length."""
        if body.model == memory.name:
            refuse_tools(body, memory.name, service.name)
            if await memory.is_needed(body):
                return await memory.answer(body, request)
        check_model(body.model, service.name, memory.name)
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs: only the drawn token's log probability is known here: leave it out")
        tools = offered_tools(body)
        ids, shared = await rendered_off_loop(body.messages, service, tools, sampled)
        reader = None
        if tools:
            opening, one = call_opening(body, tools, service), body.parallel_tool_calls is False
            reader = CallReader(sampled, service.tokenizer, opening, one=one)
            ids += opening
            if one:  # the reply ends with its first call
                body = body.model_copy(update={"stop": [*body.stops, CALL_END]})
        limit = body.max_completion_tokens or body.max_tokens
        generation = generation_for(service, request, ids, body, limit, shared=shared)
        answer = ChatAnswer(body, generation, service.tokenizer, reader)
        headers = ignored_headers(body)
        if body.stream:
            return await started(request, answer.events(), generation.close, service.request_timeout, headers)
        try:
            return JSONResponse(answer.whole(await unless_gone(request, generation.result())), headers=headers)
        finally:
            generation.close()

    return router


async def rendered_off_loop(
    messages: Sequence[ChatMessage],
    service: ModelService,
    tools: Definitions = (),
    sampled: SampledCalls | None = None,
) -> tuple[list[int], int]:
    """As `rendered`, in a thread where it takes more than a moment; ApiError for what cannot fit the window."""
    size = sum(len(part.text or "") for message in messages for part in message.parts)
    service.refuse_longer(size)
    return await off_loop(size + 100 * len(messages), rendered, messages, service, tools, sampled)


def rendered(
    messages: Sequence[ChatMessage],
    service: ModelService,
    tools: Definitions = (),
    sampled: SampledCalls | None = None,
) -> tuple[list[int], int]:
    """The prompt's ids, and how many of them other prompts may share; ApiError for messages that cannot be shown."""
    shown = [_message(i, message) for i, message in enumerate(messages)]
    if sampled:  # an open message is not looked up: it would be continued
        shown = [*(_as_sampled(message, sampled) for message in shown[:-1]), shown[-1]]
    try:
        prompt = service.tokenizer.render_prompt(Prompt(tuple(shown), tools=tuple(tools)))
    except ValueError as error:
        raise ApiError(400, str(error).replace(str(service.tokenizer.source), service.name)) from None
    except RecursionError:
        raise ApiError(
            400, "the tools, or the arguments of a call, are nested too deeply: write them flatter"
        ) from None
    return prompt.ids, prompt.shared


def message_text(message: ChatMessage) -> str:
    """The text of a message; ApiError for parts that are no text."""
    for part in message.parts:
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"a message holds a part of type {part.type[:40]!r}: this model reads text parts only")
    return "".join(part.text or "" for part in message.parts)


def _message(index: int, message: ChatMessage) -> Message:
    place, role = f"messages.{index}", message.role
    if message.tool_calls and role != "assistant":
        raise ApiError(400, f"{place}.role is {role}, but only the assistant's messages have tool_calls")
    if role == "tool" and not message.tool_call_id:
        raise ApiError(400, f"{place}.role is tool, but tool_call_id is missing: name the call whose result this is")
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"{place}.content is missing: only a message with tool_calls may have none")
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
    call_id = message.tool_call_id if role == "tool" else None
    return Message("system" if role == "developer" else role, (message_text(message),), calls, call_id)


def _as_sampled(message: Message, sampled: SampledCalls) -> Message:
    ids = sampled.ids(message.text(lambda _: ""), message.tool_calls) if message.tool_calls else None
    return message if ids is None else Message("assistant", (ids,))


class ChatAnswer:
    """A generation in the shape of chat completions."""

    def __init__(
        self, body: ChatRequest, generation: Generation, tokenizer: Tokenizer, reader: CallReader | None = None
    ):
        self._body, self._generation, self._tokenizer, self._reader = body, generation, tokenizer, reader
        self._streamed: dict[int, StreamedCalls] = {}
        self._id, self._created = f"chatcmpl-{uuid4().hex}", int(time.time())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All of it at once."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        head = self._head("chat.completion")
        return head | {"choices": choices, "usage": usage(completions), "ignored_fields": self._body.ignored}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        ids = sampled_ids(completion)
        calls: tuple[ToolCall, ...] = ()
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._reader:
            content, calls = self._reader.read(self._reader.text + completion.text, [*self._reader.ids, *ids])
            message["content"] = content
            if calls:
                message |= {"content": content or None, "tool_calls": list(map(_as_openai, calls))}
        reason = _reason(completion.finish_reason, calls)
        logprobs = self._logprobs(ids, completion.logprobs.tolist())
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece."""
        begun: set[int] = set()
        async for tokens in self._generation.events():
            if chunks := [chunk for token in tokens for chunk in self._chunks(token, begun)]:
                yield b"".join(chunks)
        if self._body.usage_wanted:
            completions = await self._generation.result()
            yield sse(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(completions)})
        yield DONE

    def _chunks(self, event: TokenEvent, begun: set[int]) -> Iterator[bytes]:
        if event.sample not in begun:
            begun.add(event.sample)
            yield self._chunk(event.sample, {"role": "assistant", "content": ""})
        text = event.text
        calls: tuple[ToolCall, ...] = ()
        if self._reader:
            text, calls = self._streamed.setdefault(event.sample, StreamedCalls(self._reader)).take(event)
        if text or self._body.logprobs:
            logprobs = self._logprobs([event.token_id], [event.logprob])
            yield self._chunk(event.sample, {"content": text}, logprobs=logprobs)
        for index, call in enumerate(calls):
            yield self._chunk(event.sample, {"tool_calls": [{"index": index} | _as_openai(call)]})
        if event.finish_reason:
            yield self._chunk(event.sample, {}, finish_reason=_reason(event.finish_reason, calls))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _chunk(
        self,
        sample: int,
        delta: Mapping[str, Any],
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": sample, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse(self._head("chat.completion.chunk") | {"choices": [choice]})

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        tokens = [
            (self._tokenizer.token_bytes(token_id), logprob) for token_id, logprob in zip(ids, logprobs, strict=True)
        ]
        return {
            "content": [
                {
                    "token": token.decode("utf-8", errors="replace"),
                    "logprob": logprob,
                    "bytes": list(token),
                    "top_logprobs": [],
                }
                for token, logprob in tokens
            ],
            "refusal": None,
        }


def _as_openai(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}


def _reason(reason: str, calls: Sequence[ToolCall]) -> str:
    """Why a reply ended; one with calls that was cut off says so, for further calls may be missing."""
    return "tool_calls" if calls and reason == "stop" else reason
