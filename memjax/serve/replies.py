"""What the endpoints that generate have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from fastapi import Request

from memjax.rollout.scheduler import Caller, OnToken, TokenEvent
from memjax.serve.errors import ApiError
from memjax.serve.schemas import Body, SamplingRequest
from memjax.serve.service import Generation, ModelService
from memjax.trajectory import Completion


def check_model(asked: str, *served: str) -> None:
    """ApiError 404 for a model that is not served."""
    if asked not in served:
        raise ApiError(
            404, f"there is no model {asked[:100]!r}: {' and '.join(served)} are served", code="model_not_found"
        )


def caller_of(request: Request) -> Caller:
    """Who sent a request."""
    return Caller(request.state.client, request.state.owner)


def generation_for(
    service: ModelService,
    request: Request,
    ids: Sequence[int],
    body: SamplingRequest,
    limit: int | None,
    *,
    shared: int = 0,
    listener: OnToken | None = None,
) -> Generation:
    """Begin to draw at most `limit` tokens after `ids` (None: as many as the window holds).

    Tokens that are not to be streamed, and that nobody listens to, are spared the way through the event loop.
    """
    if listener is None and not body.stream:
        listener = _unheard
    room = service.window - len(ids)
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, and this model's maximum context length is {service.window} tokens, "
            f"the reply included: shorten it, or ask the model memory/{service.name}, which reads texts of any length",
            code="context_length_exceeded",
        )
    try:
        params = body.sampling(limit or room)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    return service.start(ids, params, shared=shared, listener=listener, caller=caller_of(request))


def _unheard(_: TokenEvent) -> None:
    """Nothing is done with the token."""


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """The tokens of one prompt and its completions."""
    prompt = completions[0].prompt_tokens
    drawn = sum(completion.completion_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": completions[0].cached_tokens},
    }


def total_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The tokens of several prompts."""
    total = {name: sum(one[name] for one in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def sampled_ids(completion: Completion) -> list[int]:
    """The ids as JSON takes them."""
    return [int(token_id) for token_id in completion.token_ids]


def ignored_headers(body: Body) -> dict[str, str]:
    """The header that names the fields which were accepted and mean nothing here."""
    names = ",".join(quote(name[:64]) for name in body.ignored[:20])
    return {"X-Memjax-Ignored-Fields": names} if names else {}
