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


_OFF: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "echo": (False,),
    "prompt_logprobs": (),
    "modalities": ([], ["text"]),
    "audio": (),
    "web_search_options": (),
    "thinking": ({"type": "disabled"},),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "grammar": ("",),
    "json_schema": ({},),
}
"""What other services know and would give another reply, with the values that ask for nothing."""


def refuse_unsupported(body: Body) -> None:
    """ApiError 400 for a field that is not known here and would change what the reply means, or its shape."""
    sent = body.model_extra or {}
    for name, value in sent.items():
        if name in _OFF and value not in _OFF[name]:
            got = repr(value)
            raise ApiError(
                400,
                f"{name} would change the reply, and is not supported here: leave it out, got {got[:80]}",
                param=name,
            )
    drawn = getattr(body, "n", 1)
    if sent.get("best_of", drawn) != drawn:
        raise ApiError(
            400, f"best_of: replies are not drawn to be chosen from, only n ({drawn}) is known", param="best_of"
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
    refuse_past_window(service, ids, limit or 1)
    room = service.window - len(ids)
    try:
        params = body.sampling(limit or room)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    return service.start(ids, params, shared=shared, listener=listener, caller=caller_of(request))


def refuse_past_window(service: ModelService, ids: Sequence[int], limit: int) -> None:
    """ApiError 400 where `limit` tokens do not fit the window behind a prompt."""
    room = service.window - len(ids)
    if room >= limit:
        return
    most = f"this model's maximum context length is {service.window} tokens"  # clients know the error by these words
    if room > 0:
        told = f"the prompt has {len(ids)} tokens and max_tokens is {limit}, but {most}: shorten it or lower max_tokens"
    else:
        told = (
            f"the prompt has {len(ids)} tokens, and {most}, the reply included: shorten it, or ask the model "
            f"memory/{service.name}, which reads texts of any length"
        )
    raise ApiError(400, told, code="context_length_exceeded")


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


def ignored_headers(body: Body, ignored: Sequence[str] | None = None) -> dict[str, str]:
    """The header that names the fields which were accepted and mean nothing here: by default the body's."""
    names = ",".join(quote(name[:64]) for name in (body.ignored if ignored is None else ignored)[:20])
    return {"X-Memjax-Ignored-Fields": names} if names else {}
