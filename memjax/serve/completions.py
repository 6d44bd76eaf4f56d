"""/v1/completions: text or token ids continued, one prompt or several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from memjax.rollout.scheduler import TokenEvent
from memjax.serve.bodies import JsonRoute
from memjax.serve.errors import ApiError
from memjax.serve.replies import check_model, generation_for, ignored_headers, sampled_ids, total_usage, usage
from memjax.serve.schemas import CompletionRequest
from memjax.serve.service import Generation, ModelService, off_loop
from memjax.serve.streaming import DONE, sse, started, unless_gone
from memjax.tokenizer import Tokenizer

DEFAULT_TOKENS = 16
"""How much OpenAI's interface draws where nothing is said."""


def completion_routes(service: ModelService) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts as they stand, without a chat template."""
        check_model(body.model, service.name)
        if body.logprobs is not None and body.logprobs > 1:
            raise ApiError(400, f"logprobs: only the drawn token's is known here: at most 1, got {body.logprobs}")
        answer = TextAnswer(body, service.tokenizer)
        try:
            listed = await tokenized(body, service)
            service.admit(len(listed) * body.n, request.state.owner)
            for ids in listed:
                limit = body.max_tokens or DEFAULT_TOKENS
                answer.generations.append(generation_for(service, request, ids, body, limit))
            headers = ignored_headers(body)
            if body.stream:
                return await started(request, answer.events(), answer.close, service.request_timeout, headers)
            whole = JSONResponse(await unless_gone(request, answer.whole()), headers=headers)
        except BaseException:
            answer.close()
            raise
        answer.close()
        return whole

    return router


async def tokenized(body: CompletionRequest, service: ModelService) -> list[list[int]]:
    """The ids of every prompt of the request; ApiError for one that cannot fit."""
    given = body.prompt
    if texts := [given] if isinstance(given, str) else [one for one in given if isinstance(one, str)]:
        longest = max(map(len, texts))
        service.refuse_longer(longest)
        return await off_loop(len(texts) * longest, lambda: [service.tokenizer.encode(text) for text in texts])
    lists = [one for one in given if isinstance(one, list)]
    return lists or [[one for one in given if isinstance(one, int)]]


class TextAnswer:
    """The generations of a request in the shape of completions; sample s of prompt p is choice p n + s."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer):
        self.generations: list[Generation] = []
        self._body, self._tokenizer = body, tokenizer
        self._id, self._created = f"cmpl-{uuid4().hex}", int(time.time())

    def close(self) -> None:
        """Give back what they hold."""
        for generation in self.generations:
            generation.close()

    async def whole(self) -> dict[str, Any]:
        """All of it at once."""
        results = await asyncio.gather(*(generation.result() for generation in self.generations))
        choices = [
            {
                "index": index,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "logprobs": self._logprobs(sampled_ids(completion), completion.logprobs.tolist()),
            }
            for index, completion in enumerate(completion for result in results for completion in result)
        ]
        spent = total_usage([usage(result) for result in results])
        return self._head() | {"choices": choices, "usage": spent, "ignored_fields": self._body.ignored}

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece, as the prompts' tokens come."""
        async for prompt, tokens in _merged(self.generations):
            if chunks := [chunk for token in tokens for chunk in self._chunks(prompt, token)]:
                yield b"".join(chunks)
        if self._body.usage_wanted:
            results = [await generation.result() for generation in self.generations]
            yield sse(self._head() | {"choices": [], "usage": total_usage([usage(result) for result in results])})
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._body.model}

    def _chunks(self, prompt: int, event: TokenEvent) -> Iterator[bytes]:
        if not (event.text or event.finish_reason or self._body.logprobs is not None):
            return
        choice = {
            "index": prompt * self._body.n + event.sample,
            "text": event.text,
            "logprobs": self._logprobs([event.token_id], [event.logprob]),
            "finish_reason": event.finish_reason,
        }
        yield sse(self._head() | {"choices": [choice]})

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens = [self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace") for token_id in ids]
        return {"tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": None}


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[TokenEvent]]]:
    """The tokens of all generations as they come, with the index of theirs."""
    events: asyncio.Queue[tuple[int, list[TokenEvent]] | None] = asyncio.Queue()

    async def forward(index: int, generation: Generation) -> None:
        try:
            async for tokens in generation.events():
                events.put_nowait((index, tokens))
        finally:
            events.put_nowait(None)

    tasks = [asyncio.create_task(forward(index, generation)) for index, generation in enumerate(generations)]
    try:
        for _ in tasks:
            while (item := await events.get()) is not None:
                yield item
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
