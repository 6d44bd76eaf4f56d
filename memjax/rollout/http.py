"""A client for any service that speaks OpenAI's chat completions: ours, vLLM, OpenAI, Azure."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import httpx
import numpy as np

from memjax.rollout.client import ClientError, Message, Prompt, ToolCall
from memjax.rollout.tool_calls import parse_tool_calls, write_tool_calls
from memjax.text import whole_characters
from memjax.trajectory import Completion, FinishReason, SamplingParams

DEFAULT_URL = "http://localhost:8000/v1"

_BROKEN_OFF = (
    httpx.RemoteProtocolError,
    httpx.ReadError,
    httpx.DecodingError,
    json.JSONDecodeError,
    UnicodeDecodeError,
)


class IdDecoder(Protocol):
    """What turns a prompt's id parts into the text that a service takes."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        ...


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is tried, and how long to wait in between (seconds)."""

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0
    longest_asked: float = 120.0  # the most that a Retry-After is honoured

    def wait(self, failures: int, asked: float | None) -> float:
        """Seconds before the next try: what the service asked for, else doubling, with jitter against herds."""
        if asked is not None:
            return min(max(asked, 0.0), self.longest_asked)
        return min(self.first_wait * 2 ** (failures - 1), self.longest_wait) * random.uniform(0.5, 1.0)


class HttpClient:
    """Completes prompts over HTTP, as text: id parts are decoded, and completions carry no ids and no logprobs.

    Tools go out as OpenAI's; calls that the service returns apart from the text come back in the text, as
    `memjax.rollout.tool_calls` writes and reads them, so that a reply is one text whoever wrote it.

    `url` ends where /chat/completions begins; an Azure address may carry its ?api-version=. The key goes out as both
    `Authorization: Bearer` and `api-key`, and into no message.
    """

    def __init__(
        self,
        model: str,
        decoder: IdDecoder,
        *,
        url: str | None = None,
        api_key: str | None = None,
        window: int | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        retries: RetryPolicy | None = None,
        on_retry: Callable[[str], None] | None = None,
    ) -> None:
        """`url` and `api_key` default to the environment's URL and API_KEY; timeouts are seconds without progress.

        `on_retry` is told, before each further try, what went wrong and how long is waited.
        """
        self.model = model
        self.window = window
        self._decoder = decoder
        self._key = api_key if api_key is not None else os.environ.get("API_KEY", "")
        self._base = _checked_url(url or os.environ.get("URL") or DEFAULT_URL)
        self._shown = str(self._base.copy_with(username=None, password=None, query=None)).rstrip("/")
        self._retries = retries or RetryPolicy()
        self._on_retry = on_retry
        self._read_timeout = read_timeout
        self._max_tokens_name = "max_tokens"
        self._left_out: set[str] = set()  # parameters that the service refuses
        headers = {"Authorization": f"Bearer {self._key}", "api-key": self._key} if self._key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(read_timeout, connect=connect_timeout, pool=None),
            limits=httpx.Limits(max_connections=None),  # whoever calls bounds the number of requests
        )

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """Draw `params.n` completions. Raises ClientError when the service could not be reached or failed."""
        started = time.perf_counter()
        body = await self._request(self._payload(prompt, params))
        return self._completions(body, params.n, bool(prompt.tools), time.perf_counter() - started)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _payload(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "model": self.model,
            "messages": _for_service(prompt.messages, self._decoder.decode),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if prompt.tools:
            payload["tools"] = list(prompt.tools)
        if params.n > 1:
            payload["n"] = params.n
        if params.top_k:
            payload["top_k"] = params.top_k  # not OpenAI's, but of vLLM and others; a service without it says so
        if params.stop:
            payload["stop"] = list(params.stop)
        if params.seed is not None:
            payload["seed"] = params.seed
        return payload

    async def _request(self, payload: dict[str, Any]) -> Mapping[str, Any]:
        """Send until it is answered: some failures pass, and are tried a bounded number of times."""
        url = self._base.copy_with(path=self._base.path.rstrip("/") + "/chat/completions")
        for failures in range(1, self._retries.attempts + 1):
            asked = None
            try:
                response = await self._http.post(url, json=self._named(payload))
                while response.status_code in (400, 422) and self._learns_from(response, payload):
                    response = await self._http.post(url, json=self._named(payload))
                if not response.is_success:
                    failure = _Failure(response.status_code, self._failure(response))
                else:
                    body = self._json(response)
                    within = self._failure_within(body, payload.get("n", 1))
                    if within is None:
                        return body
                    failure = within
            except httpx.ReadTimeout:
                raise ClientError(
                    f"{self._shown} accepted the request but sent nothing for {self._read_timeout:g} s: "
                    f"see whether the service is overloaded (try {failures} of {self._retries.attempts})"
                ) from None
            except _BROKEN_OFF as error:
                trouble = (
                    f"{self._shown} broke off, and answered only in part or not at all "
                    f"({error or type(error).__name__}): see the service's log, then try again"
                )
            except httpx.TransportError as error:
                trouble = (
                    f"{self._shown} cannot be reached ({error or type(error).__name__}): is the service running there?"
                )
            else:
                trouble = failure.message
                if not failure.may_pass:
                    raise ClientError(trouble)
                asked = _retry_after(response)
            if failures < self._retries.attempts:
                seconds = self._retries.wait(failures, asked)
                if self._on_retry:
                    self._on_retry(f"{trouble} (try {failures + 1} of {self._retries.attempts} in {seconds:.1f} s)")
                await asyncio.sleep(seconds)
        raise ClientError(f"{trouble} (tried {self._retries.attempts} times)")

    def _named(self, payload: dict[str, Any]) -> dict[str, Any]:
        named = {name: value for name, value in payload.items() if name not in self._left_out}
        return {self._max_tokens_name if name == "max_tokens" else name: value for name, value in named.items()}

    def _learns_from(self, response: httpx.Response, payload: Mapping[str, Any]) -> bool:
        """Whether a refusal says how to ask instead, which all further requests then do.

        OpenAI's reasoning models refuse max_tokens and name what they take; others refuse a temperature, a top_p or a
        seed, or two of them together.
        """
        if self._max_tokens_name == "max_tokens" and "max_completion_tokens" in response.text:
            self._max_tokens_name = "max_completion_tokens"
            return True
        for name in _DISPENSABLE:
            named = re.search(rf"\b{name}\b", response.text)
            if named and name in payload and name not in self._left_out:
                self._left_out.add(name)
                if self._on_retry:
                    self._on_retry(
                        f"{self._shown} refuses {name}={payload[name]:g}, so it is left out from now on: replies are "
                        f"drawn as the service chooses{self._excerpt(response)}"
                    )
                return True
        return False

    def _failure_within(self, body: Mapping[str, Any], n: int) -> _Failure | None:
        """What is wrong with an answer whose status says that all is well."""
        if error := body.get("error"):
            said = error.get("message", error) if isinstance(error, Mapping) else error
            code = error.get("code") if isinstance(error, Mapping) else None
            status = int(str(code)) if re.fullmatch("[45][0-9][0-9]", str(code)) else 500
            return _Failure(status, f"{self._shown} answered with an error{self._words(said)}")
        choices = body.get("choices")
        if not isinstance(choices, list) or len(choices) < n:
            found = len(choices) if isinstance(choices, list) else "no"
            return _Failure(400, f"{self._shown} answered with {found} choices where {n} were asked for")
        for choice in choices[:n]:
            if not isinstance(choice, Mapping):
                return _Failure(400, f"{self._shown} answered with a choice that is no JSON object")
            if choice.get("error") or _reason(choice) not in _FINISH_REASONS:
                error = choice.get("error")
                said = error.get("message", error) if isinstance(error, Mapping) else error
                message = f"{self._shown} ended a reply with finish_reason {str(choice.get('finish_reason'))[:50]!r}"
                return _Failure(500, message + self._words(said))
        return None

    def _failure(self, response: httpx.Response) -> str:
        status = response.status_code
        said = self._excerpt(response)
        if status in (401, 403):
            advice = "set API_KEY to a valid key" if self._key else "it wants a key: set API_KEY"
            return f"{self._shown} refused access (HTTP {status}): {advice}{said}"
        if status == 404:
            return f"{self._shown} has no such model or address (HTTP 404): check --model {self.model} and --url{said}"
        if status == 429:
            code = " (insufficient_quota)" if "insufficient_quota" in response.text else ""
            return f"{self._shown} is limiting requests (HTTP 429){code}{said}"
        if status == 400:
            return f"{self._shown} refused the request (HTTP 400){said}"
        return f"{self._shown} failed (HTTP {status}){said}"

    def _excerpt(self, response: httpx.Response) -> str:
        """The service's own words, short and without the key."""
        try:
            body = response.json()
            error = body.get("error", body) if isinstance(body, dict) else body
            said = str(error.get("message", error) if isinstance(error, dict) else error)
        except ValueError:
            said = "an HTML page" if _is_html(response) else response.text
        return self._words(said)

    def _words(self, said: Any) -> str:
        said = " ".join(whole_characters(str(said or "")).split())
        if self._key:
            said = said.replace(self._key, "***")
        return f"; it said: {said[:300]}" if said else ""

    def _json(self, response: httpx.Response) -> Mapping[str, Any]:
        """The body. Raises one of `_BROKEN_OFF` where only a part of it came."""
        if _is_html(response):
            raise ClientError(
                f"{self._shown} answered with an HTML page instead of JSON: the address of an OpenAI-compatible "
                f"service usually ends in /v1"
            )
        if "text/event-stream" in response.headers.get("content-type", ""):
            raise ClientError(f"{self._shown} answered with a stream of events, which was not asked for")
        body = response.json()
        if not isinstance(body, dict):
            raise ClientError(f"{self._shown} answered with JSON that is no chat completion")
        return body

    def _completions(self, body: Mapping[str, Any], n: int, tools: bool, seconds: float) -> list[Completion]:
        choices = body["choices"]
        usage = _mapping(body.get("usage"))
        try:
            ordered = sorted(choices[:n], key=lambda choice: choice.get("index", 0))
            return [_completion(choice, usage, n, tools, seconds) for choice in ordered]
        except (AttributeError, KeyError, TypeError) as error:
            raise ClientError(f"{self._shown} answered with JSON that is no chat completion ({error!r})") from None


