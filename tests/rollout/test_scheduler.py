"""The scheduler over an engine whose replies are known: who runs when, and what a failure reaches."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from memjax.rollout.client import ClientError
from memjax.rollout.scheduler import Caller, PrefixStore, Scheduler
from memjax.trajectory import SamplingParams
from tests.rollout.test_reply import END, Bytes

WAIT = 20  # seconds after which a test counts as hanging


@dataclass(frozen=True)
class FakePrefix:
    ids: tuple[int, ...]
    version: int

    @property
    def length(self) -> int:
        return len(self.ids)

    capacity = length
    rows = 1

    @property
    def prompts(self) -> tuple[tuple[int, ...]]:
        return (self.ids,)


@dataclass(frozen=True)
class FakeRows:
    prompts: tuple[tuple[int, ...], ...]
    rows: int
    version: int


class FakeWeights:
    def __init__(self):
        self.current = SimpleNamespace(version=0)

    def swap(self, params, version=None) -> int:
        if params == "bad":
            raise ValueError("not the same shape")
        self.current = SimpleNamespace(version=self.current.version + 1 if version is None else version)
        return self.current.version


class FakeEngine:
    """Replies with the prompt in upper case, the sample's number, and an end.

    With '~' in the prompt the reply never ends, with '?' it begins with the seed; '!' cannot be prefilled. Pieces are
    of 4 tokens. `faults` maps the name of a call to how many of its next calls raise. With `gate`, every step waits for
    a permit.
    """

    vocabulary, eos_ids = 257, (END,)

    batches_alone = False

    def __init__(self, slots=2, max_length=64, gate=None, batches=()):
        self.max_concurrent_decodes, self.max_length, self.batches = slots, max_length, dict(batches)
        self.weights, self.gate = FakeWeights(), gate
        self.events: list[tuple] = []
        self.logprob = -0.25
        self.entered = 0  # decode steps, those that still wait for their permit among them
        self.faults: dict[str, int] = {}
        self.versions: list[tuple[int, int]] = []  # of the weights that made a prefix, and of those that go on from it

    def _maybe_fail(self, call: str) -> None:
        if self.faults.get(call, 0) > 0:
            self.faults[call] -= 1
            raise RuntimeError(f"{call} broke")

    def load_params(self):
        return self.weights

    def init_decode_state(self):
        self._maybe_fail("init")
        return {}

    def prefill_pieces(self, *, params, existing_prefix, tokens):
        if ord("!") in tokens:
            raise RuntimeError("this prompt is poison")
        version = params.current.version
        for start in range(0, len(tokens), 4):
            piece = len(tokens[start : start + 4])
            self.events.append(("prefill", piece))
            yield piece
        before = existing_prefix.ids if existing_prefix else ()
        return FakePrefix((*before, *(int(i) for i in tokens)), existing_prefix.version if before else version)

    def prefill_rows(self, *, params, prompts, length):
        self._maybe_fail("prefill_rows")
        assert len(prompts) <= self.batches[length]
        assert all(len(prompt) - 1 <= length for prompt in prompts)
        self.events.append(("prefill_rows", length, tuple(bytes(prompt.tolist()).decode() for prompt in prompts)))
        rows = tuple(tuple(prompt.tolist()) for prompt in prompts)
        return FakeRows(rows, self.batches[length], params.current.version)

    def insert_rows(self, prefix, state, starts):
        self._maybe_fail("insert")
        assert len(starts) <= prefix.rows
        self.versions.append((prefix.version, self.weights.current.version))
        for row, slot, sampling, sample in starts:
            self.events.append(("insert", slot))
            state = state | {slot: self._reply(bytes(prefix.prompts[row]), sample, sampling)}
        return state

    def _reply(self, prompt: bytes, sample: int, sampling: SamplingParams) -> Iterator[int]:
        if b"?" in prompt:
            yield from str(sampling.seed).encode()
        while b"~" in prompt:
            yield ord(".")
        yield from prompt.upper() + str(sample).encode()
        yield END

    def generate(self, params, state):
        self.entered += 1
        if self.gate:
            assert self.gate.acquire(timeout=WAIT)
        self._maybe_fail("generate")
        self.events.append(("step", tuple(sorted(state))))
        tokens = np.zeros(self.max_concurrent_decodes, np.int64)
        valid = np.zeros(self.max_concurrent_decodes, bool)
        for slot, reply in state.items():
            tokens[slot], valid[slot] = next(reply), True
        result = SimpleNamespace(tokens=tokens, valid=valid, logprobs=np.full(len(tokens), self.logprob))
        result.convert_to_numpy = lambda: result
        return state, result

    def release(self, state, slot):
        self.events.append(("release", slot))
        return {held: reply for held, reply in state.items() if held != slot}

    def count(self, name: str) -> int:
        return sum(event[0] == name for event in self.events)


@pytest.fixture
def start():
    schedulers = []

    def make(engine, **settings) -> Scheduler:
        schedulers.append(Scheduler(engine, Bytes(), **settings))
        return schedulers[-1]

    yield make
    for scheduler in schedulers:
        if scheduler._engine.gate:
            scheduler._engine.gate.release(10_000)
        scheduler.close()


def ids(text: str) -> list[int]:
    return list(text.encode())


def params(max_tokens=20, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def texts(future) -> list[str]:
    return [completion.text for completion in future.result(WAIT)]


def test_requests_of_all_sizes_get_their_own_replies(start):
    engine = FakeEngine(slots=3)
    scheduler = start(engine)
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 30))) for _ in range(200)]
    counts = rng.integers(1, 6, 200)
    futures = [scheduler.submit(ids(p), params(30, n=int(n), seed=1)) for p, n in zip(prompts, counts, strict=True)]
    for prompt, n, future in zip(prompts, counts, futures, strict=True):
        completions = future.result(WAIT)
        expected = [(prompt.upper() + str(i))[:30] for i in range(n)]
        assert [c.text for c in completions] == expected
        assert all(c.prompt_ids.tolist() == ids(prompt) for c in completions)
        assert all(c.completion_tokens == len(c.token_ids) == len(c.logprobs) for c in completions)
    assert scheduler.counters.requests == 200
    assert scheduler.counters.useful_slot_steps == sum(c.completion_tokens for f in futures for c in f.result())


def test_samples_share_one_prefill_even_when_there_are_more_than_slots(start):
    engine = FakeEngine(slots=2)
    assert texts(start(engine).submit(ids("abcdef"), params(n=5))) == [f"ABCDEF{i}" for i in range(5)]
    assert engine.count("prefill") == 2
    assert engine.count("insert") == 5


def test_a_shared_beginning_is_prefilled_once_and_changes_nothing(start):
    engine = FakeEngine()
    scheduler = start(engine)
    first, second = (scheduler.submit(ids("12345678" + end), params(), shared=8) for end in ("ab", "cde"))
    assert texts(first) + texts(second) == ["12345678AB0", "12345678CDE0"]
    assert [first.result()[0].cached_tokens, second.result()[0].cached_tokens] == [0, 8]
    assert scheduler.counters.prefilled_tokens == 8 + 2 + 3
    assert scheduler.counters.cached_tokens == 8


def test_a_repeated_prompt_is_not_prefilled_again_until_the_weights_change(start):
    engine = FakeEngine()
    scheduler = start(engine)
    for _ in range(2):
        assert scheduler.submit(ids("abcd"), params()).result(WAIT)[0].weights_version == 0
    assert engine.count("prefill") == 1
    assert scheduler.swap_weights("good", 5).result(WAIT) == 5
    completion = scheduler.submit(ids("abcd"), params()).result(WAIT)[0]
    assert (completion.weights_version, completion.cached_tokens) == (5, 0)
    assert engine.count("prefill") == 2
    assert scheduler.swap_weights("others under the same number", 5).result(WAIT) == 5
    assert scheduler.submit(ids("abcd"), params()).result(WAIT)[0].cached_tokens == 0
    with pytest.raises(ValueError, match="not the same shape"):
        scheduler.swap_weights("bad").result(WAIT)


def one_step(engine) -> None:
    """Let the engine take one decode step, and wait until it stands before the next."""
    before = engine.count("step")
    engine.gate.release()
    while engine.entered < before + 2:
        threading.Event().wait(0.001)


def test_samples_that_wait_for_a_slot_start_from_the_weights_that_decode_them(start):
    engine = FakeEngine(slots=2, gate=threading.Semaphore(0))
    scheduler = start(engine)
    future = scheduler.submit(ids("abcde"), params(n=3))
    one_step(engine)
    assert engine.versions == [(0, 0)] * 2, "two samples run, the third one waits with the prefix of both"
    swapped = scheduler.swap_weights("good")
    engine.gate.release(10_000)
    assert swapped.result(WAIT) == 1
    assert texts(future) == ["ABCDE0", "ABCDE1", "ABCDE2"]
    assert engine.versions == [(0, 0), (0, 0), (1, 1)]
    assert [completion.weights_version for completion in future.result()] == [0, 0, 1]


@pytest.mark.parametrize("shared", [0, 4])
def test_a_prompt_half_prefilled_starts_over_when_the_weights_change(start, shared):
    engine = FakeEngine(slots=2, gate=threading.Semaphore(0))
    scheduler = start(engine, prefill_budget=4)
    endless = scheduler.submit(ids("~"), params(60))
    one_step(engine)
    future = scheduler.submit(ids("abcdefghijkl"), params(), shared=shared)
    one_step(engine), one_step(engine)
    assert engine.count("prefill") == 1 + 2, "one piece of the prompt is missing"
    swapped = scheduler.swap_weights("good")
    engine.gate.release(10_000)
    assert swapped.result(WAIT) == 1
    assert texts(future) == ["ABCDEFGHIJKL0"]
    endless.cancel()
    assert engine.versions == [(0, 0), (1, 1)]
    assert future.result()[0].weights_version == 1
    assert engine.count("prefill") == 1 + 2 + 3


def together(engine) -> list[tuple]:
    """What was prefilled together: length and prompts of each program."""
    return [event[1:] for event in engine.events if event[0] == "prefill_rows"]


@pytest.fixture
def crowd(start):
    """Submits prompts so that they all wait when the first slots fall free, and gives the replies."""

    def submit(engine, *prompts: str, n: int = 1) -> list[list[str]]:
        scheduler = start(engine)
        before = scheduler.submit(ids("~" * 9), params(1, n=engine.max_concurrent_decodes))
        while scheduler.running < engine.max_concurrent_decodes:
            threading.Event().wait(0.001)
        futures = [scheduler.submit(ids(prompt), params(30, n=n)) for prompt in prompts]
        engine.gate.release(10_000)
        before.result(WAIT)
        return [texts(future) for future in futures]

    return submit


def test_short_prompts_that_wait_together_are_prefilled_together(crowd):
    engine = FakeEngine(slots=8, gate=threading.Semaphore(0), batches={4: 3, 6: 4})
    prompts = ["abc", "a longer one", "d", "bcdefg", "efghi", "hij", "cdefgh", "lmn"]
    assert crowd(engine, *prompts) == [[prompt.upper() + "0"] for prompt in prompts]
    # By length and in order. Two of length 6 do not fill half of four rows and go alone, as does the longer one.
    assert together(engine) == [(4, ("abc", "d", "efghi")), (4, ("hij", "lmn"))]


def test_equal_prompts_share_a_row_and_every_sample_has_its_own_stream(crowd):
    engine = FakeEngine(slots=8, gate=threading.Semaphore(0), batches={4: 2})
    replies = crowd(engine, "abc", "abc", "bcd", "abc", n=2)
    assert replies == [["ABC0", "ABC1"], ["ABC0", "ABC1"], ["BCD0", "BCD1"], ["ABC0", "ABC1"]]
    assert together(engine) == [(4, ("abc", "bcd"))]


def test_a_prompt_without_company_is_prefilled_alone_unless_the_engine_wants_it_otherwise(crowd):
    engine = FakeEngine(slots=2, gate=threading.Semaphore(0), batches={4: 2})
    assert crowd(engine, "abc") == [["ABC0"]]
    assert together(engine) == []
    engine = FakeEngine(slots=2, gate=threading.Semaphore(0), batches={4: 2})
    engine.batches_alone = True
    assert crowd(engine, "abc") == [["ABC0"]]
    assert together(engine) == [(4, ("abc",))]


def test_a_batch_that_cannot_be_prefilled_fails_its_own_requests(start):
    engine = FakeEngine(slots=4, batches={4: 2})
    engine.batches_alone = True
    engine.faults["prefill_rows"] = 1
    scheduler = start(engine)
    with pytest.raises(ClientError, match="prefill_rows broke"):
        scheduler.submit(ids("abc"), params()).result(WAIT)
    assert texts(scheduler.submit(ids("abc"), params())) == ["ABC0"]


def test_callers_take_turns_sample_by_sample_and_one_alone_goes_in_order(start):
    engine = FakeEngine(slots=1, gate=threading.Semaphore(0))
    scheduler, order = start(engine), []
    first = scheduler.submit(ids("x"), params(), caller=Caller("flood"))
    while not engine.entered:
        time.sleep(0.001)

    def ask(name: str, text: str, n: int):
        note = lambda event: order.append(text) if event.finish_reason else None  # noqa: E731
        return scheduler.submit(ids(text), params(n=n), caller=Caller(name), on_token=note)

    futures = [ask("flood", "a", 6), ask("flood", "b", 6), ask("other", "c", 1), ask("third", "d", 2)]
    engine.gate.release(10_000)
    for future in [first, *futures]:
        future.result(WAIT)
    assert order.index("c") <= 3, order  # of 15: the flood of another caller is not waited for
    assert max(i for i, text in enumerate(order) if text == "d") <= 6, order
    assert [text for text in order if text in "ab"] == ["a"] * 6 + ["b"] * 6


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_log_probability_that_is_no_number_fails_its_request(start, value):
    engine = FakeEngine()
    scheduler = start(engine)
    engine.logprob = value
    with pytest.raises(ClientError, match="not finite"):
        scheduler.submit(ids("hello"), params()).result(WAIT)
    engine.logprob = -0.25
    assert texts(scheduler.submit(ids("hello"), params())) == ["HELLO0"]
    assert scheduler.running == 0


def test_what_is_kept_of_a_prompt_is_not_told_to_another_owner(start):
    scheduler = start(FakeEngine())

    def cached(owner: str) -> int:
        future = scheduler.submit(ids("hello"), params(), caller=Caller("any", owner))
        return future.result(WAIT)[0].cached_tokens

    assert [cached("alice"), cached("bob"), cached("alice"), cached("bob")] == [0, 0, 5, 5]


def test_prefixes_longest_unused_give_way():
    store = PrefixStore(10)
    prefixes = {text: FakePrefix(tuple(ids(text)), 0) for text in ("aaaa", "bbbb", "cccc", "d" * 11)}
    put = lambda text: store.put("", np.asarray(ids(text), np.int32), prefixes[text])  # noqa: E731
    get = lambda text: store.get("", 0, np.asarray(ids(text), np.int32))  # noqa: E731
    put("aaaa"), put("bbbb")
    assert get("aaaa") is prefixes["aaaa"]
    put("cccc"), put("d" * 11)
    assert [get("aaaa"), get("bbbb"), get("cccc"), get("d" * 11)] == [prefixes["aaaa"], None, prefixes["cccc"], None]
    assert store.get("", 1, np.asarray(ids("aaaa"), np.int32)) is None


def test_a_stop_string_across_tokens_ends_the_text_but_not_the_ids(start):
    completion = start(FakeEngine()).submit(ids("one\n\ntwo"), params(stop=("\n\n",))).result(WAIT)[0]
    assert (completion.text, completion.finish_reason) == ("ONE", "stop")
    assert completion.token_ids.tolist() == ids("ONE\n\n")


def test_tokens_are_told_as_they_come(start):
    events = []
    future = start(FakeEngine()).submit(ids("ab\ncd"), params(n=2, stop=("\nC",)), on_token=events.append)
    assert texts(future) == ["AB", "AB"]
    for sample in range(2):
        mine = [event for event in events if event.sample == sample]
        assert [event.text for event in mine] == ["A", "B", "", ""]
        assert [event.finish_reason for event in mine] == [None, None, None, "stop"]
        assert bytes(event.token_id for event in mine) == b"AB\nC"


def test_without_a_seed_every_request_draws_a_fresh_one(start):
    scheduler = start(FakeEngine())
    assert texts(scheduler.submit(ids("?"), params(seed=5))) == ["5?0"]
    assert len({texts(scheduler.submit(ids("?"), params()))[0] for _ in range(5)}) == 5


def test_a_long_prompt_and_a_running_reply_both_get_on(start):
    gate = threading.Semaphore(1)
    engine = FakeEngine(slots=2, max_length=400, gate=gate)
    scheduler = start(engine, prefill_budget=8)
    running = threading.Event()
    endless = scheduler.submit(ids("~"), params(300), on_token=lambda event: running.set())
    assert running.wait(WAIT)
    long = scheduler.submit(ids("a" * 100), params(3))
    gate.release(100)
    texts(long)
    endless.cancel()
    at = [i for i, event in enumerate(engine.events) if event == ("prefill", 4)]
    between = "".join(event[0][0] for event in engine.events[at[0] : at[-1] + 1])  # p for a piece, s for a step
    assert "ppp" not in between
    assert "ss" not in between


def test_cancelling_frees_the_slots_within_a_step(start):
    gate = threading.Semaphore(0)
    engine = FakeEngine(slots=2, gate=gate)
    scheduler = start(engine)
    held, queued = scheduler.submit(ids("~"), params(60, n=2)), scheduler.submit(ids("~~"), params(60))
    waiting = scheduler.submit(ids("x"), params(1))
    gate.release(3)
    while engine.count("step") < 3:
        pass
    assert held.cancel()
    assert queued.cancel()
    gate.release(2)
    assert texts(waiting) == ["X"]
    assert engine.count("step") <= 5
    with pytest.raises(CancelledError):
        held.result(WAIT)
    assert scheduler.counters.cancelled == 2


def test_a_poisoned_prompt_fails_alone(start):
    scheduler = start(FakeEngine())
    good, bad, later = (scheduler.submit(ids(text), params()) for text in ("good", "bad!", "later"))
    with pytest.raises(ClientError, match=r"on this request \(RuntimeError: this prompt is poison\)"):
        bad.result(WAIT)
    assert texts(good) + texts(later) == ["GOOD0", "LATER0"]
    assert scheduler.counters.failed == 1


@pytest.mark.parametrize("call", ["generate", "insert"])
def test_a_failed_step_fails_what_ran_and_the_scheduler_goes_on(start, call):
    engine = FakeEngine()
    scheduler = start(engine)
    engine.faults[call] = 1
    with pytest.raises(ClientError, match=f"{call} broke"):
        scheduler.submit(ids("first"), params()).result(WAIT)
    assert texts(scheduler.submit(ids("second"), params(n=3))) == ["SECOND0", "SECOND1", "SECOND2"]


@pytest.mark.parametrize("faults", [{"generate": 1, "init": 1}, {"generate": 3}])
def test_a_dead_engine_fails_every_request_and_refuses_more(start, faults):
    gate = threading.Semaphore(0)
    engine = FakeEngine(slots=1, gate=gate)
    scheduler = start(engine)
    engine.faults |= faults
    futures = [scheduler.submit(ids(text), params()) for text in "abcd"]
    gate.release(10)
    for future in futures:
        with pytest.raises(ClientError, match="broke"):
            future.result(WAIT)
    scheduler._thread.join(WAIT)
    with pytest.raises(ClientError, match=r"engine failed .* start it again"):
        scheduler.submit(ids("e"), params())


def test_a_listener_that_raises_fails_its_own_request(start):
    scheduler = start(FakeEngine())

    def listener(event):
        raise KeyError("mine")

    broken, sound = scheduler.submit(ids("ab"), params(n=2), on_token=listener), scheduler.submit(ids("cd"), params())
    with pytest.raises(KeyError, match="mine"):
        broken.result(WAIT)
    assert texts(sound) == ["CD0"]


def test_closing_drains_or_fails_what_was_submitted(start):
    drained = start(FakeEngine())
    futures = [drained.submit(ids("abc"), params(n=2)) for _ in range(5)]
    drained.close(drain=True)
    assert [texts(future) for future in futures] == [["ABC0", "ABC1"]] * 5
    closed = start(FakeEngine())
    endless = closed.submit(ids("~"), params(60))
    closed.close()
    with pytest.raises(ClientError, match="the scheduler was closed"):
        endless.result(WAIT)
    with pytest.raises(ClientError, match="the scheduler was closed"):
        closed.submit(ids("a"), params())


@pytest.mark.parametrize(
    ("prompt", "settings", "shared", "message"),
    [
        ([], {}, 0, "the prompt is empty"),
        ([1] * 45, {"max_tokens": 20}, 0, "45 tokens and max_tokens 20 need 65 places, the window has 64"),
        ([1, 2], {}, 3, "shared must be between 0 and the prompt's 2 tokens, got 3"),
        ([1, 257], {}, 0, r"must be in 0..256, got 1..257"),
    ],
)
def test_prompts_that_cannot_run_are_refused_at_once(start, prompt, settings, shared, message):
    scheduler = start(FakeEngine())
    with pytest.raises(ValueError, match=message):
        scheduler.submit(prompt, params(**settings), shared=shared)
    assert scheduler.submit([1] * 44, params(20)).result(WAIT)


def test_the_scheduler_needs_no_jax():
    script = "import sys, memjax.rollout.scheduler; assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
