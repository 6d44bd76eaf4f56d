"""/v1/chat/completions: one conversation continued, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from memjax.rollout.client import Message, Prompt
from memjax.rollout.scheduler import TokenEvent
from memjax.serve.errors import ApiError
from memjax.serve.memory_chat import MemoryChat
from memjax.serve.replies import check_model, generation_for, ignored_headers, sampled_ids, usage
from memjax.serve.schemas import ChatMessage, ChatRequest
from memjax.serve.service import Generation, ModelService
from memjax.serve.streaming import DONE, sse, started, unless_gone
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, FinishReason


def chat_routes(service: ModelService, memory: MemoryChat) -> APIRouter:
    """The route, over a model and the reader that stands behind the name memory/MODEL."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation; with the model memory/MODEL, about a text of any length."""
        if body.model == memory.name and memory.is_needed(body):
            return await memory.answer(body, request)
        check_model(body.model, service.name, memory.name)
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs: only the drawn token's log probability is known here: leave it out")
        ids, shared = rendered(body.messages, service.tokenizer)
        limit = body.max_completion_tokens or body.max_tokens
        generation = generation_for(service, ids, body, limit, shared=shared)
        answer = ChatAnswer(body, generation, service.tokenizer)
        headers = ignored_headers(body)
        if body.stream:
            return await started(request, answer.events(), generation.close, service.request_timeout, headers)
        try:
            return JSONResponse(answer.whole(await unless_gone(request, generation.result())), headers=headers)
        finally:
            generation.close()

    return router


def rendered(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> tuple[list[int], int]:
    """The prompt's ids, and how many of them other prompts may share; ApiError for messages that cannot be shown."""
    try:
        prompt = tokenizer.render_prompt(Prompt(tuple(_message(message) for message in messages)))
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    return prompt.ids, prompt.shared


def message_text(message: ChatMessage) -> str:
    """The text of a message; ApiError for parts that are no text."""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"a message holds a part of type {part.type[:40]!r}: this model reads text parts only")
    return "".join(part.text or "" for part in message.content)


def _message(message: ChatMessage) -> Message:
    role = "system" if message.role == "developer" else message.role
    return Message(role, (message_text(message),))


class ChatAnswer:
    """A generation in the shape of chat completions."""

    def __init__(self, body: ChatRequest, generation: Generation, tokenizer: Tokenizer):
        self._body, self._generation, self._tokenizer = body, generation, tokenizer
        self._id, self._created = f"chatcmpl-{uuid4().hex}", int(time.time())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All of it at once."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "finish_reason": completion.finish_reason,
                "logprobs": self._logprobs(sampled_ids(completion), completion.logprobs.tolist()),
            }
            for index, completion in enumerate(completions)
        ]
        head = self._head("chat.completion")
        return head | {"choices": choices, "usage": usage(completions), "ignored_fields": self._body.ignored}

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
        if event.text or self._body.logprobs:
            logprobs = self._logprobs([event.token_id], [event.logprob])
            yield self._chunk(event.sample, {"content": event.text}, logprobs=logprobs)
        if event.finish_reason:
            yield self._chunk(event.sample, {}, finish_reason=event.finish_reason)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _chunk(
        self,
        sample: int,
        delta: Mapping[str, str],
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: FinishReason | None = None,
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
