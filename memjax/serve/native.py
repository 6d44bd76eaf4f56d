"""/generate and /tokenize: token ids in and out, with what training needs to know about every token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from memjax.rollout.scheduler import TokenEvent
from memjax.serve.bodies import JsonRoute
from memjax.serve.chat import rendered_off_loop
from memjax.serve.errors import ApiError
from memjax.serve.replies import generation_for, ignored_headers, sampled_ids, usage
from memjax.serve.schemas import GenerateRequest, TokenizeRequest
from memjax.serve.service import Generation, ModelService, off_loop
from memjax.serve.streaming import DONE, sse, started, unless_gone
from memjax.serve.tool_chat import definitions
from memjax.trajectory import Completion

_LONGEST = 1 << 20  # characters of /tokenize
_PIECE = 1 << 14


def native_routes(service: ModelService) -> APIRouter:
    """The two routes."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Draw `n` continuations of token ids: ids, log probabilities, and the weights' version of every token."""
        versions: dict[int, list[int]] = {}
        note = lambda event: versions.setdefault(event.sample, []).append(event.weights_version)  # noqa: E731
        listener = None if body.stream else note
        generation = generation_for(
            service, request, body.token_ids, body, body.max_tokens, shared=body.shared, listener=listener
        )
        headers = ignored_headers(body)
        if body.stream:
            return await started(request, token_events(generation), generation.close, service.request_timeout, headers)
        try:
            completions = await unless_gone(request, generation.result())
        finally:
            generation.close()
        samples = [_sample(completion, versions[index]) for index, completion in enumerate(completions)]
        whole = {"samples": samples, "usage": usage(completions), "ignored_fields": body.ignored}
        return JSONResponse(whole, headers=headers)

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The ids of a text, or of messages in the chat template with room for the reply."""
        if (body.text is None) == (body.messages is None):
            raise ApiError(400, "tokenize takes either text or messages")
        if body.text is None:
            ids, _ = await rendered_off_loop(body.messages or (), service, definitions(body.tools or ()))
        elif len(body.text) > _LONGEST:
            raise ApiError(400, f"the text has {len(body.text)} characters, {_LONGEST} are the most: send it in parts")
        else:
            ids = await off_loop(len(body.text), _encoded, body.text, service)
        return JSONResponse({"token_ids": ids, "count": len(ids), "window": service.window})

    return router


def _encoded(text: str, service: ModelService) -> list[int]:
    """The ids of a text, piece by piece, so that other threads run in between."""
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return list(service.tokenizer.encode_stream(pieces))


async def token_events(generation: Generation) -> AsyncIterator[bytes]:
    """Token by token, then the usage."""
    async for tokens in generation.events():
        yield b"".join(map(_token, tokens))
    yield sse({"usage": usage(await generation.result())})
    yield DONE


def _token(event: TokenEvent) -> bytes:
    return sse(
        {
            "sample": event.sample,
            "token_id": event.token_id,
            "logprob": event.logprob,
            "text": event.text,
            "finish_reason": event.finish_reason,
            "weights_version": event.weights_version,
        }
    )


def _sample(completion: Completion, versions: Sequence[int]) -> dict[str, Any]:
    return {
        "token_ids": sampled_ids(completion),
        "logprobs": completion.logprobs.tolist(),
        "weights_versions": list(versions),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
