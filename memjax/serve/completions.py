"""/v1/completions: text or token ids continued, one prompt or several."""

from __future__ import annotations

import asyncio
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from memjax.rollout.reply import Scores
from memjax.rollout.scheduler import Caller, TokenEvent
from memjax.serve.bodies import JsonRoute
from memjax.serve.errors import ApiError
from memjax.serve.replies import (
    caller_of,
    check_model,
    generation_for,
    ignored_headers,
    refuse_past_window,
    refuse_unsupported,
    sampled_ids,
    total_usage,
    usage,
)
from memjax.serve.schemas import CompletionRequest, drawable
from memjax.serve.service import Generation, ModelService, off_loop
from memjax.serve.streaming import DONE, sse, started, unless_gone
from memjax.tokenizer import Tokenizer

Echo = tuple[list[int], Scores | None]
"""A prompt that is told again, and how the model expected it."""

Logprobs = dict[str, Any]

DEFAULT_TOKENS = 16
"""How much OpenAI's interface draws where nothing is said."""


def completion_routes(service: ModelService) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts as they stand, without a chat template."""
        check_model(body.model, service.name)
        refuse_unsupported(body)
        if body.logprobs is not None and body.logprobs > 1:
            raise ApiError(400, f"logprobs: only the drawn token's is known here: at most 1, got {body.logprobs}")
        limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        if not (limit or body.echo):
            raise ApiError(400, "max_tokens is 0: without echo there would be nothing to tell", param="max_tokens")
        if body.echo and body.stream:
            raise ApiError(400, "echo: a prompt is not streamed here; leave stream out", param="echo")
        answer = TextAnswer(body, service.tokenizer)
        try:
            listed = await tokenized(body, service)
            service.admit(len(listed) * body.n, request.state.owner)
            if body.echo:
                for ids in listed:
                    refuse_past_window(service, ids, limit)
                scored = (
                    _scored(service, listed, caller_of(request)) if body.logprobs is not None else _unscored(listed)
                )
                answer.echoes = await unless_gone(request, scored)
            for ids in listed if limit else ():
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


async def _scored(service: ModelService, listed: Sequence[list[int]], caller: Caller) -> list[Echo]:
    found = await asyncio.gather(*(service.scores(ids, caller) for ids in listed))
    return list(zip(listed, found, strict=True))


async def _unscored(listed: Sequence[list[int]]) -> list[Echo]:
    return [(ids, None) for ids in listed]


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
        self.echoes: list[Echo] = []
        self._body, self._tokenizer = body, tokenizer
        self._shown: dict[int, int] = {}  # characters, by choice
        self._id, self._created = f"cmpl-{uuid4().hex}", int(time.time())

    def close(self) -> None:
        """Give back what they hold."""
        for generation in self.generations:
            generation.close()

    async def whole(self) -> dict[str, Any]:
        """All of it at once."""
        if self.generations:
            results = await asyncio.gather(*(generation.result() for generation in self.generations))
            drawn = [completion for result in results for completion in result]
            told = [
                (one.text, str(one.finish_reason), self._logprobs(sampled_ids(one), one.logprobs.tolist()))
                for one in drawn
            ]
            spent = total_usage([usage(result) for result in results])
        else:  # only the prompts were asked for
            told = [("", "length", self._logprobs([], []))] * (len(self.echoes) * self._body.n)
            spent = total_usage([_read(len(ids)) for ids, _ in self.echoes])
        choices = []
        for index, (text, reason, logprobs) in enumerate(told):
            if self.echoes:
                text, logprobs = self._behind_prompt(index // self._body.n, text, logprobs)
            choices.append({"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs})
        return self._head() | {"choices": choices, "usage": spent, "ignored_fields": self._body.ignored}

    def _behind_prompt(self, prompt: int, text: str, drawn: Logprobs | None) -> tuple[str, Logprobs | None]:
        """A reply with its prompt in front: the first token of all has no log probability, for nothing comes before."""
        ids, scores = self.echoes[prompt]
        told = self._body.prompt if isinstance(self._body.prompt, str) else self._body.prompt[prompt]
        shown = told if isinstance(told, str) else self._text(ids)
        if drawn is None or scores is None:
            return shown + text, None
        top = [
            {self._token(token_id): logprob}
            for token_id, logprob in zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        ]
        of_drawn = drawn["top_logprobs"] or [None] * len(drawn["tokens"])
        offsets = self._offsets(ids)
        return shown + text, {
            "tokens": [*map(self._token, ids), *drawn["tokens"]],
            "token_logprobs": [None, *scores.logprobs.tolist(), *drawn["token_logprobs"]],
            "top_logprobs": [None, *top, *of_drawn] if self._body.logprobs else None,
            "text_offset": [*offsets, *(len(shown) + offset for offset in drawn["text_offset"])],
        }

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
        index = prompt * self._body.n + event.sample
        choice = {
            "index": index,
            "text": event.text,
            "logprobs": self._logprobs([event.token_id], [event.logprob], self._shown.get(index, 0)),
            "finish_reason": event.finish_reason,
        }
        self._shown[index] = self._shown.get(index, 0) + len(event.text)
        yield sse(self._head() | {"choices": [choice]})

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float], offset: int = 0) -> Logprobs | None:
        """Of drawn tokens. The likeliest one is known where the reply is greedy: it is the drawn one."""
        if self._body.logprobs is None:
            return None
        tokens = list(map(self._token, ids))
        known = self._body.logprobs and not drawable(self._body.temperature)
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": [{token: one} for token, one in zip(tokens, logprobs, strict=True)] if known else None,
            "text_offset": [offset + at for at in self._offsets(ids)],
        }

    def _token(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def _text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """Where each token begins in the text, in characters; parts of one character begin where it does."""
        decoder, offsets, at = getincrementaldecoder("utf-8")("replace"), [], 0
        for token_id in ids:
            offsets.append(at)
            at += len(decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offsets


def _read(tokens: int) -> dict[str, Any]:
    spent = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return spent | {"prompt_tokens_details": {"cached_tokens": 0}}


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