_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "tool_use": "stop",
    "function_call": "stop",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "error",
}
"""What services end a finished reply with. Any other word is that of a failure."""

_DISPENSABLE = ("top_p", "seed", "temperature")
"""What is left out when it is refused, the first that is named first."""


@dataclass(frozen=True)
class _Failure:
    """Why a request was not answered."""

    status: int  # as of HTTP, wherever it was told
    message: str

    @property
    def may_pass(self) -> bool:
        """Whether another try may succeed."""
        return (self.status in (408, 429) or self.status >= 500) and "insufficient_quota" not in self.message


def _completion(choice: Mapping[str, Any], usage: Mapping[str, Any], n: int, tools: bool, seconds: float) -> Completion:
    message = choice["message"] if tools else {**choice["message"], "tool_calls": None}
    finish = _FINISH_REASONS[_reason(choice)]
    text, error = whole_characters(_text_of(message)), None
    if finish == "error":
        error = "the service's content filter stopped the reply"
    elif not text.strip() and message.get("refusal"):
        finish, error = "error", f"the model refused to reply: {whole_characters(str(message['refusal']))[:300]}"
    elif not text.strip():
        error = _why_empty(choice["message"], finish, usage)
    return Completion(
        prompt_ids=np.zeros(0, np.int32),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        text=text,
        finish_reason=finish,
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens") // n,  # services report the sum over the choices
        cached_tokens=_count(_mapping(usage.get("prompt_tokens_details")), "cached_tokens"),
        seconds=seconds,
        error=error,
    )


