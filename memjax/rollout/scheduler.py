"""Continuous batching: one worker thread that keeps an engine's slots filled from a queue of requests.

Policy. Requests are prefilled in order of arrival, where several callers wait sample by sample in turns, and only when
a slot is free for them. Between two decode steps
about `prefill_budget` tokens are prefilled: a running reply waits for a bounded time however many prompts queue up, and
a waiting prompt gets its share after every step. Short prompts that wait together are prefilled together. The samples
of a request share one prefill and start as slots fall free. No jax.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from memjax.rollout.client import ClientError
from memjax.rollout.reply import GrowingReply, Scores
from memjax.trajectory import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from memjax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Start = tuple[int, int, SamplingParams, int]
"""The start of a reply: row of the prefix, slot, sampling, and which sample of the request it is."""

_LOOK_AHEAD = 256  # waiting requests among which the company of a short prompt is looked for
_LEAST_TOP_P = 1e-6
_CALLERS = 1024  # whose turns are remembered before those that have none left are forgotten
_MAX_FAILURES = 3  # decode steps in a row that may fail before the engine counts as dead


class SlotEngine(Protocol):
    """What the scheduler asks of memjax.rollout.engine.Engine, which says what the calls do."""

    vocabulary: int
    eos_ids: tuple[int, ...]

    @property
    def max_concurrent_decodes(self) -> int: ...  # noqa: D102
    @property
    def max_length(self) -> int: ...  # noqa: D102
    @property
    def batches(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def batches_alone(self) -> bool: ...  # noqa: D102
    def load_params(self) -> Any: ...  # noqa: D102
    def init_decode_state(self) -> Any: ...  # noqa: D102
    def prefill_pieces(self, *, params: Any, existing_prefix: Any, tokens: np.ndarray) -> Generator[int, None, Any]: ...  # noqa: D102
    def score_pieces(self, *, params: Any, tokens: np.ndarray) -> Generator[int, None, tuple[Any, Scores]]: ...  # noqa: D102
    def prefill_rows(self, *, params: Any, prompts: Sequence[np.ndarray], length: int) -> Any: ...  # noqa: D102
    def insert_rows(self, prefix: Any, decode_state: Any, starts: Sequence[Start]) -> Any: ...  # noqa: D102
    def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]: ...  # noqa: D102
    def release(self, decode_state: Any, slot: int) -> Any: ...  # noqa: D102


@dataclass(frozen=True)
class TokenEvent:
    """A sampled token; `text` is what may be shown since the last event: never the beginning of a stop string."""

    sample: int
    token_id: int
    logprob: float
    text: str
    finish_reason: FinishReason | None
    weights_version: int = 0  # of the weights that drew this token


OnToken = Callable[[TokenEvent], None]


@dataclass(frozen=True)
class Caller:
    """Who asks: callers take turns by `name`; what is kept of a prompt is only for those of the same `owner`."""

    name: str = ""
    owner: str = ""


ANYONE = Caller()


@dataclass
class Counters:
    """What a scheduler has done. A slot-step is one slot's part of a decode step, useful when a request held it."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    useful_slot_steps: int = 0


class PrefixStore:
    """The prefixes used last, `capacity` cache entries in all, under their owner, weights' version and token ids."""

    def __init__(self, capacity: int):
        self._capacity, self._held = capacity, 0
        self._prefixes: OrderedDict[tuple[str, int, bytes], Any] = OrderedDict()

    def get(self, owner: str, version: int, ids: np.ndarray) -> Any:
        """The prefix of exactly these ids, or None."""
        key = owner, version, ids.tobytes()
        if key in self._prefixes:
            self._prefixes.move_to_end(key)
        return self._prefixes.get(key)

    def put(self, owner: str, ids: np.ndarray, prefix: Any) -> None:
        """Keep a prefix, and drop those longest unused that there is no room for."""
        if prefix.capacity > self._capacity:
            return
        key = owner, prefix.version, ids.tobytes()
        replaced = self._prefixes.pop(key, None)
        self._prefixes[key] = prefix
        self._held += prefix.capacity - (replaced.capacity if replaced else 0)
        while self._held > self._capacity:
            self._held -= self._prefixes.popitem(last=False)[1].capacity

    def clear(self) -> None:
        """Forget all of them."""
        self._prefixes.clear()
        self._held = 0


