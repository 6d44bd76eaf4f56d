"""/generate and /tokenize: token ids in and out, with what training needs to know about every token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from memjax.serve.chat import rendered
from memjax.serve.errors import ApiError
from memjax.serve.replies import generation_for, ignored_headers, sampled_ids, usage
from memjax.serve.schemas import GenerateRequest, TokenizeRequest
from memjax.serve.service import Generation, ModelService
from memjax.serve.streaming import DONE, sse, started, unless_gone
from memjax.trajectory import Completion


def native_routes(service: ModelService) -> APIRouter:
    """The two routes."""
    router = APIRouter()

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Draw `n` continuations of token ids: ids, log probabilities, and the weights' version of every token."""
        generation = generation_for(service, body.token_ids, body, body.max_tokens, shared=body.shared)
        versions = TokenVersions(generation)
        headers = ignored_headers(body)
        if body.stream:
            return await started(request, versions.events(), generation.close, service.request_timeout, headers)
        try:
            completions = await unless_gone(request, versions.result())
        finally:
            generation.close()
        return JSONResponse(versions.whole(completions) | {"ignored_fields": body.ignored}, headers=headers)

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The ids of a text, or of messages in the chat template with room for the reply."""
        if (body.text is None) == (body.messages is None):
            raise ApiError(400, "tokenize takes either text or messages")
        ids = (
            service.tokenizer.encode(body.text)
            if body.text is not None
            else rendered(body.messages or (), service.tokenizer)[0]
        )
        return JSONResponse({"token_ids": ids, "count": len(ids), "window": service.window})

    return router


class TokenVersions:
    """A generation whose tokens are noted with the version of the weights that drew them."""

    def __init__(self, generation: Generation):
        self._generation = generation
        self._versions: dict[int, list[int]] = {}

    async def events(self) -> AsyncIterator[bytes]:
        """Token by token."""
        async for event in self._generation.events():
            yield sse(
                {
                    "sample": event.sample,
                    "token_id": event.token_id,
                    "logprob": event.logprob,
                    "text": event.text,
                    "finish_reason": event.finish_reason,
                    "weights_version": event.weights_version,
                }
            )
        yield sse({"usage": usage(await self._generation.result())})
        yield DONE

    async def result(self) -> list[Completion]:
        """The completions, once every token was noted."""
        async for event in self._generation.events():
            self._versions.setdefault(event.sample, []).append(event.weights_version)
        return await self._generation.result()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All of it at once."""
        samples = [
            {
                "token_ids": sampled_ids(completion),
                "logprobs": completion.logprobs.tolist(),
                "weights_versions": self._versions[index],
                "text": completion.text,
                "finish_reason": completion.finish_reason,
            }
            for index, completion in enumerate(completions)
        ]
        return {"samples": samples, "usage": usage(completions)}
