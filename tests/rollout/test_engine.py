"""The engine against a full forward: in every slot, whatever else runs, however the prompt got into the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from memjax.checkpoint import load_model
from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions
from memjax.rollout.engine import Engine, EngineConfig
from memjax.rollout.local import make_engine
from memjax.sharding import ROLLOUT, Layout
from memjax.trajectory import SamplingParams
from tests.rollout.conftest import MAX_LENGTH


@dataclass
class Job:
    """One sample to run, from the `at`-th step on."""

    prompt: list[int]
    slot: int
    sampling: SamplingParams
    sample: int = 0
    at: int = 0
    eos: tuple[int, ...] | None = ()
    prefix: object = None


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


def prefill(engine, ids, existing=None):
    return engine.prefill(
        params=engine.weights, existing_prefix=existing, padded_tokens=np.asarray(ids, np.int32), true_length=len(ids)
    )


def run(engine: Engine, *jobs: Job) -> list[tuple[list[int], list[float]]]:
    """Decode until every job is over; the tokens and log probabilities of each."""
    state, drawn = engine.init_decode_state(), {id(job): ([], []) for job in jobs}
    owners: dict[int, Job] = {}
    waiting = sorted(jobs, key=lambda job: job.at)
    step = 0
    while waiting or owners:
        while waiting and waiting[0].at <= step:
            job = waiting.pop(0)
            prefix = job.prefix or prefill(engine, job.prompt)
            state = engine.insert(prefix, state, job.slot, sampling=job.sampling, sample=job.sample, eos=job.eos)
            owners[job.slot] = job
        state, result = engine.generate(engine.weights, state)
        result = result.convert_to_numpy()
        for slot in list(owners):
            if not result.valid[slot]:
                del owners[slot]
                continue
            tokens, logprobs = drawn[id(owners[slot])]
            tokens.append(int(result.tokens[slot]))
            logprobs.append(float(result.logprobs[slot]))
        step += 1
    return [drawn[id(job)] for job in jobs]


def params(max_tokens=12, **settings) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "temperature": 1.0, "seed": 7} | settings))


def test_logprobs_equal_those_of_a_full_forward_in_a_mixed_batch(engine, teacher):
    shared = prompt_of(37)
    prefix = prefill(engine, shared)
    jobs = [
        Job(prompt_of(1), 0, params(20)),
        Job(shared, 1, params(15, temperature=0.7, top_p=0.9), prefix=prefix),
        Job(shared, 2, params(30, temperature=1.5, top_k=20), sample=1, at=3, prefix=prefix),
        Job(prompt_of(70), 3, params(26, temperature=0.0), at=5),
        Job(prompt_of(16), 1, params(9), at=20),
    ]
    for job, (tokens, logprobs) in zip(jobs, run(engine, *jobs), strict=True):
        assert len(tokens) == job.sampling.max_tokens
        expected = teacher(job.prompt, tokens, job.sampling.temperature)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_greedy_tokens_are_the_likeliest(engine, teacher):
    prompt = prompt_of(9)
    ((tokens, _),) = run(engine, Job(prompt, 2, params(8, temperature=0.0)))
    for i, token in enumerate(tokens):
        others = [teacher(prompt, [*tokens[:i], other])[-1] for other in range(0, 276, 25)]
        assert teacher(prompt, tokens[: i + 1])[-1] >= max(others) - 1e-5
        assert token < 276


def test_same_seed_same_tokens_whatever_else_runs_and_in_whichever_slot(engine):
    job = Job(prompt_of(23), 0, params(20, top_p=0.95, top_k=50, seed=2**40 + 3))
    ((alone, _),) = run(engine, job)
    for slot in range(4):
        moved = Job(job.prompt, slot, job.sampling, at=4)
        others = [Job(prompt_of(11 * i + 5), i, params(25, seed=i), at=i) for i in range(4) if i != slot]
        assert run(engine, moved, *others)[0][0] == alone


def test_samples_and_seeds_give_different_tokens(engine):
    prefix = prefill(engine, prompt_of(10))
    jobs = [Job([], slot, params(seed=slot // 2), sample=slot % 2, prefix=prefix) for slot in range(4)]
    assert len({tuple(tokens) for tokens, _ in run(engine, *jobs)}) == 4


@pytest.mark.parametrize("cut", [1, 16, 31, 49])
def test_continuing_a_prefix_equals_one_prefill_and_leaves_it_as_it_was(engine, teacher, cut):
    prompt = prompt_of(50)
    start = prefill(engine, prompt[:cut])
    whole = prefill(engine, prompt[cut:], existing=start)
    assert whole.length == 50
    (tokens, logprobs), (again, again_logprobs) = run(
        engine, Job(prompt, 0, params(), prefix=whole), Job(prompt[:cut], 1, params(), prefix=start)
    )
    np.testing.assert_allclose(logprobs, teacher(prompt, tokens), atol=1e-4)
    np.testing.assert_allclose(again_logprobs, teacher(prompt[:cut], again), atol=1e-4)


@pytest.mark.parametrize("count", [3, 4])
def test_prompts_prefilled_together_decode_as_they_do_alone(engine, teacher, count):
    prompts = [np.asarray(prompt_of(n, seed=n), np.int32) for n in (1, 9, 5, 8)[:count]]
    prefix = engine.prefill_rows(params=engine.weights, prompts=prompts, length=8)
    # The last prompt has two slots, the third of four none, and slots stand in another order than rows.
    starts = [(row, slot, params(6, seed=row), slot) for row, slot in ((count - 1, 2), (1, 0), (count - 1, 3))]
    state = engine.insert_rows(prefix, engine.init_decode_state(), starts, eos=())
    drawn = []
    for _ in range(6):
        state, result = engine.generate(engine.weights, state)
        drawn.append(result.convert_to_numpy())
    for row, slot, sampling, sample in starts:
        tokens = [int(result.tokens[slot]) for result in drawn]
        prompt = prompts[row].tolist()
        assert tokens == run(engine, Job(prompt, 1, sampling, sample=sample))[0][0]
        np.testing.assert_allclose([result.logprobs[slot] for result in drawn], teacher(prompt, tokens), atol=1e-4)
    assert not drawn[-1].valid[1]


def test_a_small_window_has_two_lengths_for_short_prompts_and_a_single_slot_batches_only_there():
    assert EngineConfig.for_platform("cpu", 64, 128).batches == {32: 16, 64: 8}
    assert EngineConfig.for_platform("cpu", 8192, 4).batches == {64: 4}
    assert EngineConfig.for_platform("tpu", 8192, 64).batches == {128: 4}
    assert EngineConfig.for_platform("cpu", 64, 1).batches == {32: 1, 64: 1}
    assert EngineConfig.for_platform("cpu", 8192, 1).batches == {}


def test_the_bits_of_a_prompt_do_not_depend_on_its_row_or_on_the_others(engine):
    prompt = np.asarray(prompt_of(9), np.int32)
    caches = []
    for place in (0, 1, 3):
        prompts = [np.asarray(prompt_of(3 + i, seed=place), np.int32) for i in range(4)]
        prompts[place] = prompt
        cache = engine.prefill_rows(params=engine.weights, prompts=prompts[: place + 1], length=8).cache
        caches.append([np.asarray(leaf)[place] for leaf in jax.tree.leaves(cache)])
    for leaves in caches[1:]:
        for leaf, expected in zip(leaves, caches[0], strict=True):
            np.testing.assert_array_equal(leaf, expected)


def test_an_end_token_drawn_first_ends_the_slot(engine):
    prompt = prompt_of(14)
    ((tokens, _),) = run(engine, Job(prompt, 0, params(temperature=0.0)))
    ((ended, _),) = run(engine, Job(prompt, 0, params(temperature=0.0), eos=(tokens[0],)))
    assert ended == tokens[:1]


def test_max_tokens_one_draws_one(engine):
    ((tokens, _),) = run(engine, Job(prompt_of(5), 3, params(1)))
    assert len(tokens) == 1


def test_a_prompt_may_fill_the_window_exactly_and_no_further(engine, teacher):
    prompt = prompt_of(MAX_LENGTH - 6)
    ((tokens, logprobs),) = run(engine, Job(prompt, 0, params(6)))
    np.testing.assert_allclose(logprobs, teacher(prompt, tokens), atol=1e-4)
    state = engine.init_decode_state()
    with pytest.raises(ValueError, match="90 prompt tokens leave 6 of max_length 96, 7 are asked for"):
        engine.insert(prefill(engine, prompt), state, 0, sampling=params(7))
    with pytest.raises(ValueError, match="97 tokens do not fit the engine's max_length 96"):
        prefill(engine, prompt_of(MAX_LENGTH + 1))


def test_a_released_slot_is_dead_from_the_next_step_on(engine):
    state = engine.init_decode_state()
    prefix = prefill(engine, prompt_of(8))
    for slot in (0, 1):
        state = engine.insert(prefix, state, slot, sampling=params(), eos=())
    state, _ = engine.generate(engine.weights, state)
    state = engine.release(state, 0)
    for _ in range(2):
        state, result = engine.generate(engine.weights, state)
        assert result.convert_to_numpy().valid.tolist() == [False, True, False, False]


def test_swapped_weights_are_used_without_compiling(engine, loaded, teacher):
    job = Job(prompt_of(20), 0, params())
    ((before, _),) = run(engine, job)
    version, programs = engine.weights.current.version, dict(engine.programs._compiled)
    other = jax.tree.map(lambda leaf: leaf * 1.1, loaded.params)
    assert engine.weights.swap(other) == version + 1
    ((after, logprobs),) = run(engine, job)
    assert after != before
    np.testing.assert_allclose(logprobs, teacher(job.prompt, after, params=other), atol=1e-4)
    assert engine.weights.swap(loaded.params, version=9) == 9
    assert prefill(engine, job.prompt).version == 9
    assert run(engine, job)[0][0] == before
    assert engine.programs._compiled == programs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: {k: v for k, v in tree.items() if k != "norm"}, r"structure from those in use at \['norm'\]"),
        (lambda tree: tree | {"norm": {"weight": tree["norm"]["weight"][1:]}}, "is float32.63., the engine runs"),
        (lambda tree: tree | {"norm": {"weight": tree["norm"]["weight"].astype("bfloat16")}}, "is bfloat16"),
    ],
)
def test_weights_of_another_shape_are_refused(engine, loaded, change, message):
    with pytest.raises(ValueError, match=message):
        engine.weights.swap(change(loaded.params))


def test_bad_prompts_are_refused_with_their_numbers(engine):
    with pytest.raises(ValueError, match="no tokens"):
        prefill(engine, [])
    with pytest.raises(ValueError, match=r"must be in 0..319, got 5..320"):
        prefill(engine, [5, 320])
    with pytest.raises(ValueError, match="9 tokens were announced, 3 came"):
        engine.prefill(params=engine.weights, padded_tokens=np.zeros(3, np.int32), true_length=9)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 0},
        {"max_length": 8},
        {"prefill_buckets": ()},
        {"prefill_buckets": (64, 16)},
        {"max_length": 100, "prefill_buckets": (64, 128)},
    ],
)
def test_impossible_shapes_are_refused(settings):
    with pytest.raises(ValueError, match=r"got|must not pass"):
        EngineConfig(**settings)


@pytest.mark.parametrize("sizes", [(2, 1, 4), pytest.param((1, 1, 8), marks=pytest.mark.slow)])
def test_a_mesh_gives_the_tokens_of_one_device(engine, loaded, sizes):
    mesh = make_mesh(*sizes)
    split = replace(loaded, options=ModelOptions(layout=Layout(mesh, ROLLOUT)))
    sharded = make_engine(split, EngineConfig(slots=4, max_length=64, prefill_buckets=(16,)))
    jobs = [Job(prompt_of(30, i), i, params(12, seed=i, top_p=0.9)) for i in range(4)]
    for (tokens, logprobs), (whole, whole_logprobs) in zip(run(sharded, *jobs), run(engine, *jobs), strict=True):
        assert tokens == whole
        np.testing.assert_allclose(logprobs, whole_logprobs, atol=1e-4)


@pytest.mark.slow
def test_stacked_layers_give_the_tokens_of_unrolled_ones(engine, model_directory):
    stacked = load_model(model_directory, ModelOptions(scan_layers=True))
    scanned = make_engine(stacked, EngineConfig(slots=4, max_length=64, prefill_buckets=(16,)))
    job = Job(prompt_of(30), 1, params())
    assert run(scanned, job)[0][0] == run(engine, job)[0][0]


def test_the_cache_can_be_narrower_than_the_arithmetic(loaded):
    config = EngineConfig(slots=1, max_length=16, prefill_buckets=(16,), cache_dtype="bfloat16")
    cache = make_engine(loaded, config).init_decode_state().device["cache"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {"bfloat16"}