@dataclass(eq=False)
class _Request:
    ids: np.ndarray
    params: SamplingParams
    shared: int
    on_token: OnToken | None
    caller: Caller = ANYONE
    is_scored: bool = False  # then the future gives Scores, and nothing is drawn
    future: Future[Any] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    cached: int = 0
    prefix: Any = None
    row: int = 0  # of its prefix, which may hold several prompts
    started: int = 0  # samples that have been given a slot
    first_turn: int = 0  # of its first sample; the others have those that follow
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def turn(self) -> int:
        """That of the next sample."""
        return self.first_turn + self.started


@dataclass(eq=False)
class _Running:
    """A sample of a request, in a slot."""

    request: _Request
    sample: int
    reply: GrowingReply
    version: int = 0


class Scheduler:
    """Owns an engine from construction to `close`; `submit`, `swap_weights` and `close` may be called from any thread.

    `prefix_capacity` bounds, in cache entries, the prefixes kept for later requests (by default two full slots).
    `prefill_budget` is the policy's, in tokens.
    """

    def __init__(
        self,
        engine: SlotEngine,
        tokenizer: Tokenizer,
        *,
        prefix_capacity: int | None = None,
        prefill_budget: int = 1024,
    ):
        self.counters = Counters()
        self._engine, self._tokenizer, self._prefill_budget = engine, tokenizer, prefill_budget
        self._weights = engine.load_params()
        self._prefixes = PrefixStore(2 * engine.max_length if prefix_capacity is None else prefix_capacity)
        self._state = engine.init_decode_state()
        self._free = list(range(engine.max_concurrent_decodes))
        self._waiting: deque[_Request] = deque()
        self._filling: tuple[_Request, Iterator[int]] | None = None
        self._filled: deque[_Request] = deque()  # prefilled, with samples that wait for a slot
        self._running: dict[int, _Running] = {}
        self._turn = 0  # of the sample that was started last
        self._next_turns: dict[str, int] = {}  # by the name of the caller
        self._failures = 0

        self._wake = threading.Condition()  # guards the four fields below, through which other threads speak
        self._inbox: list[_Request] = []
        self._swaps: list[tuple[Any, int | None, Future[int]]] = []
        self._closing = False
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._work, name="memjax-scheduler", daemon=True)
        self._thread.start()

    # -- called from any thread

    @property
    def running(self) -> int:
        """Slots in use."""
        return len(self._running)

    @property
    def failure(self) -> str | None:
        """Why nothing can be submitted any more; None while the engine works."""
        return self._dead

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        shared: int = 0,
        on_token: OnToken | None = None,
        caller: Caller = ANYONE,
    ) -> Future[list[Completion]]:
        """Queue a prompt; the future gives `params.n` completions, and cancelling it frees its slots within a step.

        The prefill of the first `shared` ids (0: of the whole prompt) is kept for requests that begin with them.
        `on_token` is called from the worker thread. Raises ValueError for a prompt that cannot fit; the future raises
        ClientError when the engine fails.
        """
        self._check(ids, params.max_tokens, shared)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        # What the device's 32 bits cannot hold would fail the step that starts the reply, and others with it: a cut at
        # the vocabulary's size or beyond is none, and the smallest top_p that is no 0 keeps one token, as any below.
        top_k = params.top_k if params.top_k < self._engine.vocabulary else 0
        params = replace(params, seed=seed, top_k=top_k, top_p=max(params.top_p, _LEAST_TOP_P))
        request = _Request(np.asarray(ids, np.int32), params, shared or len(ids), on_token, caller)
        self._send(request)
        return request.future

    def score(self, ids: Sequence[int], caller: Caller = ANYONE) -> Future[Scores]:
        """Queue a prompt whose tokens are to be scored; its prefill is kept, as by `submit`, with the same errors."""
        self._check(ids, 0, 0)
        request = _Request(np.asarray(ids, np.int32), SamplingParams(), len(ids), None, caller, is_scored=True)
        self._send(request)
        return request.future

    def _send(self, request: _Request) -> None:
        with self._wake:
            self._refuse_if_over()
            self._inbox.append(request)
            self._wake.notify()

    def swap_weights(self, params: Any, version: int | None = None) -> Future[int]:
        """Run other weights from the next step on; the future gives their version.

        Running replies go on with the cache that they have, and keep the version of their first token. Prompts that are
        not yet decoding are prefilled again.
        """
        done: Future[int] = Future()
        with self._wake:
            self._refuse_if_over()
            self._swaps.append((params, version, done))
            self._wake.notify()
        return done

    def close(self, *, drain: bool = False) -> None:
        """Stop, after what was submitted is done (`drain`) or at once, failing it with ClientError."""
        with self._wake:
            self._closing = True
            if not drain:
                self._dead = self._dead or "the scheduler was closed"
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _check(self, ids: Sequence[int], max_tokens: int, shared: int) -> None:
        if not len(ids):
            raise ValueError("the prompt is empty; it needs at least one token")
        if len(ids) + max_tokens > self._engine.max_length:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_tokens {max_tokens} need "
                f"{len(ids) + max_tokens} places, the window has {self._engine.max_length}: "
                "shorten the prompt or lower max_tokens"
            )
        if not 0 <= shared <= len(ids):
            raise ValueError(f"shared must be between 0 and the prompt's {len(ids)} tokens, got {shared}")
        if min(ids) < 0 or max(ids) >= self._engine.vocabulary:
            raise ValueError(f"token ids must be in 0..{self._engine.vocabulary - 1}, got {min(ids)}..{max(ids)}")

    def _refuse_if_over(self) -> None:
        if self._closing or self._dead:
            raise ClientError(self._dead or "the scheduler was closed")

    # -- the worker thread

    def _work(self) -> None:
        try:
            while self._receive():
                self._step()
        except Exception as error:  # the boundary of the thread: nobody may wait for it in vain
            log.exception("the rollout engine is dead")
            self._dead = f"the rollout engine failed ({type(error).__name__}: {error}); start it again"
        finally:
            self._give_up()

    def _receive(self) -> bool:
        """Wait until there is something to do and take it in; False when the thread is to end."""
        with self._wake:
            while not (self._inbox or self._swaps or self._busy() or self._closing):
                self._wake.wait()
            if self._dead or (self._closing and not self._inbox and not self._swaps and not self._busy()):
                return False
            arrived, swaps = self._inbox, self._swaps
            self._inbox, self._swaps = [], []
        self.counters.requests += len(arrived)
        for request in arrived:
            self._queue(request)
        for params, version, done in swaps:
            self._swap(params, version, done)
        return True

    def _queue(self, request: _Request) -> None:
        """Let a request wait: behind those of its caller, and beside those of others, each sample for a turn."""
        name = request.caller.name
        request.first_turn = max(self._turn, self._next_turns.get(name, 0))
        self._next_turns[name] = request.first_turn + request.params.n
        if len(self._next_turns) > _CALLERS:
            self._next_turns = {name: turn for name, turn in self._next_turns.items() if turn > self._turn}
        insort(self._waiting, request, key=_turn_of)

    def _busy(self) -> bool:
        return bool(self._waiting or self._filling or self._filled or self._running)

    def _step(self) -> None:
        self._drop_cancelled()
        self._prefill()
        self._start_samples()
        if self._running:
            self._decode()

    def _prefill(self) -> None:
        budget = self._prefill_budget
        while budget > 0:
            if self._filling is None:
                promised = sum(request.params.n - request.started for request in self._filled)
                if not self._waiting or (promised >= len(self._free) and not self._is_passed_over()):
                    return
                if together := self._together(len(self._free) - promised):
                    budget -= self._fill_together(together)
                    continue
                request = self._waiting.popleft()
                self._filling = request, self._fill(request)
            request, pieces = self._filling
            try:
                taken = next(pieces, None)
            except Exception as error:  # the boundary of a request: its error is its own
                self._fail(request, _engine_error(error))
                continue
            if taken is None:
                self._filling = None
                if not request.is_scored:
                    self._filled.append(request)
            else:
                budget -= taken
                self.counters.prefilled_tokens += taken
            if request.future.cancelled():
                self._drop_cancelled()

    def _is_passed_over(self) -> bool:
        """Whether the first that waits has its turn before all samples that are to be started."""
        ahead = 0 < len(self._filled) < self._engine.max_concurrent_decodes
        return ahead and self._waiting[0].turn < min(map(_turn_of, self._filled))

    def _together(self, room: int) -> list[list[_Request]]:
        """The first waiting prompt and those that are prefilled with it: who is to have each row of the program.

        Equal prompts share a row, and there are as many requests as fill `room` slots. None where the first one is
        long, wants its beginning kept, or has company for less than half of the rows.
        """
        length = self._batch_length(self._waiting[0])
        if length is None:
            return []
        rows = self._engine.batches[length]
        sharing: dict[bytes, list[_Request]] = {}
        for request in islice(self._waiting, _LOOK_AHEAD):
            if room <= 0:
                break
            key = request.ids.tobytes()
            if self._batch_length(request) == length and (key in sharing or len(sharing) < rows):
                sharing.setdefault(key, []).append(request)
                room -= request.params.n
        return list(sharing.values()) if self._engine.batches_alone or 2 * len(sharing) > rows else []

    def _batch_length(self, request: _Request) -> int | None:
        tokens = len(request.ids) - 1  # the last one is decoded
        if request.shared < len(request.ids) or request.is_scored:
            return None
        return next((length for length in self._engine.batches if length >= tokens), None)

    def _fill_together(self, sharing: list[list[_Request]]) -> int:
        """Prefill a prompt for each row by one program, and return the tokens that it took."""
        requests = [request for equal in sharing for request in equal]
        length = self._batch_length(requests[0])
        assert length is not None
        for request in requests:
            self._waiting.remove(request)
        prompts = [equal[0].ids for equal in sharing]
        try:
            prefix = self._engine.prefill_rows(params=self._weights, prompts=prompts, length=length)
        except Exception as error:  # the boundary of the requests, as for a single one
            for request in requests:
                self._fail(request, _engine_error(error))
            return 0
        for row, equal in enumerate(sharing):
            for request in equal:
                request.prefix, request.row = prefix, row
                request.cached = len(request.ids) if request is not equal[0] else 0
                self.counters.cached_tokens += request.cached
        self._filled.extend(requests)
        self.counters.prefilled_tokens += sum(map(len, prompts))
        return prefix.rows * length

    def _fill(self, request: _Request) -> Iterator[int]:
        """Prefill a request from what is kept, yielding the tokens of each piece."""
        if request.is_scored:
            prefix, scores = yield from self._engine.score_pieces(params=self._weights, tokens=request.ids)
            self._prefixes.put(request.caller.owner, request.ids, prefix)
            if request.future.set_running_or_notify_cancel():
                request.future.set_result(scores)
            return
        prefill = partial(self._engine.prefill_pieces, params=self._weights)
        common = request.ids[: request.shared]
        prefix = self._prefixes.get(request.caller.owner, self._weights.current.version, common)
        request.cached = prefix.length if prefix else 0
        if prefix is None:
            prefix = yield from prefill(existing_prefix=None, tokens=common)
            self._prefixes.put(request.caller.owner, common, prefix)
        if request.shared < len(request.ids):
            prefix = yield from prefill(existing_prefix=prefix, tokens=request.ids[request.shared :])
        self.counters.cached_tokens += request.cached
        request.prefix, request.row = prefix, 0

    def _start_samples(self) -> None:
        while self._filled and self._free:
            self._filled = deque(sorted(self._filled, key=_turn_of))
            prefix = self._filled[0].prefix
            requests, starts = self._next_starts(prefix)
            try:
                self._state = self._engine.insert_rows(prefix, self._state, starts)
            except Exception as error:  # the boundary of the device: the state may be lost with it
                self._free += [slot for _, slot, _, _ in starts]
                for request in dict.fromkeys(requests):
                    self._fail(request, _engine_error(error))
                self._restart(error)
                return
            for request, (_, slot, params, sample) in zip(requests, starts, strict=True):
                reply = GrowingReply(self._tokenizer, self._engine.eos_ids, params.stop, params.max_tokens)
                self._running[slot] = _Running(request, sample, reply)

    def _next_starts(self, prefix: Any) -> tuple[list[_Request], list[Start]]:
        """Samples of the first filled requests that share a prefix, each with a slot that was free."""
        requests: list[_Request] = []
        starts: list[Start] = []
        while self._filled and self._free and len(starts) < prefix.rows and self._filled[0].prefix is prefix:
            request = self._filled[0]
            if any(other.turn < request.turn for other in self._filled):
                break
            self._turn = max(self._turn, request.turn)
            requests.append(request)
            starts.append((request.row, self._free.pop(), request.params, request.started))
            request.started += 1
            if request.started == request.params.n:
                self._filled.popleft()
                request.prefix = None
        return requests, starts

    def _decode(self) -> None:
        version = self._weights.current.version
        try:
            self._state, drawn = self._engine.generate(self._weights, self._state)
            drawn = drawn.convert_to_numpy()
        except Exception as error:  # the boundary of the device, as above
            self._failures += 1
            if self._failures == _MAX_FAILURES:
                raise
            self._restart(error)
            return
        self._failures = 0
        self.counters.decode_steps += 1
        self.counters.slot_steps += self._engine.max_concurrent_decodes
        self.counters.useful_slot_steps += len(self._running)
        tokens, logprobs = drawn.tokens, drawn.logprobs
        for slot, running in list(self._running.items()):
            if slot not in self._running:  # an earlier sample failed its request
                continue
            assert drawn.valid[slot], f"slot {slot} ended on the device before the host"
            if not running.reply.token_ids:
                running.version = version
            self._take(slot, running, int(tokens[slot]), float(logprobs[slot]), version)

    def _take(self, slot: int, running: _Running, token_id: int, logprob: float, version: int) -> None:
        reply, request = running.reply, running.request
        if not math.isfinite(logprob):  # no JSON, and nothing that a learner could use
            message = "the model gave a log-probability that is not finite: its weights or its cache are damaged"
            self._fail(request, ClientError(message))
            return
        reply.push(token_id, logprob)
        if request.on_token:
            event = TokenEvent(running.sample, token_id, logprob, reply.take_text(), reply.finish_reason, version)
            try:
                request.on_token(event)
            except Exception as error:  # the boundary of the caller's code
                self._fail(request, error)
                return
        if reply.finish_reason:
            self._release(slot)
            request.completions[running.sample] = _completion(running, reply.finish_reason)
            if len(request.completions) == request.params.n and request.future.set_running_or_notify_cancel():
                request.future.set_result([request.completions[i] for i in range(request.params.n)])

    def _swap(self, params: Any, version: int | None, done: Future[int]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            version = self._weights.swap(params, version)
        except ValueError as error:
            done.set_exception(error)
            return
        self._prefixes.clear()
        again = [*self._filled, *([self._filling[0]] if self._filling else [])]
        self._waiting = deque(sorted([*again, *self._waiting], key=_turn_of))
        self._filling = None
        self._filled.clear()
        done.set_result(version)

    def _drop_cancelled(self) -> None:
        held = [*self._waiting, *self._filled, *(running.request for running in self._running.values())]
        held += [self._filling[0]] if self._filling else []
        for request in {request for request in held if request.future.cancelled()}:
            self.counters.cancelled += 1
            request.future.set_running_or_notify_cancel()
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        """Take a request out of every queue and slot."""
        for queue in (self._waiting, self._filled):
            if request in queue:
                queue.remove(request)
        if self._filling and self._filling[0] is request:
            self._filling = None
        for slot in [slot for slot, running in self._running.items() if running.request is request]:
            self._release(slot)

    def _release(self, slot: int) -> None:
        del self._running[slot]
        self._free.append(slot)
        self._state = self._engine.release(self._state, slot)

    def _fail(self, request: _Request, error: Exception) -> None:
        self.counters.failed += 1
        self._forget(request)
        if not request.future.cancelled() and request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _restart(self, error: Exception) -> None:
        """Fail what was running, whose state was donated to the call that failed, and go on with an empty state."""
        log.error("a step of the rollout engine failed: %s", error)
        for request in {running.request for running in self._running.values()}:
            self._fail(request, _engine_error(error))
        self._state = self._engine.init_decode_state()

    def _give_up(self) -> None:
        """Fail whatever is left."""
        with self._wake:
            self._closing = True
            left, swaps = self._inbox, self._swaps
            reason = self._dead or "the scheduler was closed"
        left = [*left, *self._waiting, *self._filled, *(running.request for running in self._running.values())]
        left += [self._filling[0]] if self._filling else []
        for future in [request.future for request in dict.fromkeys(left)] + [done for *_, done in swaps]:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClientError(reason))
        self._running.clear()
        self._state = self._filling = None
        self._prefixes.clear()


def _turn_of(request: _Request) -> int:
    return request.turn


def _engine_error(error: Exception) -> Exception:
    if isinstance(error, ValueError):
        return error
    return ClientError(f"the rollout engine failed on this request ({type(error).__name__}: {error})")


def _completion(running: _Running, reason: FinishReason) -> Completion:
    request, reply = running.request, running.reply
    return Completion(
        prompt_ids=request.ids,
        token_ids=np.asarray(reply.token_ids, np.int32),
        logprobs=np.asarray(reply.logprobs, np.float32),
        text=reply.text,
        finish_reason=reason,
        weights_version=running.version,
        prompt_tokens=len(request.ids),
        completion_tokens=len(reply.token_ids),
        cached_tokens=request.cached,
        seconds=time.monotonic() - request.submitted,
    )
