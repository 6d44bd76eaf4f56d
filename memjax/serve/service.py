"""The model that is served: admission, one generation after another on the shared scheduler, and how it stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from memjax.rollout.client import ClientError
from memjax.rollout.scheduler import ANYONE, Caller, OnToken, TokenEvent
from memjax.serve.backend import Backend
from memjax.serve.errors import ApiError
from memjax.serve.metrics import Metrics, Reading
from memjax.trajectory import Completion, SamplingParams

Result = TypeVar("Result")

CHARACTERS = 16
"""Of text for each token of a window: no text has as many on average, so what has more is not even tokenised."""

_IN_A_THREAD = 4096  # characters from which tokenising would be felt by other clients


async def off_loop(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """What `function` makes of a text of `size` characters, in a thread where that takes more than a moment."""
    return await asyncio.to_thread(function, *args) if size > _IN_A_THREAD else function(*args)


class Generation:
    """One prompt under way, made in an event loop. Close it: whatever still runs is then cancelled.

    A `listener` is called with every token from the engine's thread; `events` then has none.
    """

    def __init__(self, service: ModelService, listener: OnToken | None, samples: int, owner: str):
        self.future: Future[list[Completion]]
        self.samples, self.owner = samples, owner
        self._service, self._listener = service, listener
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._deadline = self._loop.time() + service.request_timeout
        self._tokens: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        self._first: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._outcome: str | None = None

    def on_token(self, event: TokenEvent) -> None:
        """Take a token from the engine's thread."""
        now = time.monotonic()
        if not self._first:
            self._service.metrics.first_token.observe(now - self._started)
        first = self._first.setdefault(event.sample, now)
        count = self._counts[event.sample] = self._counts.get(event.sample, 0) + 1
        if event.finish_reason and count > 1:
            self._service.metrics.token.observe((now - first) / (count - 1))
        if self._listener:
            self._listener(event)
        else:
            self._loop.call_soon_threadsafe(self._tokens.put_nowait, event)

    def watch(self, future: Future[list[Completion]]) -> None:
        """Follow the request that the scheduler took on."""
        self.future = future
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._tokens.put_nowait, None))

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        """The tokens as they come, all that there are at a time; ApiError where the engine fails or time runs out."""
        while True:
            came = [await self._within(self._tokens.get())]
            while not self._tokens.empty():
                came.append(self._tokens.get_nowait())
            if tokens := [event for event in came if event is not None]:
                yield tokens
            if came[-1] is None:
                break
        await self.result()

    async def result(self) -> list[Completion]:
        """The completions, in order of sample; ApiError as for `events`."""
        try:
            completions = await self._within(asyncio.wrap_future(self.future))
        except ClientError as error:
            self._outcome = "failed"
            raise ApiError(503, str(error)) from None
        except ValueError as error:
            self._outcome = "invalid"
            raise ApiError(400, str(error)) from None
        self._outcome = str(completions[-1].finish_reason)
        return completions

    def close(self) -> None:
        """Give back what the request holds, and count it."""
        self.future.cancel()
        self._service.closed(self, self._outcome or "cancelled", time.monotonic() - self._started)

    async def _within(self, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError:
            self._outcome = "timeout"
            limit = self._service.request_timeout
            raise ApiError(504, f"the reply was not finished within {limit:g} s: ask for fewer tokens") from None


class ModelService:
    """A model behind an admission limit. `ready` and `draining` are set by whoever runs the server."""

    def __init__(
        self,
        client: Backend,
        metrics: Metrics,
        *,
        name: str,
        max_queue: int,
        request_timeout: float,
        max_share: float = 1.0,
    ):
        self.client, self.metrics, self.name = client, metrics, name
        self.tokenizer, self.window = client.tokenizer, client.window
        self.request_timeout = request_timeout
        self.ready = False
        self.draining = False
        self._most = client.slots + max_queue  # samples
        self._share = max(1, int(self._most * max_share))  # and of one key
        self._open: set[Generation] = set()
        self._mean_seconds = 1.0
        metrics.watch(self._readings())

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it works."""
        return self.client.failure

    @property
    def under_way(self) -> int:
        """Samples that are waiting or running."""
        return sum(generation.samples for generation in self._open)

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        shared: int = 0,
        listener: OnToken | None = None,
        caller: Caller = ANYONE,
    ) -> Generation:
        """Begin a generation, or refuse it with an ApiError: 400 for what cannot be run, 429 and 503 for now."""
        self.admit(params.n, caller.owner)
        generation = Generation(self, listener, params.n, caller.owner)
        try:
            future = self.client.submit(ids, params, shared=shared, on_token=generation.on_token, caller=caller)
        except ValueError as error:
            self.metrics.requests.labels("invalid").inc()
            raise ApiError(400, str(error)) from None
        except ClientError as error:
            self.metrics.requests.labels("failed").inc()
            raise ApiError(503, str(error)) from None
        generation.watch(future)
        self._open.add(generation)
        return generation

    def refuse_unless_ready(self) -> None:
        """ApiError 503 while the server warms up or shuts down."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: ask again in a moment", headers={"Retry-After": "5"})
        if not self.ready:
            raise ApiError(503, "the server is warming up: ask again in a moment", headers={"Retry-After": "5"})

    def refuse_longer(self, characters: int) -> None:
        """ApiError 400, before it is tokenised, for a text that cannot fit the window whatever it says."""
        if characters > self.window * CHARACTERS:
            raise ApiError(
                400,
                f"the text has {characters} characters: this model's maximum context length is {self.window} tokens; "
                f"shorten it, or ask the model memory/{self.name}, which reads texts of any length",
                code="context_length_exceeded",
            )

    def closed(self, generation: Generation, outcome: str, seconds: float) -> None:
        """A generation ended, one way or the other."""
        if generation not in self._open:
            return
        self._open.remove(generation)
        self.metrics.requests.labels(outcome).inc()
        if outcome in ("stop", "length"):
            self.metrics.request.observe(seconds)
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def admit(self, samples: int, owner: str) -> None:
        """ApiError 429 where so many samples more are too many for now, 400 where they always would be."""
        self.refuse_unless_ready()
        if samples > self._share:
            raise ApiError(
                400, f"the request asks for {samples} replies, {self._share} are the most: ask for fewer", param="n"
            )
        own = sum(generation.samples for generation in self._open if generation.owner == owner)
        if own + samples > self._share:
            self._refuse(f"{own} replies for this key are waiting or running, and {self._share} are the most")
        if self.under_way + samples > self._most:
            self._refuse(f"{self.under_way} replies are waiting or running, and {self._most} are the most")

    def _refuse(self, why: str) -> NoReturn:
        self.metrics.requests.labels("rejected").inc()
        wait = min(60, max(1, round(self._mean_seconds * self._most / self.client.slots / 2)))
        raise ApiError(
            429, f"{why}: ask again in {wait} s", code="rate_limit_exceeded", headers={"Retry-After": str(wait)}
        )

    def _readings(self) -> list[Reading]:
        client = self.client
        return [
            Reading("memjax_slots", "Slots of the engine.", lambda: client.slots),
            Reading("memjax_slots_used", "Slots that decode.", lambda: client.running),
            Reading("memjax_requests_open", "Replies waiting or running.", lambda: self.under_way),
            Reading("memjax_queue", "Replies beyond the slots.", self._queue),
            self._counted("memjax_prompt_tokens", "Prompt tokens prefilled.", "prefilled_tokens"),
            self._counted("memjax_cached_tokens", "Prompt tokens shared.", "cached_tokens"),
            self._counted("memjax_output_tokens", "Tokens drawn.", "useful_slot_steps"),
            self._counted("memjax_decode_steps", "Steps of the engine.", "decode_steps"),
            Reading("memjax_compilations", "Compiled after warm-up; 0 is right.", lambda: client.compilations),
            Reading("memjax_weights_version", "Version of the weights.", lambda: client.weights_version),
            Reading("memjax_ready", "1 when warm and not shutting down.", lambda: self.ready and not self.draining),
        ]

    def _counted(self, name: str, text: str, counter: str) -> Reading:
        return Reading(name, text, lambda: getattr(self.client.counters, counter), counts=True)

    def _queue(self) -> int:
        return max(0, self.under_way - self.client.slots)