def _reason(choice: Mapping[str, Any]) -> str:
    return str(choice.get("finish_reason") or "stop").lower()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(usage: Mapping[str, Any], name: str) -> int:
    """A number of tokens; 0 where the service gives none that could be one, which costs nothing."""
    value = usage.get(name)
    return int(value) if isinstance(value, int | float) and 0 < value < math.inf else 0


def _why_empty(message: Mapping[str, Any], finish: str, usage: Mapping[str, Any]) -> str:
    """What is known of a reply without text."""
    if message.get("tool_calls"):
        return "it calls tools that were not offered"
    tokens = _count(_mapping(usage.get("completion_tokens_details")), "reasoning_tokens")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not tokens and not thought:
        return f"finish_reason {finish}"
    spent = f"{tokens} tokens" if tokens else f"{len(str(thought))} characters"
    return f"finish_reason {finish} after {spent} of thinking"


def _text_of(message: Mapping[str, Any]) -> str:
    calls = [
        ToolCall(call.get("id") or "", call["function"]["name"], call["function"].get("arguments") or "{}")
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    if isinstance(content, list):  # parts, of which some services send thinking and text
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return write_tool_calls(content, calls)


def _for_service(messages: Sequence[Message], decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """The messages as OpenAI has them: calls apart from the text, and every result that of a call.

    A reply that goes back before results has its calls in its text; results that follow no call go out as the user's.
    """
    shown: list[dict[str, Any]] = []
    unanswered: list[str] = []  # ids of calls that have no result yet
    for i, message in enumerate(messages):
        text, calls = message.text(decode), message.tool_calls
        if message.role == "assistant":
            results = list(takewhile(lambda later: later.role == "tool", messages[i + 1 :]))
            parsed = parse_tool_calls(text, f"call_{i}")
            if not calls and results and len(parsed.calls) >= len(results) and not parsed.problems:
                text, calls = parsed.text, parsed.calls[: len(results)]
            unanswered = [call.id for call in calls]
        one: dict[str, Any] = {"role": message.role, "content": text}
        if calls:
            one |= {"content": text or None, "tool_calls": [_call_for_service(call) for call in calls]}
        elif message.role == "tool" and unanswered:
            at = unanswered.index(message.tool_call_id) if message.tool_call_id in unanswered else 0
            one["tool_call_id"] = unanswered.pop(at)
        elif message.role == "tool":
            one["role"] = "user"
        shown.append(one)
    return shown


def _call_for_service(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}


def _checked_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is not a URL ({error}): give one like {DEFAULT_URL}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{text!r} is not an http URL: give one like {DEFAULT_URL}")
    path = url.path.rstrip("/").removesuffix("/chat/completions")
    return url.copy_with(path=path or "/")


def _is_html(response: httpx.Response) -> bool:
    return "text/html" in response.headers.get("content-type", "") or response.content.lstrip()[:1] == b"<"


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, from either form of the header."""
    value = response.headers.get("retry-after", "")
    try:
        return float(value) if math.isfinite(float(value)) else None
    except ValueError:
        pass
    try:
        return email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None


def served_models(url: str, api_key: str) -> dict[str, int | None]:
    """The models that a service says it serves, with their windows where it knows them; empty where it does not say.

    Not every service lists its models, so a failure here means nothing: the first completion will tell.
    """
    base = _checked_url(url)
    headers = {"Authorization": f"Bearer {api_key}", "api-key": api_key} if api_key else {}
    try:
        response = httpx.get(base.copy_with(path=base.path.rstrip("/") + "/models"), headers=headers, timeout=5.0)
        listed = response.json()["data"] if response.is_success else []
        return {str(model["id"]): _count(model, "max_model_len") or None for model in listed}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return {}
